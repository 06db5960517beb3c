"""A GPU's case, start to end, by workers in this process whose device is made up: what a GPU alone does."""

import time
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from analysis.statistics import FALSE_DISCOVERY
from benchmarks.engine import operations, trial
from benchmarks.engine.buffers import Arena, copy_into
from benchmarks.engine.machine import PhysicalLimits
from benchmarks.engine.pool import WorkerError
from benchmarks.engine.reference import Reference
from benchmarks.engine.timing import cpu
from impls import registry
from impls.contract import Device, Implementation, Program
from impls.workloads.base import parse_case

CASE = parse_case("gemm:32x48x64:f32")
GPU = Device("cuda", "Made up", "sm_0", 1, 8 * 2**30, frozenset())


class Product(Program):
    """A product; from its ``wrong_from``-th call on, one element is off."""

    def __init__(self, wrong_from):
        super().__init__()
        self.calls, self.wrong_from = 0, wrong_from

    def load(self, inputs):
        return inputs

    def refill(self, loaded, inputs):
        return inputs

    def run(self, loaded):
        self.calls += 1
        product = loaded["A"] @ loaded["B"]
        if self.wrong_from is not None and self.calls >= self.wrong_from:
            product[5, 7] += 1
        return product

    def read_outputs(self, result):
        return {"C": result}

    def read_inputs(self, loaded):
        return loaded


class Made(Implementation):
    workload = "gemm"
    devices = ("cuda",)
    summary = "for this test"

    def __init__(self, name, wrong_from=None):
        self.name, self.wrong_from = name, wrong_from

    @property
    def stack(self):
        return self.name.partition(".")[0]

    def prepare(self, case, device):
        return Product(self.wrong_from)


class Clock:
    """The made-up device's timing module: a CPU's, and ``sustain``, which notes whether the device was hot.

    ``answer`` is what the device says when it is probed.
    """

    def __init__(self):
        self.hot = []

    def answer(self):
        pass

    def block(self, *arguments):
        block = cpu.block(*arguments)
        del block["telemetry"]["read_us"]
        return block

    def sustain(self, program, loaded, sets, keep, hot):
        self.hot.append(hot)
        for which in sets:
            result = program.run(loaded[which])
        copy_into(keep, program.read_outputs(result))
        return {"samples_us": [5.0] * 4, "t0": 0.0, "telemetry": {"host_bound": False, "clock_mhz": 1500.0}}


class Worker:
    """As the pool's, without a process. ``asked`` notes the operations of all of them."""

    memory_limit_bytes, asked = 0, []

    def __init__(self):
        self._operations, self.alive = operations.Operations(), True

    def resident_bytes(self):
        return 0

    def discard(self):
        self.alive = False

    def call(self, op, deadline_s, **arguments):
        self.asked.append(op)
        if op == "prepare":
            arguments["device"] = asdict(GPU)
        reply = self._operations.reply({"id": 1, "op": op, **arguments})
        if not reply["ok"]:
            raise WorkerError(reply["error"]["kind"], reply["error"]["message"])
        return reply["result"]


class Crew:
    def __init__(self):
        self._workers = {}

    def start(self, seat):
        if not self.alive(seat):
            self._workers[seat] = Worker()
        return self._workers[seat]

    def alive(self, seat):
        return seat in self._workers and self._workers[seat].alive

    def holds(self, seat, worker):
        return self._workers.get(seat) is worker and worker.alive

    @contextmanager
    def exclusive(self, seat):
        yield


@pytest.fixture(scope="module")
def reference():
    made = Reference()
    yield made
    made.close()


