"""A process that Nsight Compute watches: calls programs once each, between two sweeps that count with them.

Owns what happens on the device in a profiled process and in which order; ``benchmarks.profile`` starts it under ``ncu``
and reads the counters. It runs in a stack's environment: standard library, NumPy, ``impls`` and cuda-bindings only.

For each program: build it, load one set of inputs, a few calls that nobody counts (first calls compile, autotune and
allocate), a sweep over a buffer larger than L2 that nobody counts either, and then a *window*, the only part that is
counted: such a sweep, one call, such a sweep. The first sweep finds L2 clean, so what it writes is not the program's
but the measurement's; the last one drives the call's dirty lines out of L2, which are written to DRAM only then. Both
sweeps only read, and are told from the call's kernels by their name.

    python -m benchmarks.engine.profiled JOB ANSWERS

JOB is a JSON file: ``device``, ``seed``, ``seconds`` after which no program is begun, ``programs`` [{``impl``,
``case``}]. ANSWERS gets one JSON line per program, in order, as soon as it is done: ``impl``, ``case``, ``status``
(``ok``, ``unsupported``, ``failed``; ``left`` where it was not begun, which has no more), ``reason``, ``config`` and
``window``, the number of its window, or null where it got none.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.timing import gpu as gpus
from impls import registry
from impls.contract import Device, Unsupported
from impls.workloads.base import parse_case

#: Name of the sweep's kernel: a window begins and ends with it.
SWEEP = gpus.OWN_PREFIX + "read"
_WARM_CALLS = 3


class Windows:
    """The counted parts of this process, numbered from 0."""

    def __init__(self) -> None:
        self.opened = 0

    def call(self, program: Any, loaded: Any) -> int:
        """One call in a window of its own; the window is closed whatever happens. Returns its number."""
        from cuda.bindings import driver

        device, number = gpus.gpu(), self.opened
        device.flush_l2()
        device.synchronize()
        self.opened += 1
        gpus.checked(driver.cuProfilerStart())
        try:
            device.flush_l2()
            device.synchronize()
            result = program.run(loaded)
            program.synchronize()
            device.synchronize()
            del result
        finally:
            device.flush_l2()
            device.synchronize()
            gpus.checked(driver.cuProfilerStop())
        return number


def profile(
    impl: str, case_id: str, device: Device, inputs: Mapping[str, np.ndarray], windows: Windows
) -> dict[str, Any]:
    """Build, warm up and call one program; the answer's line. Raises nothing but what ends the process."""
    answer: dict[str, Any] = {"impl": impl, "case": case_id, "reason": None, "config": {}, "window": None}
    opened = windows.opened
    try:
        case = parse_case(case_id)
        program = registry.find(impl, case.workload).prepare(case, device)
        try:
            loaded = program.load(inputs)
            for _ in range(_WARM_CALLS):
                program.run(loaded)
                program.synchronize()
            windows.call(program, loaded)
            answer |= {"status": "ok", "config": program.config}
            del loaded
        finally:
            program.release()
    except Unsupported as refusal:
        answer |= {"status": "unsupported", "reason": str(refusal)}
    except Exception as error:
        answer |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    gc.collect()
    if windows.opened > opened:
        answer["window"] = opened
    return answer


def main() -> None:
    """Profile every program of the job, until its time is over."""
    begin = time.monotonic()
    job = json.loads(Path(sys.argv[1]).read_text())
    device = Device(**{**job["device"], "features": frozenset(job["device"]["features"])})
    windows = Windows()
    made: tuple[str, dict[str, np.ndarray]] = ("", {})
    with Path(sys.argv[2]).open("a") as answers:
        for one in job["programs"]:
            if time.monotonic() - begin > job["seconds"]:
                answers.write(json.dumps({"impl": one["impl"], "case": one["case"], "status": "left"}) + "\n")
                continue
            if made[0] != one["case"]:  # programs of one case stand together and share its inputs
                made = (one["case"], parse_case(one["case"]).inputs(job["seed"]))
            answer = profile(one["impl"], one["case"], device, made[1], windows)
            answers.write(json.dumps(answer, default=str) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
