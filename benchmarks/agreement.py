"""Do our GPU times agree with those of other tools, and with themselves? And what would they be, taken otherwise?

``python -m benchmarks.agreement`` runs on a machine with an NVIDIA GPU and writes
``results/records/<machine>/agreement.json``, a measurement of this project that is kept beside its results; ``--show
FILE`` prints the tables of one. It asserts nothing: what is out of bounds is written down as such.

- **nvbench** (package ``cuda-bench``): the same launches of the same program in the same process, in turn with ours.
  nvbench's cold time lies between two CUDA events around the call in its stream, behind a blocking kernel; it flushes
  by overwriting as many bytes as L2 holds. Ours flushed by writes is taken beside it. What the events cost is what
  nvbench gives the least launch beyond ours (``events_us``): the raw difference is judged, and below 200 us also the
  difference without it.
- **Nsight Compute** (``ncu``): gpu__time_duration of the call's kernels, in a process of its own that flushes as we do
  (``--cache-control none``) and leaves the clocks alone (``--clock-control none``). It runs kernels one by one, each
  after an idle while, and sees no memset: it is held against our kernels' own durations, without the gate, each call
  after a rest. Where power decides the clock, what takes the same cycles takes another time; cycles are shown beside.
- **twins**: the same case in two worker processes, in turn, over several runs, each of two new processes: the ratio of
  their times.
- **effects**: the same call with one thing changed: the first of a process, or after idling, in place of ramped-up
  clocks; L2 flushed by writes, or not at all; without the gate; zeros in place of normals; sustained in place of burst.

It needs an interpreter that holds torch, cupti-python and cuda-bench, and ``ncu`` on the PATH. Every part runs in a
process of its own with a time limit; one that fails is recorded as failed with its last words.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import buffers, machine, records, session
from benchmarks.engine.pool import Pool, Worker, WorkerSpec
from benchmarks.engine.timing import cupti
from benchmarks.engine.timing import gpu as gpus
from impls import registry
from impls.contract import Program
from impls.workloads.base import Case, parse_case
from impls.workloads.dtypes import dtype

#: Implementation and case of every call: the least there is, and from 3 us to 1.4 ms on an H200.
CALLS = {
    "least launch": ("ceilings.gpu", "ceiling:launch"),
    "GEMM 256^3": ("cublas.default", "gemm:256x256x256:bf16"),
    "GEMM 1024^3": ("cublas.default", "gemm:1024x1024x1024:bf16"),
    "GEMM M=16, N=K=8192": ("cublas.default", "gemm:16x8192x8192:bf16:nt"),
    "copy 64 MiB": ("ceilings.gpu", "ceiling:copy:64MiB:repeats=1"),
    "GEMM 4096^3": ("cublas.default", "gemm:4096x4096x4096:bf16"),
    "GEMM 8192^3": ("cublas.default", "gemm:8192x8192x8192:bf16"),
}
#: Cases of the twins: about 10 us and above 1 ms.
TWINS = ("gemm:1024x1024x2048:bf16", "gemm:8192x8192x8192:bf16")
_EFFECTS = ("GEMM 1024^3", "GEMM M=16, N=K=8192", "GEMM 4096^3", "GEMM 8192^3")
_IDLE, _SUSTAINED = "GEMM 4096^3", ("GEMM 4096^3", "GEMM 8192^3")

#: Agreement: within so much of our time where it is above ``LONG_US``, within so many us up to there.
LONG_US, SHARE, CONSTANT_US = 200.0, 0.02, 2.0
#: Twins: how far a run's ratio may be from one, for calls from 1 ms and for shorter ones.
TWIN_MS, TWIN_BOUNDS = 1.0, (0.002, 0.01)

# Rounds of (ours, nvbench); calls of each; calls under ncu, and of ours held against them.
_ROUNDS, _CALLS, _NCU_CALLS = 3, 24, 8
# Many short rounds: rounds scatter more than the calls of one.
_RUNS, _RUN_ROUNDS, _RUN_CALLS = 5, 24, 12
_EFFECT_ROUNDS, _EFFECT_CALLS, _IDLE_S, _IDLE_TIMES = 5, 10, 4.0, 2
# Before each take of a round: none finds the power that the one before drew. Before each call that is held against ncu.
_REST_S, _CALL_REST_S = 0.1, 0.03
# Seconds that a part may take.
_LIMITS = {"nvbench": 60, "launches": 60, "effects": 60, "twins": 90}
_NCU_METRICS = {"gpu__time_duration.sum": "time_us", "sm__cycles_elapsed.avg.per_second": "clock_mhz"}
_SEED = 20


@dataclass(frozen=True)
class How:
    """How a burst of calls is made; the defaults are ours.

    Attributes:
        flush: ``clean`` (L2 filled by reads), ``dirty`` (by writes) or ``none``.
        gated: launched behind the gate.
        ramped: the clocks are ramped up before.
        apart: each call after a rest and a ramp-up of its own.
    """

    flush: str = "clean"
    gated: bool = True
    ramped: bool = True
    apart: bool = False


# -- in a part's process ----------------------------------------------------------------------------------------------


@dataclass
class Built:
    """A program and what it needs to be called."""

    case: Case
    program: Program
    inputs: Mapping[str, np.ndarray]
    loaded: Any

    @classmethod
    def of(cls, call: str, folder: Path) -> Built:
        """The program of a call, over the inputs that the study drew."""
        name, case_id = CALLS[call]
        case = parse_case(case_id)
        program = registry.find(name, case.workload).prepare(case, machine.device("cuda"))
        drawn = json.loads((folder / "inputs.json").read_text())[case_id]
        inputs = {n: buffers.view(d) for n, d in drawn.items()}
        return cls(case, program, inputs, program.load(inputs))


class Dirt:
    """Device memory that is written to fill L2 with dirty lines."""

    def __init__(self) -> None:
        import torch

        self._bytes = torch.empty(gpus.FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def write(self) -> None:
        """All of it."""
        self._bytes.fill_(1)


def observe(built: Built, calls: int, how: How = How(), dirt: Dirt | None = None) -> dict[str, float]:
    """A burst as ``cupti.block`` makes it, but for what ``how`` changes.

    Returns:
        Medians over the calls: ``span_us``, ``busy_us``, ``kernels_us`` (busy time of kernels alone, without copies and
        memsets), ``clock_mhz``.
    """
    device, trace = gpus.gpu(), cupti.tracer()
    windows: list[tuple[int, int]] = []
    clocks = []
    if how.ramped:
        device.ramp_up()
    trace.take()
    for _ in range(calls):
        if how.apart:
            time.sleep(_CALL_REST_S)
            device.ramp_up()
        if how.flush == "clean":
            device.flush_l2()
        elif how.flush == "dirty":
            assert dirt is not None
            dirt.write()
        device.stamp(0)
        device.synchronize()
        begin = trace.now()
        with device.gated() if how.gated else contextlib.nullcontext():
            built.program.run(built.loaded)
        built.program.synchronize()
        device.synchronize()
        windows.append((begin, trace.now()))
        device.stamp(1)
        device.synchronize()
        clocks.append(gpus.clock_mhz(device.stamps()))
    activity = trace.take()
    spans = cupti.attribute(activity, windows)
    kernels = cupti.attribute([a for a in activity if a[2] not in (cupti.COPY, cupti.MEMSET)], windows)
    return {
        "span_us": _median([s["span_us"] for s in spans]),
        "busy_us": _median([s["busy_us"] for s in spans]),
        "kernels_us": _median([k["busy_us"] for k in kernels]),
        "clock_mhz": _median(clocks),
    }


def _harness(built: Built, calls: int) -> dict[str, float]:
    """The harness's own burst: ``cupti.block``; its first call does not count, as in a comparison."""
    block = cupti.block(built.program, {0: built.loaded}, [0] * (calls + 1), {}, False)
    return {"span_us": _median(block["samples_us"][1:]), "clock_mhz": block["telemetry"]["clock_mhz"]}


