"""Times on a CPU: ``perf_counter_ns`` around a blocking call, one sample per call, warm.

Owns a block of calls: what happens between two clock readings and around them. It does not own how many calls there are
or which inputs they take (trial). Checked and timed blocks go through the same code in the same order, so that an
implementation cannot tell them apart. Standard library and NumPy only: it runs in every stack's environment.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.engine.buffers import copy_into
from impls.contract import Program

METHOD = "perf_counter"


def block(
    program: Program,
    loaded_sets: Mapping[int, Any],
    sets: Sequence[int],
    keep: Mapping[int, Mapping[str, np.ndarray]],
    poison: bool,
    renew: Mapping[int, Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """Call ``program`` once for each of ``sets``.

    Outside the clock, before each call: the last call's result is let go of and, where asked, the outputs are poisoned.
    After a kept call its outputs are copied before anything else runs.

    Args:
        program: the program.
        loaded_sets: set -> what ``load`` or ``refill`` returned.
        sets: which set each call takes.
        keep: index of a call -> output -> array that takes its copy.
        poison: fill preallocated outputs with NaN before every call.
        renew: index of a call -> refills its set before it, and returns what is loaded from then on.

    Returns:
        ``samples_us`` (one per call), ``t0`` (seconds since the epoch, at the first call), ``method`` and
        ``telemetry``: ``wall_s`` and ``cpu_s`` of the block (CPU time of all threads), ``preemptions`` (involuntary
        context switches: another process wanted the CPU) and ``read_us`` {index: time from the clock's stop until a
        kept call's outputs were had}, which is long where work was put off from the call into the reading.

    Raises:
        WrongArrays: a kept call's outputs have not the names, shapes or dtypes of their copies.
    """
    clock, run, fill, read = time.perf_counter_ns, program.run, program.poison, program.read_outputs
    inputs, renew = dict(loaded_sets), renew or {}
    elapsed = [0] * len(sets)
    read_us: dict[int, float] = {}
    collecting = gc.isenabled()
    gc.disable()
    try:
        preempted = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        t0, wall, cpu = time.time(), clock(), time.process_time_ns()
        for index, which in enumerate(sets):
            if index in renew:
                inputs[which] = renew[index]()
            loaded = inputs[which]
            if poison:
                fill(loaded)
            begin = clock()
            result = run(loaded)
            end = clock()
            if index in keep:
                outputs = read(result)
                was_read = clock()
                copy_into(keep[index], outputs)
                read_us[index] = (was_read - end) / 1e3
                del outputs
            # Let go of outside the clock: freeing a large output may mean unmapping it.
            del result
            elapsed[index] = end - begin
        wall, cpu = clock() - wall, time.process_time_ns() - cpu
        preempted = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - preempted
    finally:
        if collecting:
            gc.enable()
    return {
        "samples_us": [ns / 1e3 for ns in elapsed],
        "t0": t0,
        "method": METHOD,
        "telemetry": {
            "wall_s": wall / 1e9,
            "cpu_s": cpu / 1e9,
            "preemptions": preempted,
            "read_us": {str(index): us for index, us in read_us.items()},
        },
    }
