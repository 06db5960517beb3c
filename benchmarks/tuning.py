"""Tunes a stack's own kernels on this machine's GPU, in the burst regime, and keeps what it chose.

``python -m benchmarks.tuning triton [--cases flagship] [--impl triton.split_k] [--seconds 600] [CASE ...]`` compiles
every candidate of every case in as many processes as there are CPUs, without touching the GPU; then it times them one
after the other, looks again at the best few in turns, and writes ``impls/<stack>/tuned/<device>.json``: per
implementation and case the choice, its time, the second best, how many were tried, and the seconds that took. A case's
choice also serves the shapes near it. A candidate whose output is not the baseline's is left out; whether the choice
computes the right thing is judged with every measurement, as ever.

It owns the search; what there is to choose from belongs to the implementations, which are ``Tunable``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from benchmarks.engine import cases as case_files
from benchmarks.engine import machine
from benchmarks.engine.worker import reported_versions
from impls import registry
from impls.baselines import baseline_of
from impls.contract import Device, Program
from impls.support import tuned
from impls.workloads.base import Case, parse_case
from impls.workloads.dtypes import dtype

# Calls of the first look at each candidate and of each later round; candidates in those rounds; rounds.
_LOOK, _CALLS, _FINALISTS, _ROUNDS = 4, 12, 5, 3


class Choice(Protocol):
    """One way of running a case: hashable, and JSON by ``config``."""

    def config(self) -> dict[str, Any]:
        """The choice as the tuned file keeps it."""


class Tunable(Protocol):
    """What an implementation provides, beyond the contract, to be tuned."""

    name: str
    workload: str

    def refuses(self, case: Case, device: Device) -> str | None:
        """As in the contract."""

    def space(self, case: Case) -> list[Choice]:
        """Every choice worth a look."""

    def build(self, case: Case, device: Device, choice: Choice) -> Program:
        """The case by this choice."""

    def compile_ahead(self, case: Case, choice: Choice, arch: str) -> Any:
        """Compile into the library's cache, without touching the device."""


class Rebindable(Protocol):
    """A program that can take over a set that another program of the case has loaded."""

    def over(self, loaded: Any) -> Any:
        """The set under this program's launches."""


@dataclass(frozen=True)
class Job:
    """One implementation on one case, and its candidates."""

    implementation: Tunable
    case: Case
    candidates: tuple[Choice, ...]


def jobs(
    stack: str, cases: Sequence[Case], device: Device, names: Sequence[str] = (), most: int | None = None
) -> list[Job]:
    """What there is to tune: every tunable implementation of ``stack`` on every case that it takes.

    Args:
        stack: the stack.
        cases: the cases.
        device: where they will run.
        names: implementations; none means all.
        most: candidates per job, drawn at random (the same every time) where there are more.
    """
    found = []
    for case in cases:
        for one in registry.of_stack(stack):
            if one.workload != case.workload or (names and one.name not in names) or not hasattr(one, "space"):
                continue
            reference = registry.find(cast(str, baseline_of(case.workload, device.kind)), case.workload)
            if registry.refusal(reference, case, device) is not None:
                continue
            if registry.refusal(one, case, device) is None:
                tunable = cast(Tunable, one)
                candidates = tunable.space(case)
                if most is not None and len(candidates) > most:
                    candidates = random.Random(0).sample(candidates, most)
                found.append(Job(tunable, case, tuple(candidates)))
    return found


def _compile_one(arguments: tuple[str, str, Choice, str]) -> str | None:
    name, case_id, choice, arch = arguments
    case = parse_case(case_id)
    # A compiler that fails says so at length on the process's own stderr.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    try:
        cast(Tunable, registry.find(name, case.workload)).compile_ahead(case, choice, arch)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(todo: Sequence[Job], arch: str, processes: int) -> dict[tuple[str, str, Choice], str]:
    """Compile every candidate into the library's cache; what failed, and why."""
    tasks = [(j.implementation.name, j.case.id, c, arch) for j in todo for c in j.candidates]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        troubles = pool.map(_compile_one, tasks, chunksize=4)
        return {(name, case, choice): why for (name, case, choice, _), why in zip(tasks, troubles, strict=True) if why}


