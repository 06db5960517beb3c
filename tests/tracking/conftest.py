"""A git repository of its own with planted records, and asv over it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asv.config import Config
from asv.plugin_manager import plugin_manager
from asv.repo import get_repo

from benchmarks.engine import records
from benchmarks.engine.session import ROOT

CONF = json.loads("\n".join(ln for ln in (ROOT / "asv.conf.json").read_text().splitlines() if "//" not in ln))
FACTS = {"name": "box", "cpu": "Some CPU", "arch": "x86_64", "cores": 2, "kernel": "6.1", "memory_bytes": 1 << 30}


class Repository:
    """Commits, and records stamped with them. Times are exact but for planted scatter, and seeded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch", "trunk")
        (folder / ".gitignore").write_text("/results/\n/site/\n/build/\n")
        conf = CONF | {"benchmark_dir": str(ROOT / "benchmarks" / "suites")}
        (folder / "asv.conf.json").write_text(json.dumps(conf))
        self.git("add", ".")
        self.commits: list[str] = []
        self.runs = 0
        self.rng = np.random.default_rng(0)

    def git(self, *arguments: str) -> str:
        identity = {f"GIT_{who}_{what}": "someone" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        at = f"{1700000000 + 86400 * len(getattr(self, 'commits', ()))} +0000"
        environ = os.environ | identity | {"GIT_AUTHOR_DATE": at, "GIT_COMMITTER_DATE": at}
        done = subprocess.run(
            ["git", *arguments], cwd=self.folder, env=environ, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, subject: str = "A change") -> str:
        self.git("commit", "--quiet", "--allow-empty", "--message", subject)
        self.commits.append(self.git("rev-parse", "HEAD"))
        return self.commits[-1]

    def measure(
        self,
        times_us: Mapping[tuple[str, str], float | str],
        *,
        commit: str | None,
        facts: Mapping[str, Any] = FACTS,
        device: Mapping[str, Any] | None = None,
        dirty: bool | None = False,
        noise: float = 0.002,
        regime: str = "warm",
        schema: int = records.SCHEMA,
        run: str | None = None,
        rounds: int = 10,
    ) -> str:
        """Write one run: (case, implementation) -> microseconds, or a status other than ok. Returns the run's id."""
        folder = records.folder(self.folder / "results", facts["name"])
        self.runs += 1
        run = run or f"20250101T{self.runs:06d}-0000"
        lines: list[dict[str, Any]] = [
            {
                "kind": "run",
                "started": "2025-01-01T00:00:00+00:00",
                "seed": 1,
                "machine": dict(facts),
                "device": dict(device or {"kind": "cpu", "name": facts["cpu"], "arch": "x86_64", "threads": 2}),
                "harness": {},
                "commit": commit,
                "dirty": dirty,
                "plan": {},
            }
        ]
        drift = np.exp(self.rng.normal(0, noise, rounds))
        for (case, impl), time in times_us.items():
            status = time if isinstance(time, str) else "ok"
            baseline = impl in ("blas.default", "blas.sdpa")
            for replica in (0, 1) if baseline and status == "ok" else (0,):
                blocks = [] if isinstance(time, str) else time * drift * np.exp(self.rng.normal(0, noise, rounds))
                lines.append(
                    {
                        "kind": "result",
                        "case": case,
                        "impl": impl,
                        "replica": replica,
                        "regime": regime,
                        "status": status,
                        "reason": None if status == "ok" else f"planted: {status}",
                        "method": "perf_counter_ns" if status == "ok" else None,
                        "rounds": [
                            {"round": i, "order": 0, "t0": float(i), "samples_us": [0.9 * t, t, 1.1 * t]}
                            for i, t in enumerate(blocks)
                        ],
                        "prepare_s": 0.25 if status == "ok" else None,
                        "errors": {"C": {"max_abs": 1e-6, "worst": 3.0 if status == "wrong" else 0.5}}
                        if status in ("ok", "wrong")
                        else {},
                        "traffic_bytes": None,
                        "workspace_bytes": 0,
                        "config": {},
                        "flags": [],
                        "seed": 1,
                        "complete": True,
                        "when": "2025-01-01T00:00:01+00:00",
                    }
                )
        lines.append({"kind": "end", "interrupted": False, "phases": {}})
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps({"schema": schema, "run": run} | line) + "\n" for line in lines)
        (folder / f"{run}.jsonl").write_text(text)
        return run

    def conf(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Any]:
        """asv's configuration and repository, with this folder as the current one."""
        monkeypatch.chdir(self.folder)
        conf = Config.load("asv.conf.json")
        for plugin in conf.plugins:
            plugin_manager.import_plugin(plugin)
        return conf, get_repo(conf)

    def run(self, *arguments: str, ok: tuple[int, ...] = (0,)) -> str:
        """Run a module (``asv``, ``benchmarks.tracking``) in the repository; its output."""
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "RIDGEMARK_MACHINE": FACTS["name"], "RIDGEMARK_DEVICE": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    def results(self, commit: str, machine: str = "box") -> dict[str, Any]:
        """asv's file, as JSON."""
        return json.loads((self.folder / "results" / machine / f"{commit[:8]}-harness.json").read_text())


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")