@pytest.fixture
def run(monkeypatch, reference):
    def go(*implementations, sustain=True, available_s=None, cases=(CASE,)):
        """Results of ``cases``, one list after the other, the clock, and the arrays that are left."""
        clock, crew = Clock(), Crew()
        Worker.asked.clear()
        by_name = {i.name: i for i in implementations}
        monkeypatch.setattr(registry, "find", lambda name, workload: by_name[name])
        monkeypatch.setattr(operations.importlib, "import_module", _importing(clock))
        arena = Arena("test")
        said = SimpleNamespace(**dict.fromkeys(("say", "measuring", "advance"), lambda *a: None))
        try:
            trials = [
                trial.Trial(
                    case,
                    implementations,
                    implementations[0],
                    crew=crew,
                    reference=reference,
                    arena=arena,
                    device=GPU,
                    limits=PhysicalLimits(),
                    seed=7,
                    progress=said,
                    phases=trial.Phases(),
                    deadlines=trial.Deadlines(),
                    sustain=sustain,
                    place=place,
                )
                for place, case in enumerate(cases)
            ]
            if len(cases) > 1:
                trial.prepare_ahead(trials)
            return [r for one in trials for r in one.run(available_s)], clock, set(arena._files)
        finally:
            arena.close()

    return go


def _importing(clock):
    imported, pinned = operations.importlib.import_module, []
    gpu = SimpleNamespace(
        Residency=operations.Residency,  # the host's
        gpu=lambda: SimpleNamespace(synchronize=clock.answer),
        pin=lambda array: pinned.append(array) or True,
        unpin=lambda array: pinned.pop([a is array for a in pinned].index(True)),  # each once, while it is mapped
    )
    made_up = {operations.TIMING["cuda"]: clock, operations.GPU: gpu}
    return lambda name: made_up.get(name) or imported(name)


def test_both_regimes_are_recorded_and_only_the_first_sustained_call_finds_a_cold_device(run, monkeypatch):
    monkeypatch.setattr(trial, "SUSTAINED_WITHIN", 1e3)  # equals on a busy CPU may differ by much
    results, clock, _ = run(Made("base.one"), Made("other.two"))
    assert {(r["impl"], r["replica"], r.get("regime", "burst")): r["status"] for r in results} == {
        ("base.one", 0, "burst"): "ok",
        ("base.one", 1, "burst"): "ok",
        ("other.two", 0, "burst"): "ok",
        ("base.one", 0, "sustained"): "ok",
        ("other.two", 0, "sustained"): "ok",
    }
    for result in results:
        if result.get("regime") == "sustained":
            assert [r["round"] for r in result["rounds"]] == list(range(trial.SUSTAINED_ROUNDS))
        else:
            assert len(result["rounds"]) >= 8
        assert 0 < result["errors"]["C"]["worst"] < 1
    assert clock.hot == [False] + [True] * (2 * trial.SUSTAINED_ROUNDS - 1)


@pytest.mark.parametrize("wrong_from", [1, 2, 12, 60])
def test_what_turns_wrong_has_no_times_however_late_the_verdict(run, wrong_from):
    results, _, _ = run(Made("base.one"), Made("other.two", wrong_from))
    by_impl = {(r["impl"], r["replica"]): r for r in results if r["impl"] == "other.two"}
    assert by_impl["other.two", 0]["status"] == "wrong"
    assert "C[5, 7]" in by_impl["other.two", 0]["reason"]
    assert by_impl["other.two", 0]["rounds"] == []
    assert all(r.get("regime") != "sustained" for r in results if r["impl"] == "other.two")
    assert {r["status"] for r in results if r["impl"] == "base.one"} == {"ok"}


def test_an_interrupted_case_keeps_what_has_been_judged_right(run, monkeypatch):
    blocks = 0
    taken = trial.Trial._timed_block

    def interrupted(self, entry, samples):
        nonlocal blocks
        blocks += 1
        if blocks > 25:
            raise KeyboardInterrupt
        return taken(self, entry, samples)

    monkeypatch.setattr(trial.Trial, "_timed_block", interrupted)
    results, _, left = run(Made("base.one"), Made("other.two"))
    assert results and all(r["status"] == "ok" and r["rounds"] and not r["complete"] for r in results)
    assert not left