def with_candidates(todo: Sequence[Job], failed: dict[tuple[str, str, Choice], str]) -> list[Job]:
    """The jobs that have anything left: what is to be compiled elsewhere may not be here at all."""
    return [j for j in todo if any((j.implementation.name, j.case.id, c) not in failed for c in j.candidates)]


def _some(array: np.ndarray) -> np.ndarray:
    """Every 61st element: a prime, so that no tile's edge is always left out."""
    return array.reshape(-1)[::61].astype(np.float32)


class Bench:
    """One case's inputs on the device, and the output that candidates are held against."""

    def __init__(self, case: Case, device: Device) -> None:
        self.case, self.device = case, device
        self.inputs = case.inputs(1)
        reference = baseline_of(case.workload, device.kind)
        assert reference is not None
        self._program = registry.find(reference, case.workload).prepare(case, device)
        self._loaded = self._program.load(self.inputs)
        outputs = self._program.read_outputs(self._program.run(self._loaded))
        self._expected = {name: _some(array) for name, array in outputs.items()}
        self.loaded: Any = None

    def baseline_us(self, calls: int) -> float:
        """Median time of the baseline."""
        return self.median_us(self._program, self._loaded, calls)

    def median_us(self, program: Program, loaded: Any, calls: int) -> float:
        """Median time of ``calls`` calls after a first one."""
        from benchmarks.engine.timing import cupti

        samples = cupti.block(program, {0: loaded}, [0] * (calls + 1), {}, False)["samples_us"][1:]
        return float(np.median(samples))

    def set_of(self, program: Program) -> Any:
        """The inputs under this program's launches, loaded once for all programs that can share them."""
        if self.loaded is None or not hasattr(program, "over"):
            self.loaded = program.load(self.inputs)
            return self.loaded
        return cast(Rebindable, program).over(self.loaded)

    def agrees(self, program: Program, loaded: Any) -> bool:
        """Whether its outputs are the baseline's in every 61st element, but for roundings of the largest value."""
        program.poison(loaded)
        outputs = program.read_outputs(program.run(loaded))
        for name, spec in self.case.output_specs().items():
            expected, found = self._expected[name], _some(outputs[name])
            slack = 8 * max(dtype(spec.dtype).unit_roundoff, 2.0**-14) * float(np.abs(expected).max())
            if not (np.abs(found - expected) <= slack).all():
                return False
        return True

    def release(self) -> None:
        """Free the device's memory."""
        self._loaded = self.loaded = None
        self._program.release()


def search(job: Job, bench: Bench, failed: dict[tuple[str, str, Choice], str], end: float) -> dict[str, Any] | None:
    """The best candidate of one job: a look at all, then rounds over the best few; None where none is right.

    Args:
        job: the job.
        bench: its case on the device.
        failed: candidates that did not compile.
        end: ``time.monotonic`` at which it looks at no further candidates.
    """
    begin = time.monotonic()
    programs: dict[Choice, tuple[Program, Any]] = {}
    times: dict[Choice, list[float]] = defaultdict(list)
    wrong = 0
    troubles: list[str] = []
    for choice in job.candidates:
        if (job.implementation.name, job.case.id, choice) in failed:
            continue
        if time.monotonic() > end:
            break
        try:
            program = job.implementation.build(job.case, bench.device, choice)
            loaded = bench.set_of(program)
            if not bench.agrees(program, loaded):
                wrong += 1
                continue
            times[choice].append(bench.median_us(program, loaded, _LOOK))
            programs[choice] = program, loaded
        except Exception as error:
            troubles.append(f"{type(error).__name__}: {str(error)[:120]}")
    if not programs:
        print(f"{job.implementation.name} {job.case.id}: nothing right; {wrong} wrong; {troubles[:2]}", file=sys.stderr)
        return None
    tried = len(programs)
    finalists = sorted(programs, key=lambda choice: times[choice][0])[:_FINALISTS]
    times.clear()
    reference = []
    for _ in range(_ROUNDS):
        reference.append(bench.baseline_us(_CALLS))
        for choice in finalists:
            times[choice].append(bench.median_us(*programs[choice], _CALLS))
    medians = {choice: float(np.median(times[choice])) for choice in finalists}
    ranked = sorted(finalists, key=medians.__getitem__)
    result: dict[str, Any] = {
        "choice": ranked[0].config(),
        "time_us": round(medians[ranked[0]], 3),
        "baseline_us": round(float(np.median(reference)), 3),
        "tried": tried,
        "wrong": wrong,
        "seconds": round(time.monotonic() - begin, 1),
    }
    if len(ranked) > 1:
        result["second"] = {"choice": ranked[1].config(), "time_us": round(medians[ranked[1]], 3)}
    return result


