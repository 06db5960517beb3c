"""A run: which cases over which implementations, in what order, within which budget; recorded as it goes.

Owns the run's plan, its resumption and its provenance. One case's life is the trial's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.engine import artefacts, memory, records, trial
from benchmarks.engine import machine as machines
from benchmarks.engine.buffers import Arena, NoRoom
from benchmarks.engine.crew import Crew
from benchmarks.engine.environments import Environment
from benchmarks.engine.pool import Pool, Worker
from benchmarks.engine.progress import Progress
from benchmarks.engine.reference import VARIANTS, Asked, Reference
from impls import registry
from impls.baselines import baseline_of
from impls.contract import Device, Implementation
from impls.workloads.base import Case

ROOT = Path(__file__).resolve().parents[2]
#: Commit of a copy that has no git folder, written by ``benchmarks.bundle``.
STAMP = "ridgemark-commit.json"
REGIMES = {"cpu": "warm", "cuda": "burst"}
#: Cases that a GPU's host prepares at the same time, on all its cores; they are measured one after the other. That many
#: fit into a share of the device's memory together, and what the host keeps of them into so much of its own.
TOGETHER, TOGETHER_SHARE, TOGETHER_BYTES = 6, 0.25, 8 * 2**30
#: References that are made ahead on a GPU, at the least. That of an attention backward takes several cases' time.
AHEAD = 3
#: A case that is also sustained gets so many shares of a budget.
SUSTAINED_SHARES = 2
#: An implementation that ran out of time in so many cases of a run is left out of the others.
PATIENCE = 2


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        cases: in the order in which they run.
        implementations: those asked for; each case takes the ones of its workload, and its baseline always.
        budget_s: seconds that the run should take, or None.
        seed: of the inputs and of the order.
        sustained: ids of the cases that a GPU also runs back to back.
        without: case id -> names of implementations that it leaves out, its baseline never.
    """

    cases: tuple[Case, ...]
    implementations: tuple[Implementation, ...]
    budget_s: float | None
    seed: int
    sustained: frozenset[str] = frozenset()
    without: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def takers(self, case: Case, device: Device) -> list[Implementation]:
        """The implementations that are meant for ``case`` on this kind of device, whether or not they take it."""
        left_out = set(self.without.get(case.id, ())) - {baseline_of(case.workload, device.kind)}
        return [
            i
            for i in self.implementations
            if i.workload == case.workload and device.kind in i.devices and i.name not in left_out
        ]


