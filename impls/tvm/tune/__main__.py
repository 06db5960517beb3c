"""Search schedules with MetaSchedule and keep the best in ``tuned/``.

    python -m impls.tvm.tune [--trials 64] [--threads 2] [CASE ...]

Candidates are timed under whatever else the machine does; the best few are then timed again, in turns, by their least
time, and only what wins there is kept. A record is replaced only by a faster one of the same number of threads, unless
``--anew``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from importlib import metadata
from typing import Any

from impls.tvm import records
from impls.tvm.records import Record
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm

#: The compute-bound GEMMs of the quick cases, and two small ones with a tail in every loop.
CASES = (
    "gemm:1024x1024x1024:f32",
    "gemm:1024x1024x1024:bf16:nt",
    "gemm:512x3072x768:f32:nt:bias+gelu",
    "gemm:61x67x71:f32:bias+relu",
    "gemm:127x131x137:bf16",
)
# Candidates that are timed again at the end.
_FINALISTS = 4
_ROUNDS = 15
# Seconds after which an unscheduled call has been seen often enough.
_DEFAULT_BUDGET_S = 10.0


def search(case: Gemm, trials: int, threads: int) -> tuple[list[list[Any]], float]:
    """Traces of the best candidates that MetaSchedule found, the best first, and the seconds it took."""
    from tvm.s_tir import meta_schedule as ms

    from impls.tvm.kernels import host, plain

    # TVM's own rules for CPUs, but for the one that moves a stage into a later stage's loops at random: there it is
    # computed over and over, and most candidates never end.
    rules = [
        rule for rule in ms.ScheduleRule.create("llvm") if not isinstance(rule, ms.schedule_rule.RandomComputeLocation)
    ]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ridgemark-tune-") as work:
        database = ms.tune_tir(
            plain.define(case),
            plain.target(host.native(threads)),
            work,
            max_trials_global=trials,
            num_trials_per_iter=16,
            space=ms.space_generator.PostOrderApply(sch_rules=rules, postprocs="llvm", mutator_probs="llvm"),
            # Smaller than TVM's default population of 512, whose generations take longer than the trials here.
            strategy=ms.search_strategy.EvolutionarySearch(
                population_size=256, init_measured_ratio=0.2, init_min_unmeasured=32, genetic_num_iters=3
            ),
            builder=ms.builder.LocalBuilder(max_workers=threads, timeout_sec=60, f_build=build_candidate),
            runner=ms.runner.LocalRunner(
                timeout_sec=30, evaluator_config=ms.runner.EvaluatorConfig(number=1, repeat=3, min_repeat_ms=0)
            ),
            cost_model="xgb",
            num_tuning_cores=threads,
            seed=1,
        )
        found = [record for record in database.get_all_tuning_records() if record.run_secs]
    seconds = time.perf_counter() - begin
    found.sort(key=lambda record: min(float(s) for s in record.run_secs))
    return [to_json(record.trace.as_json()) for record in found[:_FINALISTS]], seconds


def decide(case: Gemm, traces: list[list[Any]], trials: int, seconds: float, threads: int) -> Record:
    """The fastest of ``traces`` by its least time, timed in turns, and TVM's default beside it."""
    import tvm

    from impls.tvm.kernels import compiled, host, plain

    machine = host.native(threads)
    calls = [_call(case, compiled.build(plain.replayed(case, trace), machine)["main"]) for trace in traces]
    best = [float("inf")] * len(calls)
    for _ in range(_ROUNDS):
        for index, call in enumerate(calls):
            best[index] = min(best[index], _seconds(call))
    winner = min(range(len(calls)), key=best.__getitem__)
    default = _call(case, compiled.build(tvm.IRModule({"main": plain.define(case)}), machine)["main"])
    spent, default_s = 0.0, float("inf")
    while spent < _DEFAULT_BUDGET_S:
        took = _seconds(default)
        default_s, spent = min(default_s, took), spent + max(took, _DEFAULT_BUDGET_S / _ROUNDS)
    versions = {"tvm": metadata.version("apache-tvm"), "llvm": str(tvm.target.codegen.llvm_version_major())}
    return Record(threads, trials, round(seconds, 1), default_s * 1e6, best[winner] * 1e6, versions, traces[winner])


def build_candidate(module: Any, target: Any, _parameters: Any) -> Any:
    """Compile one candidate, in a process of TVM's, whose own function first imports all CUDA intrinsics (24 s)."""
    import tvm

    return tvm.tirx.build(module, target=target)


def to_json(value: Any) -> Any:
    """A trace as plain lists, numbers and strings."""
    if isinstance(value, str | float | bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "value"):  # TVM's own integers and floats
        return value.value
    return [to_json(item) for item in value]


def _call(case: Gemm, function: Any) -> tuple[Any, list[Any]]:
    from impls.tvm.kernels import arrays
    from impls.workloads.dtypes import dtype

    given = [arrays.copied(array) for array in case.inputs(1).values()]
    output = arrays.empty(case.output_specs()["C"].shape, dtype(case.out).storage)
    return function, [arrays.tensor(array) for array in (*given, output)]


def _seconds(call: tuple[Any, list[Any]]) -> float:
    function, arguments = call
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def main() -> int:
    """0, or 2 where a case cannot be tuned."""
    parser = argparse.ArgumentParser(prog="python -m impls.tvm.tune", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE")
    parser.add_argument("--trials", type=int, default=64, help="candidates to compile and time, per case")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--anew", action="store_true", help="replace records even by slower ones")
    options = parser.parse_args()
    # Before TVM starts its threads, here and in its children; as the harness runs its workers.
    os.environ |= {"TVM_NUM_THREADS": str(options.threads), "TVM_BIND_THREADS": "0", "TVM_THREAD_POOL_SPIN_COUNT": "0"}

    from impls.tvm.kernels import host

    family = host.family()
    for text in options.cases:
        case = parse_case(text)
        if not isinstance(case, Gemm) or case.groups is not None:
            print(f"{text}: only plain GEMMs are tuned.", file=sys.stderr)
            return 2
        known = dict(records.load(family))
        traces, seconds = search(case, options.trials, options.threads)
        if not traces:
            print(f"{text}: none of {options.trials} candidates ran.", file=sys.stderr)
            return 2
        record, old = decide(case, traces, options.trials, seconds, options.threads), known.get(case.id)
        print(f"{case.id}: {record.tuned_us:.0f} us, {record.gain:.1f} times TVM's default, {record.seconds:.0f} s")
        if old is not None and old.threads == record.threads and old.tuned_us <= record.tuned_us and not options.anew:
            print(f"  the record there is stays: {old.tuned_us:.0f} us")
            continue
        records.save(family, {**known, case.id: record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
