"""Times on an NVIDIA GPU, the same for every stack: activity of single calls (burst), many in a row (sustained).

Owns a block of calls on a GPU.

**burst** (``block``): one call at a time on an idle device at full clocks with a cold L2. The call is launched behind a
closed gate (gpus): its kernels wait in their queue and run one after the other when the gate opens, so that the gaps
between them are the device's own, not what Python and the tracer cost the host. A call's time is its span, from the
opening of the gate, or the start of its first kernel after it, to the end of its last piece of activity, on whatever
stream. ``busy`` is the union of the activity: what ``ncu`` adds up as gpu__time_duration. A program that waits for its
own work within the call runs without a gate and says so (``held`` false): its span holds the host's gaps, as they are
its own. ``host_us`` is the time until ``run`` returns, with the tracer's part in it.

Activity is attributed by time: the device is idle and synchronised before and after each call, so what CUPTI saw
between two readings of its own clock belongs to the call, whichever thread launched it. (External correlation ids are
per host thread and miss what a library launches from a thread of its own.) The harness's own kernels are told by name.

**sustained** (``sustain``): calls back to back, input sets in turn, nothing flushed, the tracer off; first until
power's control has settled, then chunks of calls between two moments at which the device is idle. Time per call is the
time of a chunk by the host's clock over its calls: starting and draining a chunk adds some 20 us in 150 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks.engine.buffers import copiers, copy_into
from benchmarks.engine.timing import gpu as gpus
from impls.contract import Program

METHOD = "cupti_span"
SUSTAINED_METHOD = "host_span"
_BUFFER_BYTES = 2**20
#: Copies and memsets have no names, and get some that no kernel can have: they need no multiprocessor and do not wait
#: for the gate.
COPY, MEMSET = "[copy]", "[memset]"
# A kernel begins as soon as the gate's blocks have left, about 0.5 us before the gate's own end is stamped (H200, CUDA
# 13.0: constant within 30 ns). One stamped earlier than this was stamped while it waited in its queue.
_LEAVING_NS = 2000

# Sustained: seconds per chunk, and chunks that count.
_CHUNK_S, _CHUNKS = 0.15, 4
# Seconds of settling. An H200 from idle runs 8192^3 12 % faster for 0.1 s, until power is at its limit, and from then
# on within 2 % of its mean, with a swing of 0.9 s that more waiting does not end. Where it is hot from the
# implementation before, settling and counting take such a swing together: all begin at the same point of it.
_SETTLE_S, _HOT_SETTLE_S = 1.2, 0.3
# Calls on an idle device, which tell what a call costs the host.
_SINGLE_CALLS = 8

Activity = tuple[int, int, str]


class Tracer:
    """CUPTI's activity records of this process, collected since it was made; of the harness's own kernels the gate.

    cupti-python says where in a record a field lies. Its own objects, each over an array, cost 60 us a record, which
    made a third of a block's time: the records are read where CUPTI wrote them.
    """

    def __init__(self) -> None:
        from cupti import cupti

        self._cupti = cupti
        self._seen: list[Activity] = []
        kind = cupti.ActivityKind
        # As CUPTI 13.0, which cupti-python 13.0 is for, lays them out.
        self._layouts = {
            int(kind.CONCURRENT_KERNEL): Layout.of(cupti.activity_kernel10_dtype),
            int(kind.MEMCPY): Layout.of(cupti.activity_memcpy6_dtype, COPY),
            int(kind.MEMCPY2): Layout.of(cupti.activity_memcpy_pto_p4_dtype, COPY),
            int(kind.MEMSET): Layout.of(cupti.activity_memset4_dtype, MEMSET),
        }
        self._wanted = (kind.CONCURRENT_KERNEL, kind.MEMCPY, kind.MEMSET, kind.MEMCPY2)
        self.now()  # loads the library
        self._library = ctypes.CDLL("libcupti.so.13")
        self._room: dict[int, np.ndarray] = {}
        # Kept for as long as CUPTI may call them.
        self._callbacks = _REQUESTED(self._requested), _COMPLETED(self._completed)
        _succeeded(self._library.cuptiActivityRegisterCallbacks(*self._callbacks))
        self._enable()

    def now(self) -> int:
        """CUPTI's clock, ns; activity is stamped with the same."""
        return int(self._cupti.get_timestamp())

    def take(self) -> list[Activity]:
        """(start, end, name) of all activity since the last take, in order of start."""
        _succeeded(self._library.cuptiActivityFlushAll(1))
        seen, self._seen = self._seen, []
        return sorted(seen)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Nothing is traced inside the ``with`` block: tracing costs the host several microseconds a launch."""
        for kind in self._wanted:
            self._cupti.activity_disable(kind)
        try:
            yield
        finally:
            self._enable()

    def _enable(self) -> None:
        for kind in self._wanted:
            self._cupti.activity_enable(kind)

    def _requested(self, buffer: Any, size: Any, most: Any) -> None:
        room = np.empty(_BUFFER_BYTES // 8, np.uint64)
        self._room[room.ctypes.data] = room
        buffer[0], size[0], most[0] = room.ctypes.data, room.nbytes, 0

    def _completed(self, context: int, stream: int, buffer: int, size: int, valid: int) -> None:
        self._seen += activities(buffer, valid, self._layouts, self._library.cuptiActivityGetNextRecord)
        del self._room[buffer]


# cupti_activity.h: CUpti_BuffersCallbackRequestFunc and ...CompleteFunc.
_REQUESTED = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
# cupti_result.h: there is no other record in the buffer.
_MAX_LIMIT_REACHED = 12


def _succeeded(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUPTI says {status} (cupti_result.h).")


@dataclass(frozen=True)
class Layout:
    """Bytes into an activity record at which its fields lie; ``named`` is the name of one that has none of its own."""

    start: int
    end: int
    name: int | None
    named: str = ""

    @classmethod
    def of(cls, record: np.dtype[Any], named: str = "") -> Layout:
        """Of a record of cupti-python."""
        at = {name: field[1] for name, field in (record.fields or {}).items()}
        return cls(at["start"], at["end"], None if named else at["name"], named)


def activities(
    buffer: int, valid: int, layouts: Mapping[int, Layout], next_record: Callable[..., int]
) -> Iterator[Activity]:
    """The records that CUPTI left in ``valid`` bytes at ``buffer``, but for the harness's own kernels beside the gate.

    Args:
        buffer: an address.
        valid: bytes.
        layouts: kind of activity -> where its fields are; other kinds are left out.
        next_record: ``cuptiActivityGetNextRecord``.
    """
    record = ctypes.c_void_p()
    while (status := next_record(ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record))) == 0:
        at = record.value or 0
        layout = layouts.get(ctypes.c_uint32.from_address(at).value)
        if layout is None:
            continue
        name = layout.named
        if layout.name is not None:
            text = ctypes.c_char_p.from_address(at + layout.name).value
            name = text.decode(errors="replace") if text else "kernel"
            if name.startswith(gpus.OWN_PREFIX) and not name.startswith(gpus.GATE):
                continue
        start, end = (ctypes.c_uint64.from_address(at + field).value for field in (layout.start, layout.end))
        yield start, end, name
    if status != _MAX_LIMIT_REACHED:
        _succeeded(status)


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
    renew: Mapping[int, Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """Call ``program`` once for each of ``sets``, each call alone on an idle device with a cold L2.

    Arguments and errors are those of ``timing.cpu.block``.

    Returns:
        ``samples_us`` (spans, one per call), ``t0``, ``method``, and ``telemetry``: per call ``busy_us``; over the
        block the median ``clock_mhz`` and ``host_us``, ``kernels`` (most pieces of activity of a call), ``held`` (the
        gate held in every call), ``power_w``, ``temperature_c``, ``throttled`` (reasons that make it worthless),
        ``foreign`` (how many processes beside the harness's compute on the GPU), and ``spent``: seconds of the block
        that went into ramping up the clock, new contents, taking outputs back, reading the tracer, and NVML.
    """
    device, trace = gpus.gpu(), tracer()
    inputs, renew = dict(loaded_sets), renew or {}
    windows: list[tuple[int, int]] = []
    host_us, stamps = [], []
    held = True
    spent = dict.fromkeys(("ramp", "renewal", "outputs", "tracer", "readings"), 0.0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _adding(spent, "ramp"):
            device.ramp_up()
        with _adding(spent, "tracer"):
            trace.take()
        with _adding(spent, "readings"):
            before = gpus.reading()
        t0 = time.time()
        for index, which in enumerate(sets):
            if index in renew:
                with _adding(spent, "renewal"):
                    inputs[which] = renew[index]()
            loaded = inputs[which]
            if poison:
                program.poison(loaded)
                program.synchronize()
            device.flush_l2()
            if not held:
                device.stamp(0)  # else the gate does, as it opens
            device.synchronize()
            begin = trace.now()
            with device.gated() if held else contextlib.nullcontext(gpus.Gate(held=False)) as gate:
                called = time.perf_counter_ns()
                result = program.run(loaded)
                returned = time.perf_counter_ns()
            held = gate.held
            program.synchronize()
            device.synchronize()
            windows.append((begin, trace.now()))
            device.stamp(1)
            device.synchronize()
            stamps.append(device.stamps())
            host_us.append((returned - called) / 1e3)
            if index in keep:
                with _adding(spent, "outputs"):
                    copy_into(keep[index], program.read_outputs(result), copiers())
            del result
        with _adding(spent, "readings"):
            after, foreign = gpus.reading(), len(gpus.foreign_processes())
    finally:
        if collecting:
            gc.enable()
    with _adding(spent, "tracer"):
        spans = attribute(trace.take(), windows)
    return {
        "samples_us": [s["span_us"] for s in spans],
        "t0": t0,
        "method": METHOD,
        "telemetry": {
            "busy_us": [s["busy_us"] for s in spans],
            "kernels": max(s["kernels"] for s in spans),
            "held": held,
            "host_us": round(float(np.median(host_us)), 2),
            "clock_mhz": round(float(np.median([gpus.clock_mhz(each) for each in stamps])), 1),
            "power_w": round(max(before.power_w, after.power_w), 1),
            "temperature_c": max(before.temperature_c, after.temperature_c),
            "throttled": gpus.throttled(before.reasons | after.reasons),
            "foreign": foreign,
            "spent": spent,
        },
    }


def sustain(
    program: Program, loaded_sets: Mapping[int, Any], sets: Sequence[int], keep: Mapping[str, np.ndarray], hot: bool
) -> dict[str, Any]:
    """Call ``program`` back to back over ``sets`` in turn until it has settled, and then for four chunks of 0.15 s.

    Args:
        program: the program.
        loaded_sets: set -> what ``load`` or ``refill`` returned.
        sets: the sets that take turns.
        keep: output -> array that takes its copy after the last call, which is one of the last of ``sets``.
        hot: the device has just been busy for seconds, so that a short while is enough to settle.

    Returns:
        ``samples_us`` (per chunk, time per call), ``t0``, ``method`` and ``telemetry``: ``calls`` of a chunk,
        ``settled_s``, ``clock_mhz`` (median over chunks), ``power_w`` and ``energy_j`` (per call, by the board's energy
        counter over all chunks), ``temperature_c``, ``host_us`` (median time until ``run`` returned on an idle device,
        untraced), ``host_bound`` (the device had run out of work when the last call of a chunk was launched),
        ``throttled``.
    """
    device, trace = gpus.gpu(), tracer()
    inputs = [loaded_sets[which] for which in sets]
    collecting = gc.isenabled()
    gc.disable()
    try:
        with trace.off():
            host_us, each = [], []
            for number in range(_SINGLE_CALLS):
                device.synchronize()
                called = time.perf_counter()
                result = program.run(inputs[number % len(inputs)])
                host_us.append((time.perf_counter() - called) * 1e6)
                program.synchronize()
                device.synchronize()
                each.append(time.perf_counter() - called)
            calls = len(inputs) * max(1, round(_CHUNK_S / float(np.median(each)) / len(inputs)))
            settled, begin = 0.0, time.monotonic()
            while settled < (_HOT_SETTLE_S if hot else _SETTLE_S):
                _, now, _, _ = _chunk(program, device, inputs, calls)
                calls = len(inputs) * max(1, round(_CHUNK_S / now / len(inputs)))
                settled = time.monotonic() - begin
            t0, joules = time.time(), gpus.energy_j()
            chunks = [_chunk(program, device, inputs, calls) for _ in range(_CHUNKS)]
            joules, seconds = gpus.energy_j() - joules, time.time() - t0
            after = gpus.reading()
            result = chunks[-1][0]
            copy_into(keep, program.read_outputs(result), copiers())
            del result
    finally:
        if collecting:
            gc.enable()
    per_call = [now for _, now, _, _ in chunks]
    return {
        "samples_us": [now * 1e6 for now in per_call],
        "t0": t0,
        "method": SUSTAINED_METHOD,
        "telemetry": {
            "calls": calls,
            "settled_s": round(settled, 2),
            "clock_mhz": round(float(np.median([clock for _, _, clock, _ in chunks])), 1),
            "power_w": round(joules / seconds, 1),
            "energy_j": joules / seconds * float(np.median(per_call)),
            "temperature_c": after.temperature_c,
            "host_us": round(float(np.median(host_us)), 2),
            "host_bound": float(np.median([drained / now for _, now, _, drained in chunks])) < 2,
            "throttled": gpus.throttled(after.reasons),
        },
    }


def _chunk(program: Program, device: gpus.Gpu, inputs: Sequence[Any], calls: int) -> tuple[Any, float, float, float]:
    """The last call's result, seconds per call, SM clock in MHz, and seconds from the last launch to an idle device."""
    device.stamp(0)
    device.synchronize()
    begin = time.perf_counter()
    for number in range(calls):
        result = program.run(inputs[number % len(inputs)])
    launched = time.perf_counter()
    program.synchronize()
    device.synchronize()
    end = time.perf_counter()
    device.stamp(1)
    device.synchronize()
    return result, (end - begin) / calls, gpus.clock_mhz(device.stamps()), end - launched


@contextlib.contextmanager
def _adding(spent: dict[str, float], what: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    spent[what] += time.perf_counter() - begin


class NothingSeen(RuntimeError):
    """A call that left no activity on the device: it did nothing, or CUPTI lost its records."""


def attribute(activity: Sequence[Activity], windows: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Span and busy time of each call.

    A kernel stamped while the gate was closed came to the head of its queue then: it starts when the gate opens. Copies
    and memsets do not wait for the gate; what they took before it opened is added.

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
        within = [a for a in activity if begin <= a[0] <= end]
        opened = max((a[1] for a in within if a[2].startswith(gpus.GATE)), default=begin)
        mine = [a for a in within if not a[2].startswith(gpus.OWN_PREFIX)]
        free = [(start, stop) for start, stop, name in mine if name in (COPY, MEMSET)]
        early = sum(min(stop, opened) - start for start, stop in free if start < opened)
        after = sorted(
            (start if start > opened - _LEAVING_NS and name not in (COPY, MEMSET) else max(start, opened), stop)
            for start, stop, name in mine
            if stop > opened
        )
        if not mine:
            raise NothingSeen(f"Call {number} left no activity on the device.")
        span = busy = 0
        if after:
            busy, reach = 0, after[0][0]
            for start, stop in after:
                busy += max(0, stop - max(start, reach))
                reach = max(reach, stop)
            span = reach - after[0][0]
        calls.append({"span_us": (early + span) / 1e3, "busy_us": (early + busy) / 1e3, "kernels": len(mine)})
    return calls
