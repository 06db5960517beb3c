"""The portability matrix: what is committed is complete, and the module that made it still makes it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import environments
from benchmarks.engine.cases import load
from impls.iree import targets

ROOT = Path(__file__).parents[2]


def check(matrix: dict[str, Any], cases: set[str]) -> None:
    assert {c["case"] for c in matrix["cases"]} == cases
    results = {(r["case"], r["target"]): r for r in matrix["results"]}
    assert set(results) == {(c, t.name) for c in cases for t in targets.TARGETS}
    for result in results.values():
        assert result["cpu_seconds"] > 0
        if result["compiles"]:
            assert result["reason"] is None
            assert result["module_bytes"] > 1000
        else:
            assert result["reason"].endswith(".")
            assert result["module_bytes"] is None
    assert all(results[c, "host"]["compiles"] for c in cases)


def test_committed_matrix_covers_every_quick_case() -> None:
    matrix = json.loads((ROOT / "results" / "records" / "portability.json").read_text(encoding="utf-8"))
    check(matrix, {entry.case.id for entry in load("quick")})
    lock = (ROOT / "impls" / "locks" / "iree-cpu.lock").read_text(encoding="utf-8")
    for distribution, version in matrix["versions"].items():
        assert f"{distribution}=={version}" in lock


@pytest.mark.slow
def test_matrix_of_one_case(tmp_path: Path) -> None:
    found = environments.find("iree", "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"{found.reason} {found.remedy}")
    out = tmp_path / "matrix.json"
    command = [str(found.python), "-m", "impls.iree.portability", "--out", str(out), "gemm:16x32x48:f32:bias"]
    subprocess.run(command, cwd=ROOT, env={**found.environ}, check=True, capture_output=True)
    matrix = json.loads(out.read_text(encoding="utf-8"))
    check(matrix, {"gemm:16x32x48:f32:bias"})
    sizes = {r["target"]: r["module_bytes"] for r in matrix["results"]}
    assert len(set(sizes.values())) > 5  # other code for other machines


def test_a_case_that_cannot_be_is_named(tmp_path: Path) -> None:
    found = environments.find("iree", "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"{found.reason} {found.remedy}")
    command = [str(found.python), "-m", "impls.iree.portability", "--out", str(tmp_path / "x"), "gemm:0x1x1:f32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "M is 0" in done.stderr
