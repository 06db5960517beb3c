"""The roofline: a machine's measured ceilings, and where every result lies below them.

Owns the ceilings' meaning, the speed-of-light fraction and the classification. Times and their uncertainty come from
``analysis.statistics``; FLOPs, exponentials and bytes from the workloads.

Model (Williams, Waterman, Patterson, "Roofline", CACM 52, 2009; the level-wise bandwidth of Ilic, Pratas, Sousa's
cache-aware roofline, IEEE CAL 13, 2014)
    A call takes at least the largest of three times: nominal FLOPs / rate, bytes / bandwidth, exponentials / exp rate.
    ``sol_fraction`` is that least time, with the *compulsory* bytes, over the measured time: the same yardstick for
    every implementation of a case. ``own_roof_fraction`` takes the bytes that the implementation moves by design
    instead: a diagnosis, which waste would improve.

Which bandwidth
    Warm calls (a CPU): that of the memory level the case's working set lives in, read off the machine's measured
    curve of bandwidth over working set (read and copy probes, whichever is faster; log-log between probed sizes,
    constant beyond them). The working set is all loaded input sets with their outputs: the engine alternates between
    them, so that data returns from a cache only where all of them fit.
    Burst and sustained calls (a GPU, L2 cold): the rate at which that many bytes can be read once. Only probes that
    sweep their buffer once count here: a repeated sweep of a small buffer measures the L2 cache.

Class
    ``class_ai``: FLOPs over the bytes moved, against the ridge point (rate / the same bandwidth): memory-bound below
    it, compute-bound from it on. The bytes are those counted at DRAM where Nsight Compute counted this implementation's
    call on this device (a single call on a cold L2: the burst regime), else those moved by design. ``bound_by``: the
    roof that the result comes closest to by its own traffic (by design), if it reaches 60 % of it: memory, compute,
    exp, or launch (the least call's time over the time). ``host`` where the record says that the device waited for the
    host; ``neither`` where no roof is near: latency, synchronisation, poor code.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import pandas as pd

from analysis.frame import Frame, rows_of
from benchmarks.engine.memory import INPUT_SETS
from impls.workloads.base import Case, CaseError, parse_case
from impls.workloads.ceiling import Ceiling

NEAR = 0.6
WARM, BURST = "warm", "burst"


@dataclass(frozen=True)
class Probe:
    """One measured ceiling.

    Attributes:
        case: id of the ceiling case.
        impl: what measured it.
        value: FLOP/s, exponentials/s, bytes/s, or (launch) seconds: of its best round.
        clock_mhz: clock of that round; NaN where it is unknown.
    """

    case: str
    impl: str
    value: float
    clock_mhz: float


@dataclass(frozen=True)
class Curve:
    """Bandwidth over working set: bytes, ascending, and bytes/s."""

    size: tuple[float, ...]
    bandwidth: tuple[float, ...]

    def at(self, size: float) -> float:
        """Bandwidth in bytes/s of a working set: log-log between the measured sizes, constant beyond them."""
        right = bisect.bisect_left(self.size, size)
        if right == 0 or right == len(self.size):
            return self.bandwidth[min(right, len(self.size) - 1)]
        (s0, s1), (b0, b1) = self.size[right - 1 : right + 1], self.bandwidth[right - 1 : right + 1]
        return float(b0 * (b1 / b0) ** (math.log(size / s0) / math.log(s1 / s0)))


@dataclass(frozen=True)
class Ceilings:
    """What one device was measured to do in one regime.

    Attributes:
        where: the device, in words.
        regime: ``warm``, ``burst`` or ``sustained``.
        rates: dtype -> FLOP/s (integer operations for i8).
        exp_rates: dtype -> exponentials/s.
        curves: ``read`` and ``copy`` -> bandwidth over working set.
        launch_s: time of the least call; None where it was not measured.
        probes: every probe behind these, for display.
    """

    where: str
    regime: str
    rates: dict[str, float] = field(default_factory=dict)
    exp_rates: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    launch_s: float | None = None
    probes: tuple[Probe, ...] = ()

    def bandwidth(self, size: float) -> float | None:
        """Best measured bandwidth, bytes/s, of a working set of ``size`` bytes; None where none was measured."""
        return max((curve.at(size) for curve in self.curves.values()), default=None)

    def memory_bandwidth(self) -> float | None:
        """Bandwidth of the largest working set measured, bytes/s: main memory, if the probes were large enough."""
        return self.bandwidth(math.inf) if self.curves else None

    def exp_rate(self) -> float | None:
        """Best exponentials/s of any dtype: which one an implementation takes is its own choice."""
        return max(self.exp_rates.values(), default=None)

    def ridge_point(self, dtype: str) -> float | None:
        """FLOP per byte of main memory from which ``dtype`` is compute-bound: rate / bandwidth."""
        rate, bandwidth = self.rates.get(dtype), self.memory_bandwidth()
        return None if rate is None or bandwidth is None else rate / bandwidth


Key = tuple[str, str, object, str]


def ceilings(frame: Frame) -> dict[Key, Ceilings]:
    """The ceilings in ``frame`` by (machine, device, threads, regime): the best of each probe over all its results."""
    chosen = frame.results[(frame.results["workload"] == "ceiling") & (frame.results["rounds"] > 0)]
    blocks = frame.blocks[frame.blocks["result"].isin(chosen.index)]
    best = blocks.loc[blocks.groupby("result")["median_us"].idxmin()].set_index("result")
    found: dict[Key, dict[str, Probe]] = defaultdict(dict)
    for row in chosen.itertuples():
        try:
            case = _case(row.case)
        except CaseError:
            continue
        if not isinstance(case, Ceiling):
            continue
        fastest = best.loc[row.Index]
        probe = Probe(row.case, row.impl, _value(case, fastest["median_us"] * 1e-6), float(fastest["clock_mhz"]))
        known = found[row.machine, row.device, row.threads, row.regime]
        if row.case not in known or (probe.value > known[row.case].value) != (case.probe == "launch"):
            known[row.case] = probe
    return {key: _assemble(key, probes.values()) for key, probes in found.items()}


def _value(case: Ceiling, seconds: float) -> float:
    if case.probe == "launch":
        return seconds
    work = {"rate": case.flops, "exp": case.exps}.get(case.probe, case.compulsory_bytes)()
    return work / seconds


def _assemble(key: Key, probes: Iterable[Probe]) -> Ceilings:
    machine, device, _, regime = key
    rates: dict[str, float] = {}
    exp_rates: dict[str, float] = {}
    points: dict[str, dict[float, float]] = defaultdict(dict)
    launch: float | None = None
    probes = tuple(sorted(probes, key=lambda p: p.case))
    for probe in probes:
        case = _case(probe.case)
        assert isinstance(case, Ceiling)
        if case.probe == "launch":
            launch = probe.value
        elif case.probe in ("rate", "exp"):
            into = rates if case.probe == "rate" else exp_rates
            into[case.dtype] = max(into.get(case.dtype, 0.0), probe.value)
        elif regime == WARM or case.repeats == 1:
            # Where the question is how fast so many bytes move once, a copy of n bytes moves 2 n: as does its
            # working set, which holds source and destination.
            size = float(case.bytes * (2 if case.probe == "copy" else 1))
            points[case.probe][size] = max(points[case.probe].get(size, 0.0), probe.value)
    curves = {name: Curve(*zip(*sorted(sizes.items()), strict=True)) for name, sizes in points.items()}
    where = device if machine == device else f"{device} ({machine})"
    return Ceilings(where, regime, rates, exp_rates, curves, launch, probes)


@dataclass(frozen=True)
class Placement:
    """Where one result lies below the ceilings. Fields are None where something is missing; ``note`` says what.

    Attributes:
        sol_fraction: least possible time over the measured time.
        sol_roof: what the least possible time consists of: ``memory``, ``compute`` or ``exp``.
        own_roof_fraction: the same with the bytes that the implementation moves by design.
        intensity: FLOPs over the bytes moved by design, FLOP/B.
        counted_bytes: what one call moved to and from DRAM, as counted; None where nobody counted.
        counted_intensity: FLOPs over the counted bytes, FLOP/B.
        ridge_point: FLOP/B, at the bandwidth that this case sees.
        class_ai: ``memory-bound`` or ``compute-bound``.
        bound_by: ``memory``, ``compute``, ``exp``, ``launch``, ``host`` or ``neither``.
        note: why fields are None, what could not be considered, or that a ceiling must be wrong.
    """

    sol_fraction: float | None = None
    sol_roof: str | None = None
    own_roof_fraction: float | None = None
    intensity: float | None = None
    counted_bytes: float | None = None
    counted_intensity: float | None = None
    ridge_point: float | None = None
    class_ai: str | None = None
    bound_by: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Work:
    """What one call of a case has to do: nominal FLOPs and exponentials, compulsory and occupied bytes."""

    flops: int
    exps: int
    compulsory_bytes: int
    total_bytes: int
    dtype: str


@cache
def work(case_id: str) -> Work:
    """The work of the case with this id. Raises CaseError where the id cannot be read."""
    case = _case(case_id)
    return Work(case.flops(), case.exps(), case.compulsory_bytes(), case.total_bytes(), case.compute_dtype)


def place(
    case: Work,
    seconds: float,
    roofs: Ceilings,
    *,
    traffic_bytes: float | None = None,
    counted_bytes: float | None = None,
    workspace_bytes: float = 0.0,
    flags: Sequence[str] = (),
) -> Placement:
    """Where a call of ``case`` that took ``seconds`` lies below ``roofs``.

    Args:
        case: its work; see ``work``.
        traffic_bytes: bytes moved by design; None counts as the compulsory bytes.
        counted_bytes: bytes that one call moved to and from DRAM, as counted; None where nobody counted.
        workspace_bytes: memory that the implementation works in, beside inputs and outputs.
        flags: the record's remarks; one that begins with ``host_bound`` says that the device waited for the host.
    """
    compulsory = case.compulsory_bytes
    traffic = traffic_bytes or compulsory
    intensity = case.flops / traffic
    counted_intensity = case.flops / counted_bytes if counted_bytes else None
    warm = roofs.regime == WARM
    loaded = INPUT_SETS * case.total_bytes
    bandwidth = roofs.bandwidth(loaded if warm else compulsory)
    held, moved = (loaded + workspace_bytes, loaded) if warm else (traffic, compulsory)
    own_bandwidth = bandwidth if held == moved else roofs.bandwidth(held)
    rate = roofs.rates.get(case.dtype)
    if bandwidth is None or own_bandwidth is None or rate is None:
        lacking = [] if rate is not None else [f"the rate of {case.dtype}"]
        lacking += [] if bandwidth is not None else ["the bandwidth"]
        reason = f"No measured ceiling for {' and '.join(lacking)} of {roofs.where} ({roofs.regime})."
        return Placement(
            intensity=intensity, counted_bytes=counted_bytes, counted_intensity=counted_intensity, note=reason
        )

    exp_rate, note = roofs.exp_rate(), None
    least = {"memory": compulsory / bandwidth, "compute": case.flops / rate}
    if case.exps:
        if exp_rate is None:
            note = f"No exp rate was measured on {roofs.where}: sol_fraction leaves exponentials out."
        else:
            least["exp"] = case.exps / exp_rate
    own = least | {"memory": traffic / own_bandwidth}
    sol_roof = max(least, key=least.__getitem__)

    near = {roof: time / seconds for roof, time in own.items()}
    own_fraction = max(near.values())
    if roofs.launch_s is not None:
        near["launch"] = roofs.launch_s / seconds
    nearest = max(near, key=near.__getitem__)
    ridge = rate / own_bandwidth
    if least[sol_roof] > seconds:
        note = f"Faster than the {sol_roof} ceiling that was measured: measure the ceilings again."
    bound_by = nearest if near[nearest] >= NEAR else "neither"
    if any(flag.startswith("host_bound") for flag in flags):
        bound_by = "host"
    return Placement(
        sol_fraction=least[sol_roof] / seconds,
        sol_roof=sol_roof,
        own_roof_fraction=own_fraction,
        intensity=intensity,
        counted_bytes=counted_bytes,
        counted_intensity=counted_intensity,
        ridge_point=ridge,
        class_ai="memory-bound" if (counted_intensity or intensity) < ridge else "compute-bound",
        bound_by=bound_by,
        note=note,
    )


def placements(frame: Frame, times_us: pd.Series, roofs: dict[Key, Ceilings] | None = None) -> pd.Series:
    """A Placement for every result in ``times_us`` (microseconds, indexed like ``frame.results``), but for ceilings."""
    roofs = ceilings(frame) if roofs is None else roofs
    rows = frame.results.loc[times_us.index]
    rows = rows[rows["workload"] != "ceiling"]
    used = ("case", "impl", "machine", "device", "threads", "regime", "traffic_bytes", "workspace_bytes", "flags")
    traffic = counted(frame)
    placed = []
    for row, time_us in zip(rows_of(rows, used), times_us[rows.index], strict=True):
        try:
            case = work(row.case)
        except CaseError as error:
            placed.append(Placement(note=f"This case cannot be read here: {error}."))
            continue
        below = roofs.get((row.machine, row.device, row.threads, row.regime))
        traffic_bytes = None if math.isnan(row.traffic_bytes) else row.traffic_bytes
        # One call on a cold L2 was counted: that says nothing of calls whose data a cache still holds.
        counted_bytes = traffic.get((row.machine, row.device, row.case, row.impl)) if row.regime == BURST else None
        if below is None:
            placed.append(
                Placement(
                    intensity=case.flops / (traffic_bytes or case.compulsory_bytes),
                    counted_bytes=counted_bytes,
                    counted_intensity=case.flops / counted_bytes if counted_bytes else None,
                    note=f"No ceilings were measured on {row.device} ({row.machine}, {row.regime}).",
                )
            )
            continue
        placed.append(
            place(
                case,
                time_us * 1e-6,
                below,
                traffic_bytes=traffic_bytes,
                counted_bytes=counted_bytes,
                workspace_bytes=0.0 if math.isnan(row.workspace_bytes) else row.workspace_bytes,
                flags=row.flags,
            )
        )
    return pd.Series(placed, index=rows.index, dtype="object")


def counted(frame: Frame) -> dict[tuple[str, str, str, str], float]:
    """Bytes counted at DRAM by (machine, device, case, implementation): those of the latest run that counted them."""
    rows = frame.profiles.sort_values("run", kind="stable")  # Run ids sort by time.
    keys = zip(rows["machine"], rows["device"], rows["case"], rows["impl"], strict=True)
    return {key: value for key, value in zip(keys, rows["counted_bytes"], strict=True) if value > 0}


@cache
def _case(case_id: str) -> Case:
    return parse_case(case_id)
