"""One case, start to end: prepare everywhere, check, measure in interleaved rounds, release.

Owns the life of a case and the status each implementation ends with. It does not own which cases run (session), how a
worker is talked to (pool) or what is right (judge).
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import artefacts, memory, rounds
from benchmarks.engine.buffers import Arena, NoRoom
from benchmarks.engine.crew import Crew
from benchmarks.engine.judge import Judge, Verdict
from benchmarks.engine.machine import PhysicalLimits
from benchmarks.engine.pool import Worker, WorkerError
from benchmarks.engine.progress import Progress
from benchmarks.engine.reference import VARIANTS, Asked, Reference
from benchmarks.engine.verdicts import JUDGES, Slot, Verdicts
from impls.contract import Device, Implementation
from impls.workloads.base import Case

# Workers on a GPU among which a stack's implementations are dealt, so that they are prepared at the same time, those of
# several cases too. On a CPU, where all share the cores, it is one.
LANES = 6
# An implementation that skips one call in n is caught for certain where n is not above this.
STREAK = 16
# Memory for outputs that wait to be judged; on a GPU that of the host, where one waits for each judge.
KEPT_BYTES, GPU_KEPT_BYTES = 256 * 2**20, 1024 * 2**20
# Time that the streak of checked calls may take, new contents and verdicts included; less on a GPU, where a dozen
# implementations renew their inputs over a bus.
STREAK_SECONDS, GPU_STREAK_SECONDS = 2.0, 1.0

# Calls back to back are timed so; see timing.cupti.
SUSTAINED_METHOD = "host_span"
# What a timing method may report of a block that goes into the record.
TELEMETRY = (
    *("preemptions", "clock_mhz", "power_w", "temperature_c", "busy_us", "host_us", "kernels", "throttled", "foreign"),
    *("calls", "settled_s", "energy_j"),
)
# A block is taken again where heat or hardware slowed it down, so many times at the most.
RETAKES = 2
# Sustained: rounds, each of a second per implementation, as few as verdicts take where half of what is compared
# differs: with six, the least for a single one, a run's q-values were 0.056 (analysis.statistics). Of the baseline,
# and of so many others, the fastest, that take no longer than this many times the fastest of all: power changes an
# order by a fifth. A few that are decided cost what many without a verdict would; a round is not made shorter, since
# it spans a whole swing of the power's control (timing.cupti).
SUSTAINED_ROUNDS, SUSTAINED_BEST, SUSTAINED_WITHIN = 8, 2, 1.5
# What a sustained block takes of a budget.
SUSTAINED_SECONDS = 1.2
# A call whose span is longer than its device's activity by this share waits for the host, or for itself.
HOST_BOUND = 0.1
# A first call after new contents that takes this many times the others, in most blocks, may be the only real one.
REMEMBERING = 5.0
# What cold caches may cost a first call however short the others are.
COLD_CACHES_US = 100.0

# Resident memory beyond the plan that a worker may take: room for a compiler.
HEADROOM_BYTES = 3 * 2**30
# CUDA's libraries alone take several GiB of the host's, and XLA compiles its candidates there.
GPU_HEADROOM_BYTES = 24 * 2**30
# Reading an output copies it at 1 GB/s at the very least; waiting for work looks like a read many times the call.
READ_ALLOWANCE_US, READ_BYTES_PER_US, READ_AFTER_CALL = 200.0, 1000.0, 5.0

_STATUS = {
    "unsupported": "unsupported",
    "failed": "failed",
    "protocol": "failed",
    "crashed": "crashed",
    "memory": "crashed",
    "timeout": "timeout",
}


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a worker may take, by the harness's clock: to prepare a case, and for any other request.

    A block of calls gets twenty times what its calls are expected to take where that is longer.
    """

    prepare_s: float = 300.0
    request_s: float = 60.0

    @classmethod
    def within(cls, budget_s: float | None, prepare_s: float | None = None) -> Deadlines:
        """Where there is a budget, what hangs costs a tenth of it while it prepares and a twentieth later, but it gets
        half a minute and 20 s at the least. ``prepare_s``: as asked for."""
        budget_s = math.inf if budget_s is None else budget_s
        longest = prepare_s or float(np.clip(budget_s / 10, 30.0, cls.prepare_s))
        return cls(longest, float(np.clip(budget_s / 20, 20.0, cls.request_s)))