def test_a_wrong_output_found_when_interrupted_counts(run, monkeypatch):
    blocks = 0
    taken = trial.Trial._timed_block

    def interrupted(self, entry, samples):
        nonlocal blocks
        blocks += 1
        if blocks > 25:
            raise KeyboardInterrupt
        return taken(self, entry, samples)

    monkeypatch.setattr(trial.Trial, "_timed_block", interrupted)
    results, _, _ = run(Made("base.one"), Made("other.two", wrong_from=60))
    assert [r["status"] for r in results if r["impl"] == "other.two"] == ["wrong"]


def test_a_gpu_that_disappears_ends_in_records_of_every_entry(run, monkeypatch):
    """From some block on every operation fails, as CUDA's do for good once the device has fallen off the bus."""
    blocks = 0
    taken = Clock.block

    def gone(self, *arguments):
        nonlocal blocks
        blocks += 1
        if blocks > 25:
            monkeypatch.setattr(Product, "refill", gone)
            monkeypatch.setattr(Product, "read_inputs", gone)
            monkeypatch.setattr(Product, "release", gone)
            raise RuntimeError("CUDA says CUDA_ERROR_DEVICE_UNAVAILABLE")
        return taken(self, *arguments)

    monkeypatch.setattr(Clock, "block", gone)
    results, _, left = run(Made("base.one"), Made("other.two"))
    assert {(r["impl"], r["replica"]) for r in results} == {("base.one", 0), ("base.one", 1), ("other.two", 0)}
    for result in results:
        assert result["status"] == "failed" and "CUDA_ERROR_DEVICE_UNAVAILABLE" in result["reason"]
        assert result["rounds"] == [] and result["complete"]
        assert any(flag.startswith("release failed") for flag in result["flags"])
    assert not left


def test_what_races_candidates_when_it_is_prepared_is_alone_then(run):
    within, most = [], []

    class Noted(Made):
        def __init__(self, name, races):
            super().__init__(name)
            self.races = races

        def prepare(self, case, device):
            within.append(self.name)
            time.sleep(0.05)
            most.append((self.name, len(within)))
            within.remove(self.name)
            return super().prepare(case, device)

    results, _, _ = run(Noted("base.one", True), Noted("other.two", True), Noted("third.three", False))
    assert {r["status"] for r in results} == {"ok"}
    assert [count for name, count in most if name != "third.three"] == [1, 1, 1]
    assert most[0][0] == "third.three"


class Slow(Made):
    def prepare(self, case, device):
        program = super().prepare(case, device)
        product = program.run
        program.run = lambda loaded: time.sleep(0.01) or product(loaded)
        return program


def test_what_is_far_slower_than_the_fastest_is_not_sustained_unless_it_is_the_baseline(run):
    results, _, _ = run(Slow("base.one"), Made("fast.two"), Slow("slow.three"))
    assert {r["impl"] for r in results if r.get("regime") == "sustained"} == {"base.one", "fast.two"}
    assert {r["status"] for r in results} == {"ok"}


def test_a_stacks_implementations_are_dealt_among_workers_and_the_twin_has_its_own(run, monkeypatch):
    seats = {}
    prepared = trial.Trial._prepare_one

    def noted(self, entry):
        seats[entry.program.partition("|")[2]] = entry.seat
        prepared(self, entry)

    monkeypatch.setattr(trial.Trial, "_prepare_one", noted)
    results, _, _ = run(*(Made(f"base.{name}") for name in "abcdefg"), sustain=False)
    assert {r["status"] for r in results} == {"ok"}
    assert seats["base.a|0"] == seats["base.g|0"] and len(set(seats.values())) == trial.LANES + 1
    assert sum(seat == seats["base.a|1"] for seat in seats.values()) == 1