class _DefaultStream:
    """The stream that the programs launch into, which nvbench is told to time."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0)


def part_nvbench(folder: Path) -> dict[str, Any]:
    """Per call: ours and nvbench's in turn, round by round; nvbench runs once in the life of a process.

    Returns:
        Per call, medians over rounds: ``harness`` (``cupti.block``), ``dirty`` (flushed by writes), ``nvbench``, and
        ``observed`` (kernels as ncu has them: no gate, each call after a rest); or ``failed``.
    """
    import cuda.bench as bench

    built: dict[str, Built] = {}
    dirt = Dirt()
    seen: dict[str, dict[str, list[dict[str, float]]]] = {
        c: {"harness": [], "observed": [], "dirty": []} for c in CALLS
    }
    failed: dict[str, str] = {}

    def in_turn(state: Any) -> None:
        call = state.get_string("call")

        def nvbench(one: Built) -> None:
            state.set_stream(_DefaultStream())
            gpus.gpu().ramp_up()
            with cupti.tracer().off():
                state.exec(lambda launch: one.program.run(one.loaded), batched=False)

        takes: dict[str, Callable[[Built], dict[str, float] | None]] = {
            "harness": lambda one: _harness(one, _CALLS),
            "observed": lambda one: observe(one, _NCU_CALLS, How(gated=False, apart=True)),
            "dirty": lambda one: observe(one, _CALLS, How(flush="dirty"), dirt),
            "nvbench": nvbench,
        }
        try:
            if call not in built:
                built[call] = Built.of(call, folder)
            order = list(takes)
            first = state.get_int64("round") % len(order)
            for name in order[first:] + order[:first]:
                time.sleep(_REST_S)
                taken = takes[name](built[call])
                if taken is not None:
                    seen[call][name].append(taken)
        except Exception as error:
            failed[call] = f"{type(error).__name__}: {error}"
            state.skip("failed")

    benchmark = bench.register(in_turn)
    benchmark.add_string_axis("call", list(CALLS))
    benchmark.add_int64_axis("round", list(range(_ROUNDS)))
    benchmark.set_stopping_criterion("sample-count")
    benchmark.set_criterion_param_int64("target-samples", _CALLS)
    file = folder / "nvbench.json"
    bench.run_all_benchmarks(["agreement", "--json", str(file), "--quiet"])
    theirs = nvbench_times(json.loads(file.read_text()))
    return {
        call: {"failed": failed.get(call, "nvbench took no time.")}
        if call not in theirs or call in failed
        else {name: _medians(runs) for name, runs in (seen[call] | {"nvbench": theirs[call]}).items()}
        for call in CALLS
    }


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians over runs, and the time of each in ``runs_us``."""
    time = "time_us" if "time_us" in runs[0] else "span_us"
    return {f: _median([r[f] for r in runs]) for f in runs[0]} | {"runs_us": [round(r[time], 3) for r in runs]}


