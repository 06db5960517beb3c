"""The pool: whatever an implementation does to its worker, the reason is right and the others go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import parallelism
from benchmarks.engine.buffers import Arena
from benchmarks.engine.pool import Pool, Worker, WorkerError, WorkerSpec
from tests.adversaries import stage
from tests.adversaries.cheats.deaths import EXIT_CODE


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setenv("RIDGEMARK_EXTRA_STACKS", stage.STACKS)
    pool = Pool(stage.ROOT, stage.DEVICE, stage.THREADS)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def shared():
    """A pool that many tests take their workers from, with ``hire``: starting one takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGEMARK_EXTRA_STACKS", stage.STACKS)
        pool = Pool(stage.ROOT, stage.DEVICE, stage.THREADS)
        yield pool
        pool.stop()


def hire(pool: Pool, replica: int = 0) -> Worker:
    """The living worker in a seat, or a new one."""
    living = [w for w in pool.workers if w.replica == replica]
    return living[0] if living else pool.start(stage.SPEC, replica)


@pytest.fixture
def arena():
    arena = Arena("test")
    yield arena
    arena.close()


def state(pid: int) -> str:
    """The kernel's letter for a process: R, S, T (stopped), Z ...; X where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def eventually(condition, seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return False


def goes_on(pool: Pool, arena: Arena) -> bool:
    """Whether the seat of a dead worker takes a new one, which works."""
    act = stage.Act(hire(pool), arena, "honest").begin()
    _, (output,) = act.block([0])
    return bool(act.right(0, output).all())


# --- starting and asking ---------------------------------------------------------------------------------------------


def test_a_worker_is_what_it_was_started_as(pool):
    worker = pool.start(stage.SPEC, replica=1)
    assert (worker.stack, worker.replica, worker.alive) == ("cheats", 1, True)
    assert worker.versions["numpy"] == np.__version__
    assert worker.python == ".".join(map(str, sys.version_info[:3]))
    assert worker.resident_bytes() > 2**20
    assert pool.workers == (worker,)


def test_every_worker_gets_the_same_cpus_and_threads_and_a_group_of_its_own(pool):
    spec = WorkerSpec("cheats", stage.SPEC.python, {"OMP_NUM_THREADS": "99", "MY_FLAG": "1"})
    workers = [pool.start(spec), pool.start(stage.SPEC, 1)]
    wanted = parallelism.environment(stage.THREADS)
    for worker in workers:
        environ = dict(
            entry.split("=", 1) for entry in Path(f"/proc/{worker.pid}/environ").read_text().split("\0") if entry
        )
        assert wanted.items() <= environ.items()
        assert environ["PYTHONPATH"].split(os.pathsep)[0] == str(stage.ROOT)
        assert os.getpgid(worker.pid) == worker.pid
    assert "MY_FLAG=1" in Path(f"/proc/{workers[0].pid}/environ").read_text()
    affinities = [os.sched_getaffinity(w.pid) for w in workers]
    assert affinities[0] == affinities[1] == set(pool.cpus) and len(pool.cpus) == stage.THREADS


def test_more_threads_than_cpus_are_refused():
    with pytest.raises(ValueError, match="threads were asked for"):
        Pool(stage.ROOT, stage.DEVICE, len(os.sched_getaffinity(0)) + 1)


def test_an_honest_program_is_right_on_every_call(shared, arena):
    act = stage.Act(hire(shared), arena, "honest").begin()
    answer, outputs = act.block([0, 1, 0, 1])
    assert len(answer["samples_us"]) == 4
    for which, output in zip([0, 1, 0, 1], outputs, strict=True):
        assert act.right(which, output).all()
    act.refill(0, seed=5)
    assert act.right(0, act.block([0])[1][0]).all()


def test_a_seat_takes_one_living_worker(pool):
    worker = pool.start(stage.SPEC)
    with pytest.raises(ValueError, match="living worker"):
        pool.start(stage.SPEC)
    worker.stop()
    assert not worker.alive
    assert pool.start(stage.SPEC).alive


def test_a_stopped_worker_says_so(shared):
    worker = hire(shared)
    worker.stop()
    worker.stop()
    assert state(worker.pid) == "X"
    with pytest.raises(WorkerError, match="stopped by the harness") as error:
        worker.call("release", 5, program="p")
    assert error.value.kind == "crashed"


def test_a_program_that_is_let_go_before_its_reply_does_not_shift_the_next(shared, arena, monkeypatch):
    """Ctrl-C while waiting: the reply that comes late must not be taken for the next request's."""
    act = stage.Act(hire(shared), arena, "honest").begin()
    receive = act.worker._receive

    def interrupted(stopwatch):
        raise KeyboardInterrupt

    monkeypatch.setattr(act.worker, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        act.block([0, 0, 0])
    monkeypatch.setattr(act.worker, "_receive", receive)
    answer, outputs = act.block([1])
    assert len(answer["samples_us"]) == 1 and act.right(1, outputs[0]).all()


def test_several_threads_may_ask_one_worker(shared, arena):
    worker = hire(shared)
    acts = [stage.Act(worker, Arena(f"t{i}"), "honest").begin() for i in range(4)]
    right = [False] * 4

    def play(i: int) -> None:
        right[i] = all(acts[i].right(0, o).all() for _ in range(20) for o in acts[i].block([0])[1])

    players = [threading.Thread(target=play, args=(i,)) for i in range(4)]
    for player in players:
        player.start()
    for player in players:
        player.join(60)
    assert right == [True] * 4
    for act in acts:
        act.arena.close()


def test_a_worker_whose_start_was_interrupted_is_stopped_with_the_rest(pool, monkeypatch):
    def interrupted(worker, deadline_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "greet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.start(stage.SPEC)
    (worker,) = pool.workers
    pool.stop()
    assert state(worker.pid) == "X"


# --- what does not even start ----------------------------------------------------------------------------------------


def test_an_interpreter_that_is_not_there(pool):
    with pytest.raises(WorkerError, match=r"/no/python of cheats does not start .*ridgemark doctor") as error:
        pool.start(WorkerSpec("cheats", Path("/no/python")))
    assert error.value.kind == "failed"
    assert pool.workers == ()


def test_an_interpreter_that_is_none(pool):
    with pytest.raises(WorkerError, match="Its worker exited with code 1 at its start") as error:
        pool.start(WorkerSpec("cheats", Path("/bin/false")))
    assert error.value.kind == "crashed"


def test_a_stack_that_is_not_there(pool):
    with pytest.raises(WorkerError, match="cannot begin: KeyError: 'nowhere'") as error:
        pool.start(WorkerSpec("nowhere", stage.SPEC.python))
    assert error.value.kind == "failed"
    assert "Traceback" in error.value.detail


def checkout(root: Path, worker: str) -> None:
    """A checkout whose worker is this program."""
    package = root / "benchmarks" / "engine"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "worker.py").write_text(worker)


@pytest.mark.parametrize(
    ("speaks", "kind", "says"),
    [
        ('{"protocol": 99, "stack": "cheats"}\\n', "protocol", "speaks protocol 99 and this harness"),
        ("Welcome to GNU\\n", "protocol", "Not a JSON line"),
        ("", "crashed", "Its worker exited with code 7 at its start"),
    ],
)
def test_a_worker_that_is_no_worker(tmp_path, speaks, kind, says):
    checkout(
        tmp_path,
        "import os, sys\n"
        "replies = int(sys.argv[sys.argv.index('--replies') + 1])\n"
        "print('last words')\n"
        f"os.write(replies, b'{speaks}')\n"
        "sys.exit(7)\n",
    )
    pool = Pool(tmp_path, stage.DEVICE, stage.THREADS)
    try:
        with pytest.raises(WorkerError, match=says) as error:
            pool.start(stage.SPEC)
        assert error.value.kind == kind and "\n" not in error.value.message
        assert "last words" in error.value.detail
    finally:
        pool.stop()


def test_a_worker_that_never_greets(tmp_path):
    checkout(tmp_path, "import time\ntime.sleep(600)\n")
    pool = Pool(tmp_path, stage.DEVICE, stage.THREADS)
    try:
        with pytest.raises(WorkerError, match=r"Its worker's start took longer than 0\.5 s") as error:
            pool.start(stage.SPEC, deadline_s=0.5)
        assert error.value.kind == "timeout"
    finally:
        pool.stop()


# --- adversaries -----------------------------------------------------------------------------------------------------

DEATHS_IN_RUN = {
    "segfaults": ("crashed", "Its worker was killed by SIGSEGV during block."),
    "aborts": ("crashed", "Its worker was killed by SIGABRT during block."),
    "killed": ("crashed", "Its worker was killed by SIGKILL during block. The harness did not do it"),
    "exits": ("crashed", f"Its worker exited with code {EXIT_CODE} during block."),
    "closes_descriptors": ("crashed", "Its worker closed its pipes during block."),
    "hangs_in_run": ("timeout", "Block took longer than 1 s and was ended."),
    "stops_itself": ("timeout", "Block took longer than 1 s and was ended."),
}

DEATHS_IN_PREPARE = {
    "segfaults_in_prepare": ("crashed", "Its worker was killed by SIGSEGV during prepare."),
    "exits_in_prepare": ("crashed", f"Its worker exited with code {EXIT_CODE} during prepare."),
    "hangs_in_prepare": ("timeout", "Prepare took longer than 1 s and was ended."),
}

FAILURES = {
    "raises_in_run": ("failed", "block raised RuntimeError: launch failed."),
    "wrong_shape": ("failed", f"It gave C as float32[{stage.N}, {stage.M}], not as float32[{stage.M}, {stage.N}]."),
    "wrong_dtype": ("failed", f"It gave C as float64[{stage.M}, {stage.N}], not as float32[{stage.M}, {stage.N}]."),
    "no_output": ("failed", "It gave nothing, not C."),
}


@pytest.mark.parametrize("adversary", DEATHS_IN_RUN)
def test_a_death_in_a_call_has_its_reason_and_its_seat_a_new_worker(shared, arena, adversary):
    bystander = stage.Act(hire(shared, 1), arena, "honest").begin()
    act = stage.Act(hire(shared), arena, adversary).begin()
    with pytest.raises(WorkerError) as error:
        act.block([0], deadline_s=1 if DEATHS_IN_RUN[adversary][0] == "timeout" else 30)
    kind, says = DEATHS_IN_RUN[adversary]
    assert error.value.kind == kind and error.value.message.startswith(says)
    assert not act.worker.alive and state(act.worker.pid) == "X"
    with pytest.raises(WorkerError) as again:
        act.worker.call("release", 5, program="p")
    assert again.value.kind == kind
    assert goes_on(shared, arena)
    assert bystander.right(0, bystander.block([0])[1][0]).all()


@pytest.mark.parametrize("adversary", DEATHS_IN_PREPARE)
def test_a_death_while_building_has_its_reason_and_its_seat_a_new_worker(shared, arena, adversary):
    act = stage.Act(hire(shared), arena, adversary)
    with pytest.raises(WorkerError) as error:
        act.prepare(deadline_s=1 if DEATHS_IN_PREPARE[adversary][0] == "timeout" else 30)
    assert (error.value.kind, error.value.message) == DEATHS_IN_PREPARE[adversary]
    assert state(act.worker.pid) == "X"
    assert goes_on(shared, arena)


@pytest.mark.parametrize("adversary", FAILURES)
def test_a_failure_leaves_the_worker_alive(shared, arena, adversary):
    act = stage.Act(hire(shared), arena, adversary).begin()
    with pytest.raises(WorkerError) as error:
        act.block([0])
    assert (error.value.kind, error.value.message) == FAILURES[adversary]
    assert "Traceback" in error.value.detail
    honest = stage.Act(act.worker, arena, "honest").begin()
    assert honest.right(0, honest.block([0])[1][0]).all()


def test_the_end_of_the_log_is_told_with_a_death(shared, arena):
    act = stage.Act(hire(shared), arena, "segfaults").begin()
    with pytest.raises(WorkerError) as error:
        act.block([0])
    assert "Segmentation fault" in error.value.detail  # Python's faulthandler
    act = stage.Act(hire(shared), arena, "exits").begin()
    with pytest.raises(WorkerError) as error:
        act.block([0])
    assert "leaving" in error.value.detail


def test_a_death_is_noticed_at_once_and_not_at_the_deadline(shared, arena):
    act = stage.Act(hire(shared), arena, "exits").begin()
    start = time.monotonic()
    with pytest.raises(WorkerError):
        act.block([0], deadline_s=300)
    assert time.monotonic() - start < 60


def test_a_hang_in_release_is_a_timeout(shared, arena):
    act = stage.Act(hire(shared), arena, "hangs_in_release").begin()
    with pytest.raises(WorkerError) as error:
        act.worker.call("release", 0.5, program=act.program)
    assert error.value.kind == "timeout"


def test_a_worker_that_eats_memory_is_ended_at_its_limit(shared, arena):
    act = stage.Act(hire(shared), arena, "eats_memory").begin()
    act.worker.memory_limit_bytes = act.worker.resident_bytes() + 2**28
    with pytest.raises(
        WorkerError, match=r"held .* GiB of memory, over its limit of .* GiB, during block and was ended"
    ) as error:
        act.block([0], deadline_s=60)
    assert error.value.kind == "memory"
    assert state(act.worker.pid) == "X"
    assert goes_on(shared, arena)


def test_what_a_worker_prints_disturbs_nothing(shared, arena):
    act = stage.Act(hire(shared), arena, "chatty").begin()
    for _ in range(3):
        _, outputs = act.block([0, 1])
        assert act.right(0, outputs[0]).all() and act.right(1, outputs[1]).all()
    assert "from C" in act.worker.log_tail() or "straight" in act.worker.log_tail()


def test_a_log_without_end_is_cut(shared, arena, monkeypatch):
    monkeypatch.setattr("benchmarks.engine.pool._LOG_BYTES", 100_000)
    act = stage.Act(hire(shared), arena, "chatty").begin()
    log = act.worker._folder / "log"
    act.block([0, 1])
    assert eventually(lambda: log.stat().st_size < 100_000)
    act.block([0])  # and goes on from its beginning: it was opened for appending
    assert 0 < log.stat().st_size < 600_000


def test_what_a_worker_started_ends_with_it(shared, arena):
    act = stage.Act(hire(shared), arena, "leaves_child")
    child = act.prepare()["config"]["child"]
    assert os.getpgid(child) != act.worker.pid and state(child) in "RS"
    act.worker.stop()
    assert eventually(lambda: state(child) in "XZ")


def test_what_a_worker_started_counts_as_its_memory(shared, arena):
    act = stage.Act(hire(shared), arena, "leaves_child")
    alone = act.worker.resident_bytes()
    act.prepare()
    assert eventually(lambda: act.worker.resident_bytes() > alone + 2**21)


# What the outputs of each are, call by call over sets 0, 1, 0, 1, 0, 1: True where the whole output is right.
WRONG = {
    "zeros": [False] * 6,
    "first_tile": [False] * 6,
    "sampled_rows": [False] * 6,
    "lower_precision": [False] * 6,
    "unwritten": [False] * 6,
    "early": [False] * 6,
    "last_output": [True] + [False] * 5,
    "first_call_only": [True, False, True, False, True, False],
    "skips_calls": [True] * 4 + [False, True],
}


@pytest.mark.parametrize("adversary", WRONG)
def test_wrong_outputs_arrive_as_they_are(shared, arena, adversary):
    """The worker neither hides nor repairs them: what the judge gets is what the call left."""
    act = stage.Act(hire(shared), arena, adversary).begin()
    sets = [0, 1, 0, 1, 0, 1]
    _, outputs = act.block(sets)
    assert [bool(act.right(w, o).all()) for w, o in zip(sets, outputs, strict=True)] == WRONG[adversary]


def test_what_wrong_outputs_get_right(shared, arena):
    """That each adversary is as sly as it says: else a test that catches it shows nothing."""
    worker = hire(shared)

    def elements(adversary: str) -> np.ndarray:
        act = stage.Act(worker, arena, adversary).begin()
        return act.right(0, act.block([0])[1][0])

    first = elements("first_tile")
    assert first[:64, :64].all() and not first[64:].any()
    rows = elements("sampled_rows")
    assert rows[[0, 64, -1]].all() and rows.mean() < 0.1
    assert elements("unwritten").sum() == stage.M * stage.N - 1
    assert 0 < elements("lower_precision").mean() < 0.5


def test_what_is_left_unwritten_is_nan(shared, arena):
    act = stage.Act(hire(shared), arena, "unwritten").begin()
    _, (output,) = act.block([0])
    assert np.isnan(output[-1, -1]) and np.isfinite(output).sum() == output.size - 1
    act = stage.Act(act.worker, arena, "early").begin()
    assert np.isnan(act.block([0])[1][0]).all()


def test_stale_answers_show_after_a_refill_at_the_same_place(shared, arena):
    worker = hire(shared)
    act = stage.Act(worker, arena, "memoises_pointers").begin()
    assert all(act.right(w, o).all() for w, o in zip([0, 1, 0, 1], act.block([0, 1, 0, 1])[1], strict=True))
    act.refill(0, seed=9)
    assert not act.right(0, act.block([0])[1][0]).any()
    # Without poison a skipped call leaves the answer before: right, until the contents change.
    act = stage.Act(worker, arena, "skips_unpoisoned").begin()
    assert all(act.right(0, o).all() for o in act.block([0] * 9)[1])
    act.refill(0, seed=9)
    assert not act.right(0, act.block([0])[1][0]).any()


@pytest.mark.parametrize("adversary", ["memoises_until_refill", "beforehand", "deferred"])
def test_these_outputs_are_always_right(shared, arena, adversary):
    """Only their times can give them away."""
    act = stage.Act(hire(shared), arena, adversary).begin()
    for seed in (3, 4):
        act.refill(0, seed)
        assert all(act.right(w, o).all() for w, o in zip([0, 1, 0], act.block([0, 1, 0])[1], strict=True))


def test_work_put_off_into_the_reading_shows_in_its_time(shared, arena):
    act = stage.Act(hire(shared), arena, "deferred").begin()
    answer, _ = act.block([0, 1])
    assert all(us > 4e4 for us in answer["telemetry"]["read_us"].values())  # the work takes 50 ms


def test_written_inputs_are_seen(shared, arena):
    act = stage.Act(hire(shared), arena, "writes_inputs").begin()
    act.block([0])
    changed = act.changed(0)
    assert changed["B"] == 0 and changed["A"] >= act.given[0]["A"].size  # halved: another exponent in every element
    assert act.changed(1) == {"A": 0, "B": 0}


# --- the token -------------------------------------------------------------------------------------------------------


def test_all_others_are_stopped_while_one_holds_the_device(shared):
    one, two, three = (hire(shared, replica) for replica in range(3))
    for holder, others in ((one, (two, three)), (two, (one, three))):
        with shared.exclusive(holder):
            assert state(holder.pid) in "RS"
            assert [state(w.pid) for w in others] == ["T", "T"]
        assert all(eventually(lambda w=w: state(w.pid) in "RS") for w in (one, two, three))


def test_on_a_gpu_nobody_is_stopped(monkeypatch):
    monkeypatch.setenv("RIDGEMARK_EXTRA_STACKS", stage.STACKS)
    from dataclasses import replace

    pool = Pool(stage.ROOT, replace(stage.DEVICE, kind="cuda"), stage.THREADS)
    try:
        one, two = (pool.start(stage.SPEC, replica) for replica in range(2))
        with pool.exclusive(one):
            assert state(two.pid) in "RS"
    finally:
        pool.stop()


def test_the_token_goes_back_after_an_exception_and_past_the_dead(shared, arena):
    one, two, three = (hire(shared, replica) for replica in range(3))
    with pytest.raises(RuntimeError, match="boom"), shared.exclusive(one):
        os.kill(two.pid, signal.SIGKILL)  # one of the stopped dies
        raise RuntimeError("boom")
    assert eventually(lambda: not two.alive)
    assert eventually(lambda: state(three.pid) in "RS")
    with shared.exclusive(three):
        assert state(one.pid) == "T"


def test_the_holder_may_die_and_be_started_again(shared, arena):
    bystander = hire(shared, 1)
    act = stage.Act(hire(shared), arena, "exits").begin()
    with shared.exclusive(act.worker):
        with pytest.raises(WorkerError):
            act.block([0])
        assert goes_on(shared, arena)
        assert state(bystander.pid) == "T"
    assert eventually(lambda: state(bystander.pid) in "RS")


def test_one_thread_cannot_hold_it_twice(shared):
    one, two = (hire(shared, replica) for replica in range(2))
    with shared.exclusive(one), pytest.raises(RuntimeError, match="held already"), shared.exclusive(two):
        pass


def test_time_held_stopped_does_not_count_against_a_deadline(shared, arena):
    """Another worker may build while one is measured, and is stopped for as long as that takes."""
    one, two = (hire(shared, replica) for replica in range(2))
    act = stage.Act(two, arena, "early").begin()
    ended = []

    def build() -> None:
        with contextlib.suppress(WorkerError):
            # 0.05 s of work each, waited for when the next begins to read: about a second of work in all.
            stage.Act(two, Arena("other"), "deferred").begin().block([0] * 20, deadline_s=5)
            ended.append("right")

    building = threading.Thread(target=build)
    building.start()
    time.sleep(0.5)
    with shared.exclusive(one):
        assert state(two.pid) == "T"
        time.sleep(6)
    building.join(60)
    assert ended == ["right"] and two.alive
    assert act.worker is two


def test_a_hang_is_ended_even_if_it_was_held_stopped_meanwhile(shared, arena):
    one, two = (hire(shared, replica) for replica in range(2))
    errors = []

    def build() -> None:
        try:
            stage.Act(two, arena, "hangs_in_prepare").prepare(deadline_s=1)
        except WorkerError as error:
            errors.append(error)

    building = threading.Thread(target=build)
    building.start()
    with shared.exclusive(one):
        time.sleep(1.5)
        assert errors == []
    building.join(30)
    assert [e.kind for e in errors] == ["timeout"]


def test_nobody_starts_while_one_holds_the_device(pool):
    one = pool.start(stage.SPEC)
    started = []
    starting = threading.Thread(target=lambda: started.append(pool.start(stage.SPEC, 1)))
    with pool.exclusive(one):
        starting.start()
        time.sleep(0.3)
        assert started == [] and len(pool.workers) == 1
    starting.join(30)
    assert len(started) == 1 and started[0].alive


def test_a_worker_outlives_the_thread_that_started_it(pool):
    """PR_SET_PDEATHSIG means the thread that forked."""
    started = []
    starting = threading.Thread(target=lambda: started.append(pool.start(stage.SPEC)))
    starting.start()
    starting.join(30)
    time.sleep(0.2)
    assert started[0].alive


# --- the end ---------------------------------------------------------------------------------------------------------


def test_stop_ends_everything_whatever_state_it_is_in(pool, arena):
    idle, busy, stopped = (pool.start(stage.SPEC, replica) for replica in range(3))
    errors = []

    def hang() -> None:
        try:
            stage.Act(busy, arena, "hangs_in_prepare").prepare(deadline_s=600)
        except WorkerError as error:
            errors.append(error)

    hanging = threading.Thread(target=hang)
    hanging.start()
    time.sleep(0.3)
    os.kill(stopped.pid, signal.SIGSTOP)
    pool.stop()
    hanging.join(10)
    assert [state(w.pid) for w in (idle, busy, stopped)] == ["X"] * 3
    assert [e.message for e in errors] == ["Its worker was stopped by the harness."]
    assert not any(w._folder.exists() for w in (idle, busy, stopped))


HARNESS = """
import sys, time
from benchmarks.engine.buffers import Arena
from benchmarks.engine.pool import Pool
from tests.adversaries import stage

pool = Pool(stage.ROOT, stage.DEVICE, stage.THREADS)
arena = Arena("harness")
act = stage.Act(pool.start(stage.SPEC), arena, "leaves_child")
child = act.prepare()["config"]["child"]
other = pool.start(stage.SPEC, 1)
_, descriptor = arena.array((1000,), "f32")
with pool.exclusive(act.worker):
    print(act.worker.pid, other.pid, child, descriptor["path"], act.worker._folder, flush=True)
    time.sleep({seconds})
{end}
"""


def harness(seconds: float = 600, end: str = "") -> tuple[subprocess.Popen[str], list[int], list[Path]]:
    """A harness with a worker, one held stopped, and a child of a worker's; their pids, and its files."""
    run = subprocess.Popen(
        [sys.executable, "-c", HARNESS.format(seconds=seconds, end=end)],
        cwd=stage.ROOT,
        env={**os.environ, "RIDGEMARK_EXTRA_STACKS": stage.STACKS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    *pids, buffer, folder = run.stdout.readline().split()
    return run, [int(pid) for pid in pids], [Path(buffer).parent, Path(folder).parent]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_workers_children_and_folders(number):
    run, pids, folders = harness()
    run.send_signal(number)
    run.communicate(timeout=30)
    assert run.returncode in (128 + number, -number)
    assert all(eventually(lambda pid=pid: state(pid) in "XZ") for pid in pids)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize("end", ["", "raise ValueError", "pool.stop()"])
def test_a_harness_that_ends_leaves_nothing(end):
    run, pids, folders = harness(seconds=0, end=end)
    run.communicate(timeout=30)
    assert run.returncode == (1 if end.startswith("raise") else 0)
    assert all(eventually(lambda pid=pid: state(pid) in "XZ") for pid in pids)
    assert not any(folder.exists() for folder in folders)


def test_a_killed_harness_leaves_no_worker_and_the_next_one_cleans_up(pool):
    run, (worker, held, child), folders = harness()
    run.kill()
    run.communicate()
    # The kernel ends the workers, the one that was held stopped too.
    assert all(eventually(lambda pid=pid: state(pid) in "XZ") for pid in (worker, held))
    assert state(child) in "RS" and all(folder.exists() for folder in folders)
    Pool(stage.ROOT, stage.DEVICE, stage.THREADS).stop()
    assert eventually(lambda: state(child) in "XZ")
    assert not any(folder.exists() for folder in folders)