def test_every_call_of_the_streak_finds_other_contents_though_few_requests_are_made(run, monkeypatch):
    calls = {}

    class Noted(Made):
        def prepare(self, case, device):
            program = super().prepare(case, device)
            product, seen = program.run, calls.setdefault(self.name, [])
            program.run = lambda loaded: seen.append(loaded["A"].tobytes()) or product(loaded)
            return program

    monkeypatch.setattr(trial.Trial, "_measure", lambda self, entries: None)
    run(Noted("base.one"), Noted("other.two"), sustain=False)
    streak = calls["other.two"][2 : 2 + trial.STREAK]
    assert len(streak) == trial.STREAK == len(calls["other.two"]) - 2
    for earlier, later in zip(calls["other.two"], calls["other.two"][1:], strict=False):
        assert earlier != later
    for earlier, later in zip(calls["other.two"], calls["other.two"][2:], strict=False):
        assert earlier != later  # at the same place, with two sets in turn
    assert Worker.asked.count("block") == 3 * (2 + 3)


@pytest.mark.parametrize("every", [2, 7, 16])
def test_what_skips_one_call_in_n_is_wrong(run, every):
    class Skips(Made):
        def prepare(self, case, device):
            program = super().prepare(case, device)
            product, last = program.run, {}

            def skipping(loaded):
                if not last or program.calls % every:
                    last["C"] = product(loaded)
                else:
                    program.calls += 1
                return last["C"]

            program.run = skipping
            return program

    results, _, _ = run(Made("base.one"), Skips("other.two"), sustain=False)
    assert {r["impl"]: r["status"] for r in results if not r["replica"]} == {"base.one": "ok", "other.two": "wrong"}


def test_of_five_equals_three_are_sustained_in_rounds_enough_for_a_verdict(run, monkeypatch):
    monkeypatch.setattr(trial, "SUSTAINED_WITHIN", 1e9)
    results, clock, _ = run(*(Made(f"{name}.one") for name in ("base", "a", "b", "c", "d")))
    sustained = {r["impl"]: r["rounds"] for r in results if r.get("regime") == "sustained"}
    assert len(sustained) == 3 and "base.one" in sustained
    # Paired: a block of each in every round, and enough of these for verdicts where half of what is compared differs.
    rounds = trial.SUSTAINED_ROUNDS
    assert 2 / 2**rounds / 0.5 <= FALSE_DISCOVERY
    assert {tuple(r["round"] for r in each) for each in sustained.values()} == {tuple(range(rounds))}
    for number in range(rounds):
        assert sorted(each[number]["order"] for each in sustained.values()) == [0, 1, 2]
    assert len(clock.hot) == 3 * rounds


def test_of_many_equals_the_fastest_are_sustained_and_the_baseline(run, monkeypatch):
    monkeypatch.setattr(trial, "SUSTAINED_BEST", 1)
    monkeypatch.setattr(trial, "SUSTAINED_WITHIN", 1e9)

    results, clock, _ = run(Slow("base.one"), Slow("slow.two"), Made("fast.three"))
    assert {r["impl"] for r in results if r.get("regime") == "sustained"} == {"base.one", "fast.three"}
    assert len(clock.hot) == 2 * trial.SUSTAINED_ROUNDS


@pytest.mark.parametrize(("left", "rounds"), [(1e3, 10), (-1.0, 8)])
def test_short_of_time_there_are_fewer_rounds(run, left, rounds):
    results, _, _ = run(Made("base.one"), sustain=False, available_s=left)
    assert [len(r["rounds"]) for r in results] == [rounds, rounds]