def part_launches(folder: Path) -> dict[str, Any]:
    """The process that ncu watches: every call some times over, each after a flush that is profiled with it.

    Returns:
        ``done``: the calls that came through, in order, each with as many windows; ``failed``: the others, and why.
    """
    from cuda.bindings import driver

    device = gpus.gpu()
    done, failed = [], {}
    for call in CALLS:
        try:
            built = Built.of(call, folder)
            built.program.run(built.loaded)
            built.program.synchronize()
        except Exception as error:
            failed[call] = f"{type(error).__name__}: {error}"
            continue
        for _ in range(_NCU_CALLS):
            device.ramp_up()
            gpus.checked(driver.cuProfilerStart())
            device.flush_l2()
            device.synchronize()
            built.program.run(built.loaded)
            built.program.synchronize()
            gpus.checked(driver.cuProfilerStop())
        done.append(call)
        built.program.release()
    return {"done": done, "failed": failed}


def part_effects(folder: Path) -> dict[str, Any]:
    """Per call and change: time and clock, and the ratio to ours, paired by round."""
    idle_mhz = gpus.reading().clock_mhz
    first = observe(Built.of(_IDLE, folder), 1, How(ramped=False)) | {"idle_mhz": idle_mhz}
    dirt = Dirt()
    changes: dict[str, tuple[How, bool]] = {
        "ours": (How(), False),
        "flushed by writes": (How(flush="dirty"), False),
        "not flushed": (How(flush="none"), False),
        "without the gate": (How(gated=False), False),
        "zeros": (How(), True),
    }
    found: dict[str, Any] = {}
    for call in _EFFECTS:
        built = Built.of(call, folder)
        zeros = built.program.load({n: np.zeros_like(a) for n, a in built.inputs.items()})
        seen: dict[str, list[dict[str, float]]] = {change: [] for change in changes}
        for number in range(_EFFECT_ROUNDS):
            order = np.random.default_rng(number).permutation(list(changes))
            for change in map(str, order):
                how, zero = changes[change]
                one = replace(built, loaded=zeros) if zero else built
                seen[change].append(observe(one, _EFFECT_CALLS, how, dirt))
        if call == _IDLE:
            seen["first of a process"], seen["after idling"] = [first], []
            for _ in range(_IDLE_TIMES):
                time.sleep(_IDLE_S)
                idle_mhz = gpus.reading().clock_mhz
                seen["after idling"].append(observe(built, 1, How(ramped=False)) | {"idle_mhz": idle_mhz})
        found[call] = {change: _effect(times, seen["ours"]) for change, times in seen.items()}
        if call in _SUSTAINED:
            found[call]["sustained"] = _sustained(built, found[call]["ours"]["span_us"])
        built.program.release()
    return found


