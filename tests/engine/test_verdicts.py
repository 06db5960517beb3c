"""Slots are used again only after their verdict; verdicts are heard in order, in the thread that asks."""

import threading

import numpy as np
import pytest

from benchmarks.engine.buffers import Arena, view
from benchmarks.engine.judge import Verdict
from benchmarks.engine.verdicts import Verdicts
from impls.workloads.base import TensorSpec

SPECS = {"C": TensorSpec((4,), "f32")}


class Judge:
    """Finds outputs wrong that hold a negative number; waits for ``go`` before each verdict."""

    def __init__(self):
        self.go = threading.Semaphore(0)
        self.threads = []

    def outputs(self, variant, outputs):
        assert self.go.acquire(timeout=10)
        self.threads.append(threading.current_thread())
        return Verdict(f"variant {variant}" if (outputs["C"] < 0).any() else None)


@pytest.fixture
def arena():
    made = Arena("verdicts")
    yield made
    made.close()


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_verdict_is_on_what_the_slot_held_when_it_was_asked_for(arena, meanwhile):
    judge, heard = Judge(), []
    verdicts = Verdicts(judge.outputs, SPECS, 2, arena, meanwhile)
    judge.go.release(20)
    for number in range(10):
        slot = verdicts.slot()
        slot["C"][0][...] = -1 if number == 6 else number
        verdicts.ask(number, slot, heard.append)
    verdicts.settle()
    assert [v.reason for v in heard] == [None] * 6 + ["variant 6"] + [None] * 3
    assert {t is threading.current_thread() for t in judge.threads} == {not meanwhile}
    verdicts.close()


def test_meanwhile_nothing_is_waited_for_until_the_slots_are_used_up(arena):
    judge, heard = Judge(), []
    verdicts = Verdicts(judge.outputs, SPECS, 2, arena, meanwhile=True)
    first, second = verdicts.slot(), verdicts.slot()
    verdicts.ask(0, first, heard.append)
    verdicts.ask(1, second, heard.append)
    verdicts.collect()
    assert heard == []
    judge.go.release()
    assert verdicts.slot() in (first, second)  # waits for the one verdict that can be given
    assert len(heard) == 1
    judge.go.release()
    verdicts.settle()
    assert len(heard) == 2
    verdicts.close()


def test_a_slot_that_was_not_used_comes_back(arena):
    verdicts = Verdicts(Judge().outputs, SPECS, 1, arena, meanwhile=True)
    slot = verdicts.slot()
    verdicts.back(slot)
    assert verdicts.slot() is slot
    verdicts.close()


def test_an_error_of_the_judge_comes_out_where_the_verdict_is_heard(arena):
    class Broken:
        def outputs(self, variant, outputs):
            raise MemoryError

    verdicts = Verdicts(Broken().outputs, SPECS, 1, arena, meanwhile=True)
    verdicts.ask(0, verdicts.slot(), lambda verdict: None)
    with pytest.raises(MemoryError):
        verdicts.settle()
    verdicts.close()


def test_closing_frees_the_arrays(arena):
    verdicts = Verdicts(Judge().outputs, SPECS, 2, arena, meanwhile=False)
    slot = verdicts.slot()
    assert np.array_equal(view(slot["C"][1]), np.zeros(4, np.float32))
    verdicts.close()
    with pytest.raises(FileNotFoundError):
        view(slot["C"][1])