class Session:
    """Runs a plan on this machine and appends to one records file.

    Args:
        environments: stack -> its environment.
        missing: stack -> why it has none, one sentence; its implementations are recorded as unsupported.
        writer: the records file; ``already`` is what it holds from the part of the run that was interrupted.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: Device,
        environments: Mapping[str, Environment],
        missing: Mapping[str, str],
        writer: records.Writer | None,
        already: records.Loaded | None = None,
        deadlines: trial.Deadlines | None = None,
    ) -> None:
        self.plan, self.device = plan, device
        self.environments, self.missing = environments, missing
        self.writer = writer
        self.resumed = already is not None
        self.finished = set(records.finished_cases(already)) if already else set()
        self.deadlines = deadlines or trial.Deadlines.within(plan.budget_s)
        self.phases = trial.Phases()
        self.results: list[dict[str, Any]] = []
        self._said: dict[tuple[str, str], str | None] = {}

    def run(self, progress: Progress, *, measure: bool = True) -> bool:
        """Run the plan. Every result is recorded as soon as its case is done.

        Returns:
            False where Ctrl-C, or the end of the GPU, ended it early.

        Raises:
            RecordError: the results cannot be written; the ones before are on the disk.
        """
        self._begin()
        start = time.monotonic()
        interrupted = False
        pool = Pool(ROOT, self.device, self.device.threads)
        arena = Arena("session")
        reference = Reference(aside=self.device.kind == "cuda")
        asking = ThreadPoolExecutor(1, "ridgemark-ask")  # making room for some GiB takes a second, too
        try:
            crew = Crew(pool, self.environments, self._introduce)
            todo = [c for c in self.plan.cases if c.id not in self.finished]
            asked: dict[str, Future[Asked | None]] = {}
            while todo and not interrupted:
                batch = self._together(todo)
                ahead = max(AHEAD, len(self._together(todo[len(batch) :])))
                for case in todo[: len(batch) + ahead]:
                    if case.id not in asked:
                        asked[case.id] = asking.submit(self._ask, case, reference, arena)
                refusals = [self._refusals(case) for case in batch]
                trials = [
                    self._trial(case, place, crew, reference, arena, progress, measure, asked.pop(case.id))
                    for place, case in enumerate(batch)
                ]
                if len(batch) > 1:
                    trial.prepare_ahead([one for one in trials if one is not None])
                for case, one, refused in zip(batch, trials, refusals, strict=True):
                    available = None
                    if self.plan.budget_s is not None:
                        left = self.plan.budget_s - (time.monotonic() - start)
                        available = left * self._shares(case) / sum(map(self._shares, todo))
                    todo.remove(case)
                    interrupted = self._run(one, refused, progress, available)
                    if interrupted:
                        break
                    progress.case_done(case.id, one.told if one is not None else "nothing here runs it")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            with self.phases("stop"):
                pool.stop()
            asking.shutdown(cancel_futures=True)
            reference.close()
            arena.close()
            self.phases.seconds["wall"] = time.monotonic() - start
        if self.writer:
            self.writer.append("end", interrupted=interrupted, phases=_rounded(self.phases.seconds))
        return not interrupted

    def _shares(self, case: Case) -> int:
        """Of the budget."""
        return SUSTAINED_SHARES if case.id in self.plan.sustained else 1

    def _out_of_patience(self, implementation: Implementation) -> str | None:
        """Why an implementation is not tried again, one sentence: what hangs would take the time of every case."""
        late = {r["case"] for r in self.results if r["impl"] == implementation.name and r["status"] == "timeout"}
        return f"Not tried: it ran out of time in {len(late)} cases of this run." if len(late) >= PATIENCE else None

    def _ask(self, case: Case, reference: Reference, arena: Arena) -> Asked | None:
        """On a GPU the references of the next cases are made while one is measured: the host's cores are free.

        On a CPU it would take them from what is measured. None there, and where there is no room or no taker.
        """
        if self.device.kind == "cpu" or not self._willing(case):
            return None
        try:
            return reference.ask(case, self.plan.seed, arena)
        except NoRoom:
            return None

    def _together(self, cases: Sequence[Case]) -> list[Case]:
        """The first cases, as many as are prepared at the same time; one on a CPU, which has no cores to spare."""
        most = TOGETHER if self.device.kind == "cuda" else 1
        room, shared = TOGETHER_SHARE * self.device.memory_bytes, float(TOGETHER_BYTES)
        taken: list[Case] = []
        for case in cases[:most]:
            room -= sum(memory.footprint(i, case) for i in [*self._willing(case), *self._willing(case)[:1]])
            shared -= memory.kept(case, VARIANTS)
            if taken and min(room, shared) < 0:
                break
            taken.append(case)
        return taken

    def _willing(self, case: Case) -> list[Implementation]:
        """Who takes it here."""
        return [i for i in self.plan.takers(case, self.device) if self._refusal(i, case) is None]

    def _refusal(self, implementation: Implementation, case: Case) -> str | None:
        """Why an implementation does not run a case here, one sentence; None where it does."""
        return self._unfit(implementation, case) or self._out_of_patience(implementation)

    def _unfit(self, implementation: Implementation, case: Case) -> str | None:
        # Asked several times, and some look through their tiles for an answer.
        asked = implementation.name, case.id
        if asked not in self._said:
            self._said[asked] = (
                registry.refusal(implementation, case, self.device)
                or memory.too_large(case, self.device, VARIANTS)
                or self.missing.get(implementation.stack)
            )
        return self._said[asked]

    def _refusals(self, case: Case) -> list[dict[str, Any]]:
        """The results of those that do not run it; which probe a ceiling's implementation serves is no news."""
        if case.workload == "ceiling":
            return []
        reasons = {i: self._refusal(i, case) for i in self.plan.takers(case, self.device)}
        return [trial.refused(case, i, reason, self.plan.seed) for i, reason in reasons.items() if reason is not None]

    def _trial(
        self,
        case: Case,
        place: int,
        crew: Crew,
        reference: Reference,
        arena: Arena,
        progress: Progress,
        measure: bool,
        asked: Future[Asked | None],
    ) -> trial.Trial | None:
        willing = self._willing(case)
        if not willing:
            return None
        baseline = baseline_of(case.workload, self.device.kind)
        return trial.Trial(
            case,
            willing,
            next((i for i in willing if i.name == baseline), None),
            crew=crew,
            reference=reference,
            arena=arena,
            device=self.device,
            limits=machines.physical_limits(self.device),
            seed=self.plan.seed,
            progress=progress,
            phases=self.phases,
            deadlines=self.deadlines,
            measure=measure,
            artefacts=None if self.writer is None else artefacts.folder(self.writer.path),
            sustain=self.device.kind == "cuda" and case.id in self.plan.sustained,
            asked=asked.result(),
            place=place,
        )

    def _run(
        self,
        one: trial.Trial | None,
        refusals: Sequence[dict[str, Any]],
        progress: Progress,
        available_s: float | None,
    ) -> bool:
        """Run a case and record its results, and those of who does not run it. Returns whether it was interrupted."""
        results = one.run(available_s) if one is not None else []
        interrupted = one is not None and one.interrupted
        failed = any(r["status"] in ("failed", "crashed", "timeout") for r in results)
        if failed and self.device.kind == "cuda" and machines.gpu_is_gone():
            # No stack's fault: the case is not finished, and to be resumed where there is a GPU.
            progress.print("The GPU is gone: the run ends here. Go on with it where there is one, with --resume.")
            interrupted = True
            results = [r | {"complete": False} for r in results]
        # Refusals last: a case of which only they are known is not finished.
        for result in [*results, *(r | {"complete": not interrupted} for r in refusals)]:
            self._record(result)
        return interrupted

    # -- recording ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self.writer is None or self.resumed:
            return
        self.writer.append(
            "run",
            **circumstances(self.device, self.plan.seed),
            plan={
                "cases": [c.id for c in self.plan.cases],
                "impls": [i.name for i in self.plan.implementations],
                "budget_s": self.plan.budget_s,
                "regime": REGIMES[self.device.kind],
                "sustained": sorted(self.plan.sustained),
                "without": {case: sorted(names) for case, names in self.plan.without.items()},
                "prepare_limit_s": self.deadlines.prepare_s,
            },
        )

    def _introduce(self, worker: Worker) -> None:
        if self.writer:
            self.writer.append(
                "stack",
                stack=worker.stack,
                versions=worker.versions,
                python=worker.python,
                lock=self.environments[worker.stack].lock,
            )

    def _record(self, result: dict[str, Any]) -> None:
        result = {"regime": REGIMES[self.device.kind]} | result
        self.results.append(result)
        if self.writer:
            start = time.perf_counter()
            self.writer.append("result", **result)
            self.phases.seconds["write"] += time.perf_counter() - start


def circumstances(device: Device, seed: int) -> dict[str, Any]:
    """What a run's first line says of when, where and with what it runs."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "machine": machines.describe(),
        "device": asdict(device) | {"features": sorted(device.features)},
        "harness": {name: metadata.version(name) for name in ("ridgemark", "numpy", "ml_dtypes")}
        | {"python": sys.version.split()[0]},
        **provenance(ROOT),
    }


def provenance(root: Path) -> dict[str, Any]:
    """Commit of the checkout at ``root`` and whether tracked files differ from it.

    A copy without its git folder bears the stamp of ``benchmarks.bundle``; null where there is neither.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if commit is None and (root / STAMP).is_file():
        stamp: dict[str, Any] = json.loads((root / STAMP).read_text())
        return {"commit": stamp["commit"], "dirty": stamp["dirty"]}
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def stacks_of(implementations: Sequence[Implementation]) -> list[str]:
    """The stacks that these implementations need, once each, in order."""
    return list(dict.fromkeys(i.stack for i in implementations))
