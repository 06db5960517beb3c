"""A block of calls on a CPU: order of events, what the clock includes, what is copied."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from benchmarks.engine import buffers
from benchmarks.engine.timing import cpu
from impls.contract import Program


class Recorder(Program):
    """Writes down what is done to it. ``run`` puts its call's number into the output."""

    def __init__(self):
        super().__init__()
        self.events = []
        self.collecting = []
        self.calls = 0
        self.run_seconds = self.read_seconds = self.poison_seconds = 0.0

    def load(self, inputs):
        return inputs

    def refill(self, loaded, inputs):
        return inputs

    def run(self, loaded):
        self.events.append(("run", loaded["name"]))
        self.collecting.append(gc.isenabled())
        time.sleep(self.run_seconds)
        loaded["C"][:] = self.calls
        self.calls += 1
        return loaded

    def read_outputs(self, result):
        self.events.append(("read", result["name"]))
        time.sleep(self.read_seconds)
        return {"C": result["C"]}

    def read_inputs(self, loaded):
        return {}

    def poison(self, loaded):
        self.events.append(("poison", loaded["name"]))
        time.sleep(self.poison_seconds)
        loaded["C"].fill(np.nan)


@pytest.fixture
def sets():
    return {which: {"name": which, "C": np.zeros(3, np.float32)} for which in (0, 1)}


def kept(*indices):
    return {index: {"C": np.full(3, -1, np.float32)} for index in indices}


def test_one_sample_per_call_and_what_belongs_to_them(sets):
    before = time.time()
    answer = cpu.block(Recorder(), sets, [0, 1, 0], {}, False)
    assert len(answer["samples_us"]) == 3 and all(s > 0 for s in answer["samples_us"])
    assert before <= answer["t0"] <= time.time()
    assert answer["method"] == "perf_counter"
    assert set(answer["telemetry"]) == {"wall_s", "cpu_s", "preemptions", "read_us"}
    assert answer["telemetry"]["read_us"] == {}


def test_each_call_is_poisoned_before_and_kept_ones_are_read_right_after(sets):
    program = Recorder()
    cpu.block(program, sets, [0, 1, 0], kept(1), True)
    assert program.events == [
        ("poison", 0),
        ("run", 0),
        ("poison", 1),
        ("run", 1),
        ("read", 1),
        ("poison", 0),
        ("run", 0),
    ]


def test_nothing_is_poisoned_unasked(sets):
    program = Recorder()
    cpu.block(program, sets, [0, 1], {}, False)
    assert program.events == [("run", 0), ("run", 1)]


def test_a_kept_call_is_copied_before_a_later_call_overwrites_it(sets):
    copies = kept(0, 2)
    cpu.block(Recorder(), sets, [0, 0, 0, 0], copies, True)
    assert copies[0]["C"].tolist() == [0, 0, 0]
    assert copies[2]["C"].tolist() == [2, 2, 2]


def test_the_clock_holds_the_call_and_neither_poison_nor_reading(sets):
    program = Recorder()
    program.poison_seconds = program.read_seconds = 0.2
    program.run_seconds = 0.01
    answer = cpu.block(program, sets, [0, 1], kept(0, 1), True)
    # A sleep is never shorter than asked; 0.2 s more would be there if the clock held anything else.
    assert all(1e4 <= s < 2e5 for s in answer["samples_us"])
    assert all(us >= 2e5 for us in answer["telemetry"]["read_us"].values()) and set(answer["telemetry"]["read_us"]) == {
        "0",
        "1",
    }
    assert answer["telemetry"]["wall_s"] >= 0.82


def test_cpu_time_counts_all_threads_and_not_sleep(sets):
    class Busy(Recorder):
        def run(self, loaded):
            until = time.thread_time() + 0.05
            while time.thread_time() < until:
                pass
            return super().run(loaded)

    busy, idle = Busy(), Recorder()
    idle.run_seconds = 0.2
    assert cpu.block(busy, sets, [0], {}, False)["telemetry"]["cpu_s"] >= 0.05
    assert cpu.block(idle, sets, [0], {}, False)["telemetry"]["cpu_s"] < 0.2


def test_the_garbage_collector_rests_during_a_block_and_only_then(sets):
    program = Recorder()
    assert gc.isenabled()
    cpu.block(program, sets, [0, 1], {}, True)
    assert program.collecting == [False, False]
    assert gc.isenabled()


def test_the_garbage_collector_comes_back_after_an_error(sets):
    class Raises(Recorder):
        def run(self, loaded):
            raise RuntimeError("launch failed")

    with pytest.raises(RuntimeError, match="launch failed"):
        cpu.block(Raises(), sets, [0], {}, True)
    assert gc.isenabled()


def test_the_last_result_is_let_go_before_the_next_call(sets):
    class Result:
        alive = 0

        def __init__(self):
            Result.alive += 1

        def __del__(self):
            Result.alive -= 1

    class Allocates(Recorder):
        seen: list[int] = []  # noqa: RUF012

        def run(self, loaded):
            self.seen.append(Result.alive)
            return Result()

        def read_outputs(self, result):
            return {"C": np.zeros(3, np.float32)}

    cpu.block(Allocates(), sets, [0, 1, 0], kept(0, 1, 2), True)
    assert Allocates.seen == [0, 0, 0]


def test_outputs_of_another_shape_end_the_block(sets):
    class Transposed(Recorder):
        def read_outputs(self, result):
            return {"C": result["C"][:2]}

    with pytest.raises(buffers.WrongArrays, match=r"float32\[2\], not as float32\[3\]"):
        cpu.block(Transposed(), sets, [0], kept(0), True)