def keep(path: Path, device: Device, versions: dict[str, str], name: str, case_id: str, result: dict[str, Any]) -> None:
    """Write one result into the file; what was chosen with another version of the library is dropped."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if kept.get("versions") != versions:
        kept = {"device": device.name, "versions": versions, "regime": "burst", "choices": {}}
    kept["when"] = datetime.now(UTC).isoformat(timespec="seconds")
    kept["choices"].setdefault(name, {})[case_id] = result
    kept["choices"] = {n: dict(sorted(cases.items())) for n, cases in sorted(kept["choices"].items())}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    """Search and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack", help="whose kernels")
    parser.add_argument("--cases", default="flagship", help="case file (default flagship)")
    parser.add_argument("--impl", action="append", default=[], help="one implementation; may be given several times")
    parser.add_argument("--seconds", type=float, default=600.0, help="when it stops (default 600)")
    parser.add_argument("--most", type=int, help="candidates per implementation and case (default all)")
    parser.add_argument("--out", type=Path, help="file to write in place of the stack's")
    parser.add_argument("case", nargs="*", help="cases in place of the file's")
    arguments = parser.parse_intermixed_args()  # cases may come after the options
    begin = time.monotonic()
    end = begin + arguments.seconds
    device = machine.device("cuda")
    wanted = [parse_case(c) for c in arguments.case] or [e.case for e in case_files.load(arguments.cases)]
    todo = jobs(arguments.stack, wanted, device, arguments.impl, arguments.most)
    path = arguments.out or tuned.file(registry.stacks()[arguments.stack], device.name)
    failed = compile_all(todo, device.arch, len(os.sched_getaffinity(0)))
    candidates = sum(len(j.candidates) for j in todo)
    print(f"{candidates} candidates compiled in {time.monotonic() - begin:.0f} s, {len(failed)} failed", flush=True)
    # A message may name its candidate: what many have in common is the error's type.
    for kind, count in Counter(why.partition(":")[0] for why in failed.values()).most_common(5):
        print(f"  {count} times such as {next(why for why in failed.values() if why.startswith(kind))[:200]}")
    todo = with_candidates(todo, failed)
    # The library that the kernels are written in: env.toml names it first.
    library, version = next(iter(reported_versions(arguments.stack, "cuda").items()))
    for case in dict.fromkeys(j.case for j in todo):
        if time.monotonic() > end:
            break
        bench = Bench(case, device)
        for job in todo:
            if job.case == case and (one := search(job, bench, failed, end)) is not None:
                keep(path, device, {library: version}, job.implementation.name, case.id, one)
                speed = one["baseline_us"] / one["time_us"]
                counts = f"{one['tried']} tried, {one['wrong']} wrong, {one['seconds']} s"
                print(
                    f"{job.implementation.name} {case.id}: {one['time_us']} us, {speed:.3f} of the baseline's speed; "
                    f"{counts}; {one['choice']}",
                    flush=True,
                )
        bench.release()


if __name__ == "__main__":
    main()
