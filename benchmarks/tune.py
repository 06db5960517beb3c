"""Searches cuBLASLt's candidates in the regime in which they are reported, and keeps the best.

``python -m benchmarks.tune [--cases flagship] [CASE ...]`` times every candidate of every GEMM case in the burst
regime on this machine's GPU, and writes ``impls/cublas/tuned/<device>.json``: a choice made once, committed, and read
by ``cublas.searched``. Whether the choice computes the right thing is judged with every measurement, as ever.

A search back to back would favour what draws least power; isolated calls with a cold L2 prefer other kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np

from benchmarks.engine import cases as case_files
from benchmarks.engine import machine
from benchmarks.engine.timing import cupti
from impls.cublas.gemm import Default, Product, fused_epilogue, tuned_file
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm

# Candidates asked for; calls of the first look at each and of each later round; candidates in those rounds; rounds.
_MOST, _LOOK, _CALLS, _FINALISTS, _ROUNDS = 32, 6, 15, 6, 4


def search(case: Gemm) -> dict[str, Any]:
    """The fastest candidate of ``case``: a look at all, then rounds over the best few.

    Returns:
        ``candidate``, its ``rank`` in the heuristic's order, ``tried``, and median times of it and of the first, us.
    """
    program = Product(case, fused_epilogue(case))
    loaded = program.load(case.inputs(1))
    candidates = program.candidates(_MOST)
    times: dict[int, list[float]] = defaultdict(list)

    def look(rank: int, calls: int) -> None:
        sets = {0: program.rebound(loaded, candidates[rank])}
        samples = cupti.block(program, sets, [0] * (calls + 1), {}, False)["samples_us"][1:]
        times[rank].append(float(np.median(samples)))

    for rank in range(len(candidates)):
        try:
            look(rank, _LOOK)
        except RuntimeError as error:
            print(f"{case.id}: candidate {rank} fails: {error}", file=sys.stderr)
    tried = len(times)
    finalists = sorted({*sorted(times, key=lambda r: times[r][0])[:_FINALISTS], min(times)})
    times.clear()
    for _ in range(_ROUNDS):
        for rank in finalists:
            look(rank, _CALLS)
    medians = {rank: float(np.median(times[rank])) for rank in finalists}
    best = min(medians, key=medians.__getitem__)
    winner = candidates[best]
    program.release()
    return {
        "candidate": asdict(winner),
        "config": winner.config(),
        "rank": best,
        "tried": tried,
        "time_us": round(medians[best], 3),
        "first_us": round(medians[min(medians)], 3),
    }


def main() -> None:
    """Search and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="flagship", help="case file (default flagship)")
    parser.add_argument("case", nargs="*", help="cases in place of the file's")
    arguments = parser.parse_args()
    device = machine.device("cuda")
    wanted = [parse_case(c) for c in arguments.case] or [e.case for e in case_files.load(arguments.cases)]
    path = tuned_file(device.name)
    path.parent.mkdir(exist_ok=True)
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    import torch  # noqa: F401 (loads the library)

    from impls.cublas.kernels import lt

    if kept.get("cublaslt") != lt.version():
        kept = {"device": device.name, "cublaslt": lt.version(), "regime": "burst", "cases": {}}
    for case in wanted:
        if not isinstance(case, Gemm) or case.groups is not None:
            continue
        if Default().refuses(case, device):
            continue
        one = search(case)
        kept["cases"][case.id] = one
        kept["when"] = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(json.dumps(kept, indent=1) + "\n")
        gain = one["first_us"] / one["time_us"]
        print(f"{case.id}: rank {one['rank']} of {one['tried']}, {one['time_us']} us, {gain:.3f} of the first")


if __name__ == "__main__":
    main()
