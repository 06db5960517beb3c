"""How good is the harness itself? Overhead of a comparison, and how well its ratios repeat.

``python -m benchmarks.harness`` runs the same comparison several times over the baseline and its rivals and writes what
it saw to ``results/records/<machine>/harness.json``: a measurement of this project, kept beside its results. It asserts
nothing.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from analysis import table
from benchmarks.engine import environments, machine, records, session
from benchmarks.engine.progress import Progress
from impls import registry
from impls.workloads.base import parse_case

# Calls of about 1 ms and 6 ms on two cores, and one attention: long enough for A/A ratios to mean something.
CASES = ("gemm:512x512x512:f32", "gemm:1024x1024x1024:f32", "attention:b1h8s512d64:f32:causal")
RIVALS = ("xla.default", "xla.dot_product_attention")


def study(repeats: int, console: Console) -> dict[str, Any]:
    """Run the comparison ``repeats`` times, each in fresh processes, and summarise.

    Returns:
        Per repeat: shares of the wall time by phase (``overhead`` is what is neither preparation, reference, judging
        nor kernel), and the A/A and rival ratios per case; and their spread over the repeats.
    """
    device = machine.default_device()
    implementations = registry.select(["blas.default", "blas.sdpa", *RIVALS])
    built = {s: environments.build(s, device.kind, console.print) for s in session.stacks_of(implementations)}
    cases = tuple(map(parse_case, CASES))
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            path = Path(folder) / f"{number}.jsonl"
            writer = records.Writer(path, records.new_run_id())
            plan = session.Plan(cases, implementations, None, secrets.randbits(31))
            one = session.Session(plan, device=device, environments=built, missing={}, writer=writer)
            with Progress(console, len(cases)) as progress:
                if not one.run(progress):
                    raise KeyboardInterrupt
            writer.close()
            runs.append(_summary(path, one.phases.seconds))
    return {
        "machine": machine.describe(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **session.provenance(session.ROOT),
        "repeats": runs,
        "spread": _spread(runs),
    }


def _summary(path: Path, phases: dict[str, float]) -> dict[str, Any]:
    rows = table.rows(records.read(path))
    useful = sum(phases.get(name, 0.0) for name in ("prepare", "reference", "judge", "inputs", "kernel"))
    return {
        "wall_s": round(phases["wall"], 2),
        "overhead": round(1 - useful / phases["wall"], 4),
        "phases_s": {name: round(value, 2) for name, value in phases.items()},
        "time_us": {f"{r.case} {r.impl}": r.time_us for r in rows if r.time_us},
        "aa_ratio": {r.case: r.aa_ratio for r in rows if r.aa_ratio},
        "ratio": {f"{r.case} {r.impl}": r.ratio for r in rows if r.ratio and r.verdict != "baseline"},
    }


def _spread(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Per figure, the least, the median and the largest over the repeats."""

    def three(values: list[float]) -> list[float]:
        return [round(float(f(values)), 4) for f in (np.min, np.median, np.max)]

    spread: dict[str, Any] = {"overhead": three([r["overhead"] for r in runs])}
    for figure in ("aa_ratio", "ratio"):
        keys = sorted({k for r in runs for k in r[figure]})
        spread[figure] = {k: three([r[figure][k] for r in runs if k in r[figure]]) for k in keys}
    return spread


def main() -> None:
    """Run the study and write its file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="comparisons to run (default 5)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder (default results)")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    seen = study(arguments.repeats, console)
    path = records.folder(arguments.out, machine.name()) / "harness.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(seen, indent=1) + "\n")
    console.print_json(json.dumps(seen["spread"]))
    console.print(f"Written: {path}")


if __name__ == "__main__":
    main()