def test_what_breaks_its_device_takes_no_other_of_its_stack_along(run, monkeypatch):
    """As after an illegal access: whatever the worker does from then on fails. Its other programs move to a new one."""
    broken = []

    def answer(self):
        if broken and Worker.asked[-1] == "probe":
            raise RuntimeError("CUDA says CUDA_ERROR_ILLEGAL_ADDRESS")

    class Breaks(Made):
        def prepare(self, case, device):
            program = super().prepare(case, device)

            def run(loaded):
                broken.append(self.name)
                raise RuntimeError("CUDA says CUDA_ERROR_ILLEGAL_ADDRESS")

            program.run = run
            return program

    monkeypatch.setattr(trial, "LANES", 1)
    monkeypatch.setattr(Clock, "answer", answer)
    results, _, left = run(Made("base.one"), Made("other.two"), Breaks("other.three"), Made("other.four"))
    assert {r["impl"]: r["status"] for r in results} == {
        "base.one": "ok",
        "other.two": "ok",
        "other.three": "failed",
        "other.four": "ok",
    }
    assert Worker.asked.count("prepare") == 7 and broken == ["other.three"]
    assert not left


TWO = (CASE, parse_case("gemm:16x48x64:f32"))


def test_several_cases_are_prepared_at_once_and_measured_one_after_the_other(run):
    results, _, left = run(Made("base.one"), Made("other.two"), sustain=False, cases=TWO)
    assert [(r["case"], r["status"]) for r in results] == [(c.id, "ok") for c in TWO for _ in range(3)]
    asked = [op for op in Worker.asked if op in ("prepare", "load", "release")]
    sets, programs = 2, 3
    assert asked[: 2 * programs] == ["prepare"] * 2 * programs
    assert asked[2 * programs :] == 2 * (["load"] * sets * programs + ["release"] * programs)
    assert not left


def test_what_was_prepared_ahead_in_a_worker_that_died_is_prepared_again(run, monkeypatch):
    dying = []

    class Dies(Made):
        def prepare(self, case, device):
            program = super().prepare(case, device)
            product = program.run

            def run(loaded):
                if case is not TWO[0] and case.id == TWO[0].id and not dying:
                    dying.append(case.id)
                    raise MemoryError
                return product(loaded)

            program.run = run
            return program

    call = Worker.call

    def killed(self, op, deadline_s, **arguments):
        before = len(dying)
        try:
            return call(self, op, deadline_s, **arguments)
        except WorkerError:
            if len(dying) > before:
                self.discard()
                raise WorkerError("crashed", "It ended with signal 11.") from None
            raise

    monkeypatch.setattr(trial, "LANES", 1)
    monkeypatch.setattr(Worker, "call", killed)
    results, _, left = run(Made("base.one"), Dies("other.two"), sustain=False, cases=TWO)
    told = {(r["case"], r["impl"], r["replica"]): r["status"] for r in results}
    assert told.pop((TWO[0].id, "other.two", 0)) == "crashed"
    assert set(told.values()) == {"ok"} and len(told) == 5
    assert Worker.asked.count("prepare") == 6 + 1
    assert not left


def test_what_writes_to_its_inputs_is_wrong(run):
    class Writes(Made):
        def prepare(self, case, device):
            program = super().prepare(case, device)
            product = program.run

            def writing(loaded):
                result = product(loaded)
                loaded["A"][3, 4] += 1e-3
                return result

            program.run = writing
            program.load = lambda inputs: {name: array.copy() for name, array in inputs.items()}
            program.refill = lambda loaded, inputs: program.load(inputs)
            return program

    results, _, _ = run(Made("base.one"), Writes("other.two"), sustain=False)
    by_impl = {r["impl"]: r for r in results if not r["replica"]}
    assert by_impl["base.one"]["status"] == "ok" and by_impl["other.two"]["status"] == "wrong"


def test_deadlines_within_a_budget_leave_time_for_others():
    assert trial.Deadlines.within(None) == trial.Deadlines() == trial.Deadlines.within(36_000.0)
    short = trial.Deadlines.within(520.0)
    assert (short.prepare_s, short.request_s) == (52.0, 26.0)
    assert trial.Deadlines.within(60.0) == trial.Deadlines(30.0, 20.0)
    assert trial.Deadlines.within(520.0, 12.0).prepare_s == 12.0