def _effect(times: Sequence[Mapping[str, float]], ours: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians, and the ratio to ours: of rounds where they pair, else of medians."""
    base = [o["span_us"] for o in ours]
    if len(times) != len(ours):
        base = [_median(base)] * len(times)
    return {
        figure: _median([t[figure] for t in times])
        for figure in ("span_us", "clock_mhz", "idle_mhz")
        if figure in times[0]
    } | {
        "ratio": twin_ratio([(t["span_us"], o) for t, o in zip(times, base, strict=True)]),
    }


def _sustained(built: Built, burst_us: float) -> dict[str, float]:
    loaded = {0: built.loaded, 1: built.program.load(built.inputs)}
    keep = {n: np.empty(s.shape, dtype(s.dtype).storage) for n, s in built.case.output_specs().items()}
    run = cupti.sustain(built.program, loaded, [0, 1], keep, hot=False)
    time_us = _median(run["samples_us"])
    telemetry = run["telemetry"]
    return {
        "span_us": time_us,
        "clock_mhz": telemetry["clock_mhz"],
        "ratio": time_us / burst_us,
        "power_w": telemetry["power_w"],
    }


def part_twins(folder: Path) -> dict[str, Any]:
    """The same case in two worker processes, in turn; two others for every run.

    Returns:
        Per case the median time, the ratio of every run, and how far the rounds of a run scatter (median over runs).
    """
    device = machine.device("cuda")
    drawn = json.loads((folder / "inputs.json").read_text())
    ratios: dict[str, list[float]] = {case: [] for case in TWINS}
    scatter: dict[str, list[float]] = {case: [] for case in TWINS}
    times: dict[str, list[float]] = {case: [] for case in TWINS}
    pool = Pool(session.ROOT, device, device.threads)
    try:
        spec = WorkerSpec("cublas", Path(sys.executable), {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
        # All at once, which takes as long as two: they are idle until their run.
        workers = [pool.start(spec, replica) for replica in range(2 * _RUNS)]
        with ThreadPoolExecutor(len(workers)) as threads:
            list(threads.map(lambda worker: _loaded(worker, drawn), workers))
        for run in range(_RUNS):
            twins = workers[2 * run : 2 * run + 2]
            for case in TWINS:
                pairs = []
                for number in range(_RUN_ROUNDS):
                    in_turn = twins if (run + number) % 2 else twins[::-1]
                    taken = {w.replica: _twin_block(w, case) for w in in_turn}
                    pairs.append((taken[2 * run], taken[2 * run + 1]))
                ratios[case].append(twin_ratio(pairs))
                scatter[case].append(spread(pairs))
                times[case] += [a for a, _ in pairs]
    finally:
        pool.stop()
    return {
        case: {"time_us": _median(times[case]), "ratios": ratios[case], "spread": _median(scatter[case])}
        for case in TWINS
    }


def _loaded(worker: Worker, drawn: Mapping[str, Any]) -> None:
    for case in TWINS:
        worker.call("prepare", 120, program=case, impl="cublas.default", case=case)
        for which in (0, 1):
            worker.call("load", 60, program=case, set=which, inputs=drawn[case])


def _twin_block(worker: Worker, case: str) -> float:
    sets = [number % 2 for number in range(_RUN_CALLS + 1)]
    block = worker.call("block", 60, program=case, sets=sets, keep={}, poison=False)
    return _median(block["samples_us"][1:])


# -- figures ----------------------------------------------------------------------------------------------------------


def _median(values: Sequence[float]) -> float:
    return round(float(np.median(values)), 4)


def twin_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Median over rounds of the ratio first / second."""
    return round(float(np.median([a / b for a, b in pairs])), 6)


def spread(pairs: Sequence[tuple[float, float]]) -> float:
    """Half the interquartile range of the rounds' ratios: what a round adds, beside what the processes differ by."""
    low, high = np.percentile([a / b for a, b in pairs], [25, 75])
    return round(float(high - low) / 2, 6)


def agrees(ours_us: float, theirs_us: float) -> bool:
    """Whether two times of the same call are within the bounds."""
    bound = SHARE * ours_us if ours_us > LONG_US else CONSTANT_US
    return abs(theirs_us - ours_us) <= bound


def twins_agree(time_us: float, ratios: Sequence[float]) -> bool:
    """Whether every run's ratio is within the bound for calls of that length."""
    bound = TWIN_BOUNDS[0 if time_us >= 1e3 * TWIN_MS else 1]
    return all(abs(r - 1) <= bound for r in ratios)


def nvbench_times(document: Mapping[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Of nvbench's JSON, per value of the axis ``call``: median cold GPU time in us and SM clock in MHz of its runs.

    Skipped runs are left out.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for state in document["benchmarks"][0]["states"]:
        if state["is_skipped"]:
            continue
        call = next(axis["value"] for axis in state["axis_values"] if axis["name"] == "call")
        values = {s["tag"]: {d["name"]: d["value"] for d in s["data"]} for s in state["summaries"]}
        seconds, hertz = (float(values[t]["value"]) for t in ("nv/cold/time/gpu/median", "nv/cold/sm_clock_rate/mean"))
        found.setdefault(call, []).append({"time_us": seconds * 1e6, "clock_mhz": hertz / 1e6})
    return found


def ncu_kernels(text: str) -> list[dict[str, Any]]:
    """Per profiled kernel of ncu's ``--csv --page raw --print-units base`` output: name, time in us, SM clock in MHz.

    Raises:
        ValueError: there is no table in it, or units that are not known.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        raise ValueError(f"ncu printed no table: {text[-300:]}")
    units, *rows = csv.DictReader(lines)
    scales = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "hz": 1e-6, "cycle/second": 1e-6}
    # sm__cycles_elapsed.avg.per_second counts cycles: some versions print its unit as 1/s.
    scales |= {"1/s": 1e-6, "cycle/s": 1e-6}
    found = []
    for row in rows:
        kernel: dict[str, Any] = {"kernel": row["Kernel Name"]}
        for metric, figure in _NCU_METRICS.items():
            unit = units[metric].lower()
            if unit not in scales:
                raise ValueError(f"ncu gave {metric} in {unit}.")
            kernel[figure] = float(row[metric].replace(",", "")) * scales[unit]
        found.append(kernel)
    return found


def ncu_windows(kernels: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The kernels of every call: those between one flush and the next.

    Raises:
        ValueError: a call without kernels, or kernels before the first flush.
    """
    windows: list[list[Mapping[str, Any]]] = []
    for kernel in kernels:
        if kernel["kernel"].startswith(gpus.OWN_PREFIX):
            windows.append([])
        elif windows:
            windows[-1].append(kernel)
        else:
            raise ValueError(f"ncu saw {kernel['kernel']} before any flush.")
    if not all(windows):
        raise ValueError("ncu saw a flush without a call.")
    return windows


def ncu_call(windows: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Of the windows of one call: medians of the sum of their kernels' times, and of the longest kernel's clock."""
    return {
        "kernels_us": _median([sum(k["time_us"] for k in call) for call in windows]),
        "clock_mhz": _median([max(call, key=lambda k: k["time_us"])["clock_mhz"] for call in windows]),
        "kernels": max(map(len, windows)),
        "runs_us": [round(sum(k["time_us"] for k in call), 3) for call in windows],
    }


# -- the study --------------------------------------------------------------------------------------------------------


def _part(name: str, folder: Path, wrapper: Sequence[str] = ()) -> dict[str, Any]:
    """Run one part in a process of its own; what it printed last, or how it failed."""
    command = [*wrapper, sys.executable, "-m", "benchmarks.agreement", "--part", name]
    limit = _LIMITS[name]
    try:
        done = subprocess.run(
            [*command, "--folder", str(folder)], cwd=session.ROOT, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"It took more than {limit} s."}
    except OSError as error:
        return {"failed": f"{command[0]}: {error.strerror}."}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip() or done.stdout.strip())[-600:] or f"It ended with {done.returncode}."}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _ncu(folder: Path) -> dict[str, dict[str, Any]]:
    """Per call what ncu counted, or ``failed``."""
    log = folder / "ncu.csv"
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(_NCU_METRICS), "--csv", "--page", "raw", "--print-units", "base"]
    answer = _part("launches", folder, [*command, "--log-file", str(log)])
    if "done" not in answer:
        said = log.read_text()[-300:] if log.is_file() else ""
        return {call: answer | {"log": said} for call in CALLS}
    try:
        windows = ncu_windows(ncu_kernels(log.read_text()))
        if len(windows) != _NCU_CALLS * len(answer["done"]):
            raise ValueError(f"ncu saw {len(windows)} calls in place of {_NCU_CALLS} of each of {len(answer['done'])}.")
    except (ValueError, KeyError, OSError) as error:
        return {call: {"failed": f"{type(error).__name__}: {error}"} for call in CALLS}
    counted = {call: ncu_call(windows[i * _NCU_CALLS : (i + 1) * _NCU_CALLS]) for i, call in enumerate(answer["done"])}
    return counted | {call: {"failed": why} for call, why in answer["failed"].items()}


def study(write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Everything, handed to ``write`` after each part."""
    document: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **session.provenance(session.ROOT),
        "machine": machine.describe(),
        "versions": _versions(),
        "bounds": {"long_us": LONG_US, "share": SHARE, "constant_us": CONSTANT_US, "twins": list(TWIN_BOUNDS)},
        "calls": {},
    }
    arena = buffers.Arena("agreement")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _draw(arena, folder)
            timed = _part("nvbench", folder)
            document["events_us"] = events_us(timed)
            counted = _ncu(folder)
            for call, (impl, case) in CALLS.items():
                one: dict[str, Any] = {"impl": impl, "case": case, **(timed if "failed" in timed else timed[call])}
                document["calls"][call] = one
                one["ncu"] = counted[call]
                one["agrees"] = _verdicts(one, document["events_us"])
            write(document)
            document["twins"] = _part("twins", folder)
            for seen in document["twins"].values():
                if isinstance(seen, dict):
                    seen["agree"] = twins_agree(seen["time_us"], seen["ratios"])
            write(document)
            document["effects"] = _part("effects", folder)
            write(document)
        finally:
            arena.close()
    return document


def events_us(timed: Mapping[str, Any]) -> float | None:
    """What nvbench's events cost: what it gives the least launch beyond ours; None where one of the two is missing."""
    least = timed.get("least launch", {"failed": ""})
    return None if "failed" in least else round(least["nvbench"]["time_us"] - least["dirty"]["span_us"], 4)


def _verdicts(call: Mapping[str, Any], events: float | None) -> dict[str, bool | None]:
    """Per tool, whether it agrees; None where one of the two has no time.

    nvbench is held against the span with the same kind of flush, as it is and less what its events cost (which is
    nothing beside a long call: None there); ncu against the kernels' durations.
    """
    if "failed" in call:
        return {"nvbench": None, "nvbench_less_events": None, "ncu": None}
    ours, theirs = call["dirty"]["span_us"], call["nvbench"]["time_us"]
    less = None if events is None or ours > LONG_US else agrees(ours, theirs - events)
    ncu = None if "failed" in call["ncu"] else agrees(call["observed"]["kernels_us"], call["ncu"]["kernels_us"])
    return {"nvbench": agrees(ours, theirs), "nvbench_less_events": less, "ncu": ncu}


def _draw(arena: buffers.Arena, folder: Path) -> None:
    """Inputs of all cases, once, in memory that the parts share."""
    cases = [parse_case(c) for c in dict.fromkeys([*(case for _, case in CALLS.values()), *TWINS])]

    def draw(case: Case) -> dict[str, Any]:
        return case.inputs(_SEED)

    with ThreadPoolExecutor(len(cases)) as threads:
        drawn = list(threads.map(draw, cases))
    described = {
        case.id: {n: arena.put(inputs[n], spec.dtype) for n, spec in case.input_specs().items()}
        for case, inputs in zip(cases, drawn, strict=True)
    }
    (folder / "inputs.json").write_text(json.dumps(described))


def _versions() -> dict[str, str | None]:
    def version(distribution: str) -> str | None:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    tool = shutil.which("ncu")
    told = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout if tool else ""
    ncu = next((line.removeprefix("Version ") for line in told.splitlines() if line.startswith("Version ")), None)
    named = ("cuda-bench", "cupti-python", "torch", "cuda-bindings", "nvidia-cublas")
    return {name: version(name) for name in named} | {"ncu": ncu, "python": sys.version.split()[0]}


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of a study, as they stand in a document."""

    def us(value: float) -> str:
        return f"{value:.2f}" if value < 100 else f"{value:.1f}"

    def against(theirs: float | None, ours: float, agree: bool | None) -> str:
        if theirs is None or agree is None:
            return "failed"
        return f"{us(theirs)} ({theirs - ours:+.2f} us, {100 * (theirs / ours - 1):+.1f} %){'' if agree else ' **no**'}"

    lines = [
        "| call | ours | flushed by writes | nvbench | less events | kernels alone | ncu | MHz: ours, nvbench, ncu | "
        "ncu's cycles |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for call, one in document["calls"].items():
        if "failed" in one:
            lines.append(f"| {call} | failed: {one['failed']} ||||||||")
            continue
        ours, kernels = one["harness"]["span_us"], one["observed"]["kernels_us"]
        # The first studies did not flush by writes: nvbench stands beside our own flush there.
        dirty = one["dirty"]["span_us"] if "dirty" in one else None
        clocks = [one["harness"]["clock_mhz"], one["nvbench"]["clock_mhz"], one["ncu"].get("clock_mhz")]
        # What the events cost is known where the study took it, and is nothing beside a long call.
        less, cycles = "-", "-"
        if (verdict := one["agrees"].get("nvbench_less_events")) is not None:
            less = f"{one['nvbench']['time_us'] - document['events_us'] - (dirty or ours):+.2f} us"
            less += "" if verdict else " **no**"
        if ours > LONG_US and "kernels_us" in one["ncu"]:
            cycles = f"{100 * (one['ncu']['kernels_us'] * clocks[2] / (ours * clocks[0]) - 1):+.2f} %"
        lines.append(
            f"| {call} | {us(ours)} us | {'-' if dirty is None else us(dirty)} | "
            f"{against(one['nvbench']['time_us'], dirty or ours, one['agrees']['nvbench'])} | {less} | {us(kernels)} | "
            f"{against(one['ncu'].get('kernels_us'), kernels, one['agrees']['ncu'])} | "
            f"{', '.join('-' if c is None else f'{c:.0f}' for c in clocks)} | {cycles} |"
        )
    lines += [
        "",
        "| case | time | ratio of the twins in each run | spread of rounds | within |",
        "|---|---|---|---|---|",
    ]
    for case, seen in document.get("twins", {}).items():
        if isinstance(seen, dict):
            bound = TWIN_BOUNDS[0 if seen["time_us"] >= 1e3 * TWIN_MS else 1]
            ratios = ", ".join(f"{r:.4f}" for r in seen["ratios"])
            agree = f"{100 * bound:g} %: {'yes' if seen['agree'] else 'no'}"
            lines.append(f"| {case} | {us(seen['time_us'])} us | {ratios} | {100 * seen['spread']:.2f} % | {agree} |")
    lines += ["", "| call | change | time | of ours | clock |", "|---|---|---|---|---|"]
    for call, effects in document.get("effects", {}).items():
        for change, seen in effects.items() if isinstance(effects, dict) else ():
            lines.append(
                f"| {call} | {change} | {us(seen['span_us'])} us | {seen['ratio']:.3f} | {seen['clock_mhz']:.0f} MHz |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run the study and write its file; or one part of it, or show one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file (default results/records/<machine>/agreement.json)")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a file")
    for name in ("--part", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.show:
        print(markdown(json.loads(arguments.show.read_text())))
        return
    if arguments.part:
        folder = Path(arguments.folder)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "nvbench": lambda: part_nvbench(folder),
            "launches": lambda: part_launches(folder),
            "effects": lambda: part_effects(folder),
            "twins": lambda: part_twins(folder),
        }
        print(json.dumps(parts[arguments.part]()), flush=True)
        return
    path = arguments.out or records.folder(Path("results"), machine.name()) / "agreement.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(document: dict[str, Any]) -> None:
        path.write_text(json.dumps(document, indent=1) + "\n")

    print(markdown(study(write)))
    print(f"Written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
