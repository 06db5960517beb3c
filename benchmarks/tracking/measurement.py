"""What ``setup_cache`` does: a suite's values at the present commit, measured by the engine where they are missing.

Owns the decision what is missing. The engine is called through the command, as anyone would: a run's records are the
same whoever asked for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from analysis import frame as frames
from benchmarks.engine import machine, records, session
from benchmarks.suites._suite import MEASUREMENT_S, Place, Suite, cases_here, implementations_here
from benchmarks.tracking import plugin, results
from impls.workloads.base import Case


class NotMeasured(Exception):
    """A suite cannot be measured now; the message says what to do."""


def of(suite: type[Suite]) -> dict[Place, dict[str, Any]]:
    """(implementation, values of the axes) -> metric -> value; where one failed, ``reason`` says why.

    Raises:
        NotMeasured: the checkout differs from the commit, or the engine could not run.
    """
    folder, commit = Path(os.environ["RIDGEMARK_RESULTS"]), os.environ["RIDGEMARK_COMMIT"]
    found = _read(suite, folder, commit)
    wanted = implementations_here(suite)
    lacking: dict[Case, list[str]] = {}
    for case in cases_here(suite):
        names = [name for name in wanted if (case.id, name) not in found]
        if names:
            lacking[case] = names
    if lacking:
        _measure(folder, commit, list(lacking), sorted(set().union(*lacking.values())))
        found = _read(suite, folder, commit)
    return {cell.parameters: cell.values | {"reason": cell.reason} for cell in found.values()}


def _read(suite: type[Suite], folder: Path, commit: str) -> dict[tuple[str, str], results.Cell]:
    frame = frames.load([records.folder(folder, machine.name())])
    here = plugin.machine_of(machine.describe(), machine.default_device().kind)
    return {
        (cell.case, cell.impl): cell
        for cell in results.cells(frame, [])
        if cell.suite == suite.key() and cell.machine == here and cell.commit == commit
    }


def _measure(folder: Path, commit: str, cases: list[Case], impls: list[str]) -> None:
    state = session.provenance(session.ROOT)
    if state["commit"] != commit or state["dirty"]:
        raise NotMeasured(f"Tracked files differ from commit {commit[:8]}: asv files results by commit. Commit first.")
    file = Path("cases.toml")
    file.write_text("".join(f'[[case]]\nid = "{case.id}"\n' for case in cases))
    chosen = [argument for name in impls for argument in ("--impl", name)]
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from benchmarks.cli import main; main()"),
            *("compare", "--cases", str(file), "--out", str(folder), "--budget", f"{MEASUREMENT_S / 2:.0f}s", *chosen),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotMeasured(f"The engine ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
