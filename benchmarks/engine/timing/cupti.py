"""Times on an NVIDIA GPU: spans of CUPTI activity, isolated launches with a cold L2 (the ``burst`` regime).

Owns a block of calls on a GPU. A call's span runs from the start of its first kernel, copy or memset to the end of its
last, on whatever stream: the same method for every stack. Its ``busy`` time is the union of that activity.

Activity is attributed by time: the device is idle and synchronised before and after each call, so what CUPTI saw
between two readings of its own clock belongs to the call, whichever thread launched it. (External correlation ids are
per host thread and miss what a library launches from a thread of its own.) The harness's own kernels are told by name.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from benchmarks.engine.buffers import copy_into
from benchmarks.engine.timing import gpu as gpus
from impls.contract import Program

METHOD = "cupti_span"
_BUFFER_BYTES = 16 * 2**20


class Tracer:
    """CUPTI's activity records of this process, collected since it was made."""

    def __init__(self) -> None:
        from cupti import cupti

        self._cupti = cupti
        self._seen: list[tuple[int, int, str]] = []
        kind = cupti.ActivityKind
        self._kinds = {int(kind.CONCURRENT_KERNEL), int(kind.MEMCPY), int(kind.MEMSET), int(kind.MEMCPY2)}
        cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), self._completed)
        for one in (kind.CONCURRENT_KERNEL, kind.MEMCPY, kind.MEMSET, kind.MEMCPY2):
            cupti.activity_enable(one)

    def now(self) -> int:
        """CUPTI's clock, ns; activity is stamped with the same."""
        return int(self._cupti.get_timestamp())

    def take(self) -> list[tuple[int, int, str]]:
        """(start, end, name) of all activity since the last take, in order of start."""
        self._cupti.activity_flush_all(1)
        seen, self._seen = self._seen, []
        return sorted(seen)

    def _completed(self, activities: list[Any]) -> None:
        for activity in activities:
            if activity.kind in self._kinds:
                self._seen.append((activity.start, activity.end, getattr(activity, "name", None) or "copy"))


@cache
def tracer() -> Tracer:
    """The process's tracer."""
    return Tracer()


def block(
    program: Program,
    loaded_sets: Mapping[int, Any],
    sets: Sequence[int],
    keep: Mapping[int, Mapping[str, np.ndarray]],
    poison: bool,
    timed: bool,
) -> dict[str, Any]:
    """Call ``program`` once for each of ``sets``, each call alone on an idle device with a cold L2.

    Arguments and errors are those of ``timing.cpu.block``.

    Returns:
        ``samples_us`` (spans, one per call), ``t0``, ``method``, and ``telemetry``: per call ``busy_us``, ``host_us``
        (until ``run`` returned) and ``kernels``; medians ``clock_mhz`` and, of the block, ``power_w``,
        ``temperature_c``, ``throttled`` (reasons that make the block worthless).
    """
    device, trace = gpus.gpu(), tracer()
    inputs = [loaded_sets[which] for which in sets]
    windows: list[tuple[int, int]] = []
    host_us, clocks = [], []
    collecting = gc.isenabled()
    gc.disable()
    try:
        device.ramp_up()
        trace.take()
        before = gpus.reading()
        t0 = time.time()
        for index, loaded in enumerate(inputs):
            if poison:
                program.poison(loaded)
                program.synchronize()
            device.flush_l2()
            device.stamp(0)
            device.synchronize()
            begin = trace.now()
            called = time.perf_counter_ns()
            result = program.run(loaded)
            returned = time.perf_counter_ns()
            program.synchronize()
            device.synchronize()
            windows.append((begin, trace.now()))
            device.stamp(1)
            device.synchronize()
            clocks.append(device.clock_mhz())
            host_us.append((returned - called) / 1e3)
            if index in keep:
                copy_into(keep[index], program.read_outputs(result))
            del result
        after = gpus.reading()
    finally:
        if collecting:
            gc.enable()
    spans = attribute(trace.take(), windows)
    return {
        "samples_us": [s["span_us"] for s in spans],
        "t0": t0,
        "method": METHOD,
        "telemetry": {
            "busy_us": [s["busy_us"] for s in spans],
            "kernels": [s["kernels"] for s in spans],
            "host_us": host_us,
            "clock_mhz": round(float(np.median(clocks)), 1),
            "power_w": round(max(before.power_w, after.power_w), 1),
            "temperature_c": max(before.temperature_c, after.temperature_c),
            "throttled": gpus.throttled(before.reasons | after.reasons),
        },
    }


class NothingSeen(RuntimeError):
    """A call that left no activity on the device: it did nothing, or CUPTI lost its records."""


def attribute(activity: Sequence[tuple[int, int, str]], windows: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Span and busy time of each call.

    Args:
        activity: (start ns, end ns, name), in order of start.
        windows: per call, CUPTI's clock before the call and after the device was idle again, ns.

    Returns:
        Per call ``span_us``, ``busy_us`` and ``kernels`` (how many pieces of activity).

    Raises:
        NothingSeen: a call left no activity.
    """
    calls = []
    for number, (begin, end) in enumerate(windows):
        mine = [a for a in activity if begin <= a[0] <= end and not a[2].startswith(gpus.OWN_PREFIX)]
        if not mine:
            raise NothingSeen(f"Call {number} left no activity on the device.")
        busy, reach = 0, mine[0][0]
        for start, stop, _ in mine:
            busy += max(0, stop - max(start, reach))
            reach = max(reach, stop)
        calls.append({"span_us": (reach - mine[0][0]) / 1e3, "busy_us": busy / 1e3, "kernels": len(mine)})
    return calls