@dataclass
class Entry:
    """One implementation in this trial. ``replica`` 1 is the baseline's twin in a process of its own.

    ``lane`` tells the workers apart that share a stack's implementations.
    """

    implementation: Implementation
    replica: int
    program: str
    lane: int = 0
    worker: Worker | None = None  # the one that holds the prepared program
    status: str | None = None
    reason: str | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    sustained: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    reads: list[tuple[float, float, float]] = field(default_factory=list)
    variant: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    prepare_s: float | None = None
    first_call_s: float | None = None
    peak_memory_bytes: int | None = None
    method: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.status is None

    @property
    def seat(self) -> tuple[str, int]:
        """Which worker it runs in."""
        return (self.implementation.stack, 2 * self.lane + self.replica)

    def end(self, status: str, reason: str | None) -> None:
        """Nothing more will be asked of it. Only ``ok`` keeps its times."""
        self.status, self.reason = status, reason
        if status != "ok":
            self.rounds, self.sustained = [], []


class Phases:
    """Seconds by phase, one after the other; ``a.b`` is a part of ``a``.

    ``kernel`` is the time inside the timed calls, and in no phase of its own: ``check``, ``block`` and ``sustain`` are
    the requests around them.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time inside the ``with`` block to phase ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class Trial:
    """Runs one case over the implementations that support it.

    Args:
        implementations: those that said they support the case.
        baseline: the one that the others are compared with; None where it is not among them.
        measure: False judges only.
        sustain: also measure back to back (on a GPU), after the rounds.
        asked: the question of this case, where it has been put to the reference already.
        artefacts: folder for the code that implementations generated; None keeps none.
        place: of the case among those that are prepared at once.
    """

    def __init__(
        self,
        case: Case,
        implementations: Sequence[Implementation],
        baseline: Implementation | None,
        *,
        crew: Crew,
        reference: Reference,
        arena: Arena,
        device: Device,
        limits: PhysicalLimits,
        seed: int,
        progress: Progress,
        phases: Phases,
        deadlines: Deadlines,
        measure: bool = True,
        sustain: bool = False,
        asked: Asked | None = None,
        artefacts: Path | None = None,
        place: int = 0,
    ) -> None:
        self.case, self.device, self.limits, self.seed = case, device, limits, seed
        self.crew, self.reference, self.arena = crew, reference, arena
        self.progress, self.phases, self.deadlines = progress, phases, deadlines
        self.measure, self.sustain = measure, sustain
        self.available_until: float | None = None
        self.artefacts, self.asked = artefacts, asked
        self.interrupted = False
        self.random = random.Random(seed)
        lanes = LANES if device.kind == "cuda" else 1
        before: dict[str, int] = defaultdict(int)  # implementations of the same stack
        entries = []
        for i in implementations:
            entries.append(Entry(i, 0, f"{case.id}|{i.name}|0", (place + before[i.stack]) % lanes))
            before[i.stack] += 1
        self.always: list[Entry] = []
        if baseline is not None and measure:
            twin = Entry(baseline, 1, f"{case.id}|{baseline.name}|1")
            self.always = [e for e in entries if e.implementation is baseline] + [twin]
            entries.append(twin)
        self.entries = entries
        self.groups: list[list[Entry]] = []
        self.verdicts: Verdicts | None = None
        self._rounds_done = 0

    def open(self) -> None:
        """Put the question, make room for the answers, and see who fits on the device together; once.

        Raises:
            NoRoom: the arrays fit nowhere.
            concurrent.futures.process.BrokenProcessPool: the reference process is gone.
        """
        if self.groups:
            return
        self.asked = self.asked or self.reference.ask(self.case, self.seed, self.arena)
        self.verdicts = self.verdicts or self._make_room()
        self.groups = memory.groups(
            [(e, memory.footprint(e.implementation, self.case)) for e in self.entries if e not in self.always],
            [(e, memory.footprint(e.implementation, self.case)) for e in self.always],
            int(memory.USABLE * self.device.memory_bytes) - memory.shared(self.case, VARIANTS, self.device),
        )

    def run(self, available_s: float | None = None) -> list[dict[str, Any]]:
        """The results, one per entry that came to an end.

        Ctrl-C ends the trial early: ``interrupted`` is then set, and the entries that have rounds keep them with
        ``complete`` false.

        Args:
            available_s: seconds in which the case should be done; None where there is no budget.
        """
        self.available_until = None if available_s is None else time.monotonic() + available_s
        try:
            self.open()
            for group in self.groups:
                self._prepare(group)
                self._ready()
                self._check_all(group)
                if self.measure:
                    self._measure(group)
                    if self.sustain:
                        self._sustain(group)
                self._finish([e for e in group if e not in self.always])
            self._finish(self.always)
        except BrokenProcessPool:
            self._end_all("failed", "The reference process died while making this case (of memory, most likely).")
        except NoRoom as error:
            self._end_all("failed", str(error))
        except KeyboardInterrupt:
            self.interrupted = True
            if self.verdicts is not None:
                self.verdicts.settle()
            for entry in self.entries:
                if entry.alive and entry.rounds:
                    entry.end("ok", None)
        finally:
            self._release(self.entries)
            if self.verdicts is not None:
                self.verdicts.close()
            for descriptor in (
                d for variant in (self.asked.descriptors if self.asked else []) for d in variant.values()
            ):
                self.arena.free(descriptor)
        ended = [e for e in self.entries if not e.alive]
        results = [result(self.case, e, self.seed, complete=not self.interrupted) for e in ended]
        return results + [
            r | {"regime": "sustained", "method": SUSTAINED_METHOD, "rounds": e.sustained}
            for e, r in zip(ended, results, strict=True)
            if e.sustained
        ]

    @property
    def told(self) -> str:
        """How it ended, in a few words."""
        count = Counter(entry.status for entry in self.entries if entry.status)
        return ", ".join(f"{number} {status}" for status, number in count.most_common())

    def _end_all(self, status: str, reason: str) -> None:
        for entry in self.entries:
            if entry.alive:
                entry.end(status, reason)

    # -- preparing ------------------------------------------------------------------------------------------------

    def _prepare(self, entries: Sequence[Entry]) -> None:
        """Build what has not been, or was in a worker that is gone."""
        prepare([(self, [e for e in entries if e.alive and not self._holds(e)])])

    def _holds(self, entry: Entry) -> bool:
        """Whether the entry's worker lives and has its program."""
        return entry.worker is not None and self.crew.holds(entry.seat, entry.worker)

    def _prepare_one(self, entry: Entry) -> None:
        def build() -> None:
            worker = self.crew.start(entry.seat)
            worker.memory_limit_bytes = self._memory_limit(worker, entry)
            answer = worker.call(
                "prepare",
                self.deadlines.prepare_s,
                program=entry.program,
                impl=entry.implementation.name,
                case=self.case.id,
            )
            if entry.prepare_s is None:
                entry.prepare_s = answer["prepare_s"]
            entry.worker = worker
            entry.config = answer["config"]
            if self.artefacts is not None and answer["artefacts"]:
                entry.config |= {"artefacts": artefacts.save(self.artefacts, answer["artefacts"])}
            entry.flags += [f for f in answer["flags"] if f not in entry.flags]
            if self.device.kind == "cuda" and self.asked is not None and self.verdicts is not None:
                given = [d for variant in self.asked.descriptors for d in variant.values()]
                taken = self.verdicts.descriptors
                worker.call("attach", self.deadlines.prepare_s, program=entry.program, given=given, taken=taken)

        if entry.alive:
            self._guard(entry, build)

    def _make_room(self) -> Verdicts:
        """For outputs that are judged."""
        gpu = self.device.kind == "cuda"
        specs = self.case.output_specs()
        fit = (GPU_KEPT_BYTES if gpu else KEPT_BYTES) // max(sum(s.nbytes for s in specs.values()), 1)
        slots = int(np.clip(fit, JUDGES if gpu else 2, STREAK))
        return Verdicts(lambda variant, outputs: self.judge.outputs(variant, outputs), specs, slots, self.arena, gpu)

    def _ready(self) -> None:
        """Wait for inputs and references, once per trial."""
        if hasattr(self, "judge"):
            return
        assert self.asked is not None
        with self.phases("reference"):
            self.question = self.asked.answer()
        self.judge = Judge(self.case, self.question.inputs, self.question.expected, self.seed)

    def _memory_limit(self, worker: Worker, entry: Entry) -> int:
        """Resident bytes at which a worker is ended: what it has, four times the plan, and room for a compiler.

        And the shared arrays that it maps: the input variants, the inputs that it returns, outputs that are kept.
        """
        planned = memory.footprint(entry.implementation, self.case)
        given = sum(s.nbytes for s in self.case.input_specs().values())
        taken = self.case.total_bytes() - given
        cpu = self.device.kind == "cpu"
        kept = max(KEPT_BYTES, 2 * taken) if cpu else max(GPU_KEPT_BYTES, JUDGES * taken)
        mapped = (VARIANTS + 1) * given + kept
        host = self.device.memory_bytes if cpu else 64 * 2**30
        headroom = HEADROOM_BYTES if cpu else GPU_HEADROOM_BYTES
        return min(int(memory.USABLE * host), worker.resident_bytes() + 4 * planned + mapped + headroom)

    def _load(self, entry: Entry) -> None:
        def load() -> None:
            with self.phases("load"), self.crew.exclusive(entry.seat):
                for which in range(memory.INPUT_SETS):
                    entry.variant[which] = which
                    self.crew.start(entry.seat).call(
                        "load",
                        self.deadlines.request_s,
                        program=entry.program,
                        set=which,
                        inputs=self.question.descriptors[which],
                    )

        self._guard(entry, load)

    # -- checking -------------------------------------------------------------------------------------------------

    def _check_all(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.alive and not entry.variant:
                self._load(entry)
                self.progress.say(f"{self.case.id}: checking {entry.implementation.name}")
                if entry.alive:
                    self._guard(entry, partial(self._check, entry))
        self._settle()  # nothing is timed before the verdict on it
        done = [e for e in entries if not (self.measure and self.device.kind not in e.implementation.simulated_on)]
        self._look_at_inputs(done)
        for entry in done:
            if entry.alive:
                entry.end("checked", None)

    def _finish(self, entries: Sequence[Entry]) -> None:
        """Last looks at entries that have been measured, and their memory back."""
        self._settle()
        self._look_at_inputs(entries)
        for entry in entries:
            if entry.alive:
                self._plausible(entry)
            if entry.alive:
                entry.end("ok", None)
        self._release(entries)

    def _check(self, entry: Entry) -> None:
        """First calls on both input sets, then a streak of calls, each on new contents at the old place.

        New contents for every call of the streak: a call that does nothing then leaves a wrong answer behind, even
        where the output holds the right one of an earlier call.
        """
        entry.first_call_s = self._judged_call(entry, 0)
        if entry.alive:
            entry.seconds = self._judged_call(entry, 1)
        gpu = self.device.kind == "cuda"
        limit, together = (GPU_STREAK_SECONDS, memory.INPUT_SETS) if gpu else (STREAK_SECONDS, 1)
        taken: list[float] = []
        begin = time.monotonic()
        while entry.alive and len(taken) < STREAK:
            numbers = range(len(taken), min(len(taken) + together, STREAK))
            taken += self._renewed_calls(entry, [number % memory.INPUT_SETS for number in numbers])
            spent = time.monotonic() - begin
            if len(taken) >= memory.INPUT_SETS and spent > limit:
                break
            if (
                gpu
            ):  # As many in a block as there is time for; half of the outputs are judged while the others are made.
                together = int(np.clip((limit - spent) / spent * len(taken), 1, max(1, self._room // 2)))
        if taken:
            entry.seconds = float(np.median(taken))

    def _renewed_calls(self, entry: Entry, sets: list[int]) -> list[float]:
        """Judged calls, each on other contents than the set's last; seconds of each."""
        if len(sets) == 1:
            self._refill(entry, sets[0])
            return [self._judged_call(entry, sets[0])]
        variants = []
        for which in sets:
            entry.variant[which] = self._other_variant(entry)
            variants.append(entry.variant[which])
        block = self._block(entry, sets, list(range(len(sets))), "check", variants)
        return [us / 1e6 for us in block["samples_us"]]

    @property
    def _room(self) -> int:
        assert self.verdicts is not None
        return self.verdicts.room

    def _judged_call(self, entry: Entry, which: int) -> float:
        return float(self._block(entry, [which], [0], "check")["samples_us"][0]) / 1e6

    def _look_at_inputs(self, entries: Sequence[Entry]) -> None:
        """End those that wrote to their inputs; on a GPU in all workers at once, since they come back over a bus."""
        by_seat = _by_seat(e for e in entries if e.alive)
        with self.phases("inputs"), self._threads(len(by_seat)) as threads:
            list(
                threads.map(lambda queue: [self._guard(e, partial(self._inputs_unchanged, e)) for e in queue], by_seat)
            )

    def _inputs_unchanged(self, entry: Entry) -> None:
        """On a GPU one of the sets, at random: both went through the same calls."""
        looked_at = list(entry.variant.items())
        for which, variant in [self.random.choice(looked_at)] if self.device.kind == "cuda" else looked_at:
            answer = self.crew.start(entry.seat).call(
                "changed",
                self.deadlines.request_s,
                program=entry.program,
                set=which,
                inputs=self.question.descriptors[variant],
            )
            for name, count in answer["bytes"].items():
                if count and entry.alive:
                    entry.end("wrong", f"It wrote to its input {name} ({count} bytes differ after the call).")

    # -- measuring ------------------------------------------------------------------------------------------------

    def _measure(self, entries: Sequence[Entry]) -> None:
        """A pilot, a plan, and the rounds: each visits the entries in random order and takes one block of each."""
        pilot: dict[str, list[float]] = defaultdict(list)
        blocks_s: list[float] = []
        scale = rounds.scale(self.device.kind, self.case.workload)
        for _ in range(scale.pilot):
            for entry in self._shuffled(entries):
                if rounds.slow(entry.seconds):
                    continue
                start = time.perf_counter()
                samples = self._timed_block(entry, rounds.samples_for(entry.seconds, scale))
                if samples is not None:
                    pilot[entry.program].append(float(np.median(samples["samples_us"])) / 1e6)
                    blocks_s.append(time.perf_counter() - start - samples["kernel_s"])
        for entry in entries:
            if entry.alive and not pilot[entry.program]:
                pilot[entry.program] = [entry.seconds]  # its checked calls have told
        if not any(entry.alive for entry in entries):
            return
        left = None if self.available_until is None else self.available_until - time.monotonic()
        if left is not None and self.sustain:
            left -= SUSTAINED_ROUNDS * SUSTAINED_SECONDS * min(len(entries), 1 + SUSTAINED_BEST)
        plan = rounds.plan(pilot, float(np.median(blocks_s)) if blocks_s else 0.0, left, scale)
        self.progress.measuring(self.case.id, sum(plan.turns[e.program] for e in entries if e.alive))
        begin = time.monotonic()
        for number in range(plan.rounds):
            if left is not None and number >= scale.rounds[0] and time.monotonic() - begin > left:
                break  # for want of time, whatever the intervals look like
            taking = [e for e in entries if e.alive and number < plan.turns[e.program]]
            for order, entry in enumerate(self._shuffled(taking)):
                block = self._timed_block(entry, plan.samples[entry.program])
                if block is not None:
                    seen = {k: v for k, v in block["telemetry"].items() if k in TELEMETRY}
                    if "busy_us" in seen:
                        seen["busy_us"] = float(np.median(seen["busy_us"]))
                    kept = {k: block[k] for k in ("t0", "first_us", "samples_us")}
                    entry.rounds.append({"round": self._rounds_done + number, "order": order, **kept, **seen})
                self.progress.advance()
        self._rounds_done += plan.rounds

    def _shuffled(self, entries: Sequence[Entry]) -> list[Entry]:
        alive = [e for e in entries if e.alive]
        return self.random.sample(alive, len(alive))

    def _timed_block(self, entry: Entry, samples: int) -> dict[str, Any] | None:
        """One block with fresh contents in one input set, a call or two judged. The first call finds the caches as the
        entry before left them; it is made and judged like any other but not counted."""

        assert self.verdicts is not None
        self.verdicts.collect()

        def take() -> dict[str, Any]:
            first = self.random.randrange(memory.INPUT_SETS)
            self._refill(entry, first)
            sets = [(first + i) % memory.INPUT_SETS for i in range(samples + 1)]
            # Two calls, or on a GPU one, whose outputs come back over a bus.
            keep = sorted({self.random.randrange(samples + 1), samples})
            if self.device.kind == "cuda":
                keep = [self.random.choice(keep)]
            block = self._block(entry, sets, keep, "block")
            block["kernel_s"] = sum(block["samples_us"]) / 1e6
            block["first_us"], *block["samples_us"] = block["samples_us"]
            return block

        block: dict[str, Any] | None = None
        for _ in range(1 + RETAKES):
            if not entry.alive:
                return None
            block = self._guard(entry, take)
            if block is None or not block["telemetry"].get("throttled"):
                break
        return block if entry.alive else None

    def _sustain(self, entries: Sequence[Entry]) -> None:
        """Back to back, in random order, the baseline and the fastest of the others, without the twin.

        The outputs of the last call are judged.
        """
        last = memory.INPUT_SETS - 1
        hot = False
        burst = {
            e.program: float(np.median([np.median(r["samples_us"]) for r in e.rounds])) for e in entries if e.rounds
        }
        near = SUSTAINED_WITHIN * min(burst.values(), default=0.0)
        others = [e for e in entries if e not in self.always and burst.get(e.program, math.inf) <= near]
        others = sorted(others, key=lambda e: burst[e.program])[:SUSTAINED_BEST]
        taking = [e for e in entries if e in others or (e in self.always and e.replica == 0)]

        def take(entry: Entry) -> dict[str, Any]:
            with (
                self._kept(entry, {last: entry.variant[last]}, "After many calls in a row: ") as slots,
                self.phases("sustain"),
                self.crew.exclusive(entry.seat),
            ):
                block: dict[str, Any] = self.crew.start(entry.seat).call(
                    "sustain",
                    self.deadlines.request_s,
                    program=entry.program,
                    sets=list(range(memory.INPUT_SETS)),
                    keep={n: d for n, (_, d) in slots[last].items()},
                    hot=hot,
                )
            return block

        for number in range(1 if self.case.workload == "ceiling" else SUSTAINED_ROUNDS):
            for order, entry in enumerate(self._shuffled(taking)):
                if not entry.alive:
                    continue
                self.progress.say(f"{self.case.id}: sustaining {entry.implementation.name}")
                block = self._guard(entry, partial(take, entry))
                hot = block is not None
                if block is not None and entry.alive:
                    seen = {k: v for k, v in block["telemetry"].items() if k in TELEMETRY}
                    kept = {k: block[k] for k in ("t0", "samples_us")}
                    entry.sustained.append({"round": number, "order": order, **kept, **seen})
                    if block["telemetry"]["host_bound"]:
                        _flag(entry, "host_bound sustained: calls take the host longer than the device.")
        self._settle()

    def _refill(self, entry: Entry, which: int) -> None:
        """Other contents for one input set, at the same place."""
        entry.variant[which] = self._other_variant(entry)
        with self.phases("refill"), self.crew.exclusive(entry.seat):
            self.crew.start(entry.seat).call(
                "refill",
                self.deadlines.request_s,
                program=entry.program,
                set=which,
                inputs=self.question.descriptors[entry.variant[which]],
            )

    @staticmethod
    def _other_variant(entry: Entry) -> int:
        """Contents that neither of the entry's sets holds."""
        held = set(entry.variant.values())
        return next(v for v in range(VARIANTS) if v not in held)

    def _block(
        self, entry: Entry, sets: list[int], keep: list[int], phase: str, renew: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Calls in a row; the kept ones are judged, on a GPU while others go on. Ends the entry where one is wrong.

        ``renew``: the variant that each call's set is refilled with before it; none where the sets stay as they are.
        """
        deadline = max(self.deadlines.request_s, 20 * entry.seconds * len(sets))
        renewal = {str(index): self.question.descriptors[variant] for index, variant in enumerate(renew)}
        held = renew or [entry.variant[which] for which in sets]
        with self._kept(entry, {index: held[index] for index in keep}) as slots:
            with self.phases(phase), self.crew.exclusive(entry.seat):
                block = self.crew.start(entry.seat).call(
                    "block",
                    deadline,
                    program=entry.program,
                    sets=sets,
                    keep={str(i): {n: d for n, (_, d) in slot.items()} for i, slot in slots.items()},
                    poison=True,
                    **({"renew": renewal} if renewal else {}),
                )
            self.phases.seconds["kernel"] += sum(block["samples_us"]) / 1e6
            for part, seconds in block["telemetry"].get("spent", {}).items():
                self.phases.seconds[f"{phase}.{part}"] += seconds
            entry.method = block["method"]
            self._note_reads(entry, block)
        return block

    @contextmanager
    def _kept(self, entry: Entry, variants: Mapping[int, int], when: str = "") -> Iterator[dict[int, Slot]]:
        """Slots for the outputs of calls (index -> variant of its inputs), judged when the ``with`` block has ended."""
        assert self.verdicts is not None
        verdicts = self.verdicts

        def heard(verdict: Verdict) -> None:
            _keep_worst(entry.errors, verdict)
            if not verdict.right and entry.alive:
                entry.end("wrong", f"{when}{verdict.reason}")

        with self.phases("judge"):
            slots = {index: verdicts.slot() for index in variants}
        try:
            yield slots
        except BaseException:
            for slot in slots.values():
                verdicts.back(slot)
            raise
        with self.phases("judge"):
            for index, slot in slots.items():
                verdicts.ask(variants[index], slot, heard)

    def _settle(self) -> None:
        """Wait for the verdicts that are still out."""
        if self.verdicts is not None:
            with self.phases("judge"):
                self.verdicts.settle()

    def _note_reads(self, entry: Entry, block: dict[str, Any]) -> None:
        """On a CPU: how long outputs took to read right after their call, over what a read may take."""
        copying_us = READ_ALLOWANCE_US + sum(s.nbytes for s in self.case.output_specs().values()) / READ_BYTES_PER_US
        for index, read_us in block["telemetry"].get("read_us", {}).items():
            call_us = block["samples_us"][int(index)]
            entry.reads.append((read_us / max(copying_us, READ_AFTER_CALL * call_us), read_us, call_us))

    def _plausible(self, entry: Entry) -> None:
        """A time beyond what physics allows is a wrong time, whatever the outputs look like.

        On a CPU a call is over when it returns: reads that always take far longer than the call wait for its work. One
        that does may have been preempted.
        """
        late, read_us, call_us = min(entry.reads, default=(0.0, 0.0, 0.0))
        if late > 1:
            entry.end(
                "wrong",
                f"Its calls returned after {call_us:.3g} us, and reading the outputs then took {read_us:.3g} us at the "
                "least: the work was not over.",
            )
            return
        fastest = min((s for r in entry.rounds for s in r["samples_us"]), default=None)
        if fastest is None:
            return
        floor = self.limits.least_seconds(self.case)
        if fastest / 1e6 < floor:
            entry.end(
                "wrong",
                f"A call took {fastest:.3g} us; this device cannot do the work in under {floor * 1e6:.3g} us.",
            )
            return
        if any(r.get("throttled") for r in entry.rounds):
            _flag(entry, "Throttled by heat or hardware in some blocks, which were taken again in vain.")
        if any(r.get("foreign") for r in entry.rounds):
            _flag(entry, "Other processes computed on the GPU meanwhile.")
        busy = [(r["busy_us"], float(np.median(r["samples_us"]))) for r in entry.rounds if "busy_us" in r]
        share = float(np.median([1 - b / span for b, span in busy])) if busy else 0.0
        if share > HOST_BOUND:
            _flag(entry, f"host_bound: for {100 * share:.0f} % of a call the device has nothing to do.")
        first = float(np.median([r["first_us"] for r in entry.rounds]))
        others = float(np.median([np.median(r["samples_us"]) for r in entry.rounds]))
        if first > max(REMEMBERING * others, others + COLD_CACHES_US):
            entry.flags.append(
                f"The first call after new input contents takes {first / others:.0f} times the others: "
                "answers may be remembered."
            )

    # -- ending ---------------------------------------------------------------------------------------------------

    def _guard(self, entry: Entry, action: Callable[[], Any]) -> Any:
        """Do it; an error ends the entry. Where the worker died, its other entries move to a new one."""
        try:
            return action()
        except WorkerError as error:
            entry.end(_STATUS[error.kind], error.message)
            if error.kind == "failed" and self.device.kind == "cuda":
                self._probe(entry.seat)
            if not self.crew.alive(entry.seat):
                self._revive(entry.seat)
            return None

    def _probe(self, seat: tuple[str, int]) -> None:
        """End a worker whose device no longer answers: after an illegal access all that it does fails."""
        if self.crew.alive(seat):
            worker = self.crew.start(seat)
            try:
                worker.call("probe", self.deadlines.request_s)
            except WorkerError:
                worker.discard()

    def _revive(self, seat: tuple[str, int]) -> None:
        lost = [e for e in self.entries if e.seat == seat and e.worker is not None]
        for entry in lost:
            entry.worker = None
        for entry in lost:
            if entry.alive:
                self._prepare_one(entry)
            if entry.alive and entry.variant:
                entry.variant = {}
                self._load(entry)

    def _release(self, entries: Sequence[Entry]) -> None:
        """Give memory back, on a GPU in all workers at once: unmapping what was shared takes them a second."""
        by_seat = _by_seat(e for e in entries if self._holds(e))
        with self.phases("release"), self._threads(len(by_seat)) as threads:
            list(threads.map(self._release_in_turn, by_seat))

    def _threads(self, workers: int) -> ThreadPoolExecutor:
        """To ask so many workers at once; on a CPU one after the other."""
        return ThreadPoolExecutor(max(workers, 1) if self.device.kind == "cuda" else 1)

    def _release_in_turn(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.worker is None or not self._holds(entry):
                continue
            worker, entry.worker = entry.worker, None
            try:
                answer = worker.call("release", self.deadlines.request_s, program=entry.program)
                entry.peak_memory_bytes = answer["peak_memory_bytes"]
            except WorkerError as error:
                entry.flags.append(f"release failed: {error.message}")


def prepare(building: Sequence[tuple[Trial, Sequence[Entry]]]) -> None:
    """Build entries of several trials in all workers at once; within one worker, one after the other.

    On a GPU those that race come last, each alone, and no more are built at the same time than there are cores.
    """
    by_seat: dict[tuple[str, int], list[tuple[Trial, Entry]]] = defaultdict(list)
    racing: list[tuple[Trial, Entry]] = []
    for one, entries in building:
        for entry in entries:
            alone = one.device.kind == "cuda" and entry.implementation.races
            (racing if alone else by_seat[entry.seat]).append((one, entry))
    waiting = {entry.seat: (one, entry) for one, entry in [*racing, *(w for each in by_seat.values() for w in each)]}
    if not waiting:
        return
    first = building[0][0]
    cases = [one.case.id for one, entries in building if entries]
    told = cases[0] if len(cases) == 1 else f"{cases[0]} and {len(cases) - 1} more"
    first.progress.say(f"{told}: preparing in {', '.join(sorted({stack for stack, _ in waiting}))}")
    at_once = min(len(waiting), first.device.threads) if first.device.kind == "cuda" else len(waiting)

    def start(seat: tuple[str, int]) -> None:
        one, entry = waiting[seat]
        one._guard(entry, lambda: one.crew.start(seat))

    def in_turn(queue: Sequence[tuple[Trial, Entry]]) -> None:
        for one, entry in queue:
            one._prepare_one(entry)

    with ThreadPoolExecutor(at_once) as threads:
        try:
            with first.phases("start"):
                list(threads.map(start, waiting))
            with first.phases("prepare"):
                list(threads.map(in_turn, by_seat.values()))
                with first.phases("prepare.racing"):
                    list(threads.map(in_turn, [racing]))
        except KeyboardInterrupt:
            first.crew.stop()  # ends the requests that the threads wait for
            raise


def prepare_ahead(trials: Sequence[Trial]) -> None:
    """Build the first groups of several trials at once. What a trial cannot do, it tells when it is run."""
    opened = []
    for one in trials:
        with contextlib.suppress(NoRoom, BrokenProcessPool):
            one.open()
            opened.append(one)
    if opened:
        prepare([(one, one.groups[0]) for one in opened])


def result(case: Case, entry: Entry, seed: int, *, complete: bool) -> dict[str, Any]:
    """The fields of an entry's result record."""
    i = entry.implementation
    right = entry.status in ("ok", "checked")
    return {
        "case": case.id,
        "impl": i.name,
        "replica": entry.replica,
        "status": entry.status,
        "reason": entry.reason,
        "method": entry.method if entry.rounds else None,
        "rounds": entry.rounds,
        "prepare_s": entry.prepare_s,
        "first_call_s": entry.first_call_s,
        "peak_memory_bytes": entry.peak_memory_bytes,
        "errors": entry.errors,
        "traffic_bytes": i.traffic_bytes(case) if right else None,
        "workspace_bytes": i.workspace_bytes(case) if right else None,
        "config": entry.config,
        "flags": entry.flags,
        "seed": seed,
        "complete": complete,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def refused(case: Case, implementation: Implementation, reason: str, seed: int) -> dict[str, Any]:
    """The result of an implementation that does not run the case at all."""
    entry = Entry(implementation, 0, "", status="unsupported", reason=reason)
    return result(case, entry, seed, complete=True)


def _by_seat(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Entries of each worker."""
    queues: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        queues[entry.seat].append(entry)
    return list(queues.values())


def _flag(entry: Entry, remark: str) -> None:
    if remark not in entry.flags:
        entry.flags.append(remark)


def _keep_worst(errors: dict[str, dict[str, float]], verdict: Verdict) -> None:
    for name, figures in verdict.errors.items():
        before = errors.setdefault(name, dict.fromkeys(figures, 0.0))
        errors[name] = {k: max(before[k], v) for k, v in figures.items()}
