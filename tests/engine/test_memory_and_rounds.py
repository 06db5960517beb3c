"""The memory plan's groups and the rounds' plan, against values worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine import memory, rounds


def test_all_in_one_group_where_they_fit():
    assert memory.groups([("a", 10), ("b", 20)], [("base", 5)], 35) == [["base", "a", "b"]]


def test_split_where_they_do_not_with_the_baseline_in_each():
    assert memory.groups([("a", 20), ("b", 20), ("c", 5)], [("base", 5)], 30) == [["base", "a", "c"], ["base", "b"]]


def test_the_baseline_alone_is_a_group():
    assert memory.groups([], [("base", 5)], 30) == [["base"]]


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(0, 50), st.integers(1, 200))
def test_groups_place_everything_once_and_hold_the_baseline(sizes, base, usable):
    items = list(enumerate(sizes))
    got = memory.groups(items, [("base", base)], usable)
    assert sorted(m for g in got for m in g if m != "base") == list(range(len(sizes)))
    assert all(g[0] == "base" for g in got)
    for group in got:
        if len(group) > 2:
            assert base + sum(sizes[m] for m in group[1:]) <= usable


def test_samples_fill_a_block_within_bounds():
    assert rounds.samples_for(0.008) == 10
    assert rounds.samples_for(0.4) == rounds.CPU.samples[0]
    assert rounds.samples_for(10.0) == 1
    assert rounds.samples_for(1e-7) == rounds.CPU.samples[1]


def test_rounds_follow_from_the_scatter_of_the_pilot():
    quiet = rounds.plan({"a": [1.0, 1.0]}, 0.0, None)
    assert quiet.rounds == rounds.CPU.rounds[0]
    sigma = 0.006
    spread = np.array([1 - sigma / np.sqrt(2), 1 + sigma / np.sqrt(2)])  # sample standard deviation sigma
    assert np.std(spread, ddof=1) == pytest.approx(sigma)
    wanted = int(np.ceil((1.96 * 1.25 * np.sqrt(2) * sigma / 0.005) ** 2))
    assert rounds.CPU.rounds[0] < wanted < rounds.CPU.rounds[1]
    assert rounds.plan({"a": list(spread)}, 0.0, None).rounds == wanted
    assert rounds.plan({"a": [0.5, 1.5]}, 0.0, None).rounds == rounds.CPU.rounds[1]


def test_an_entry_that_takes_long_takes_part_in_fewer_rounds():
    plan = rounds.plan({"fast": [0.001, 0.0016], "slow": [2.0], "slower": [60.0]}, 0.0, None)
    assert plan.rounds == rounds.CPU.rounds[1]
    assert plan.turns == {"fast": plan.rounds, "slow": 3, "slower": 3}
    assert rounds.plan({"fast": [0.001, 0.0016], "slow": [0.6]}, 0.0, None).turns["slow"] == int(15 / (2 * 0.6))


def test_rounds_fit_the_time_but_never_fall_below_the_least():
    pilot = {"a": [0.05, 0.15], "b": [0.05, 0.15]}
    cost = 2 * ((rounds.CPU.samples[0] + 1) * 0.1 + 0.5)
    assert rounds.plan(pilot, 0.5, 10.5 * cost).rounds == 10
    assert rounds.plan(pilot, 0.5, 0.0).rounds == rounds.CPU.rounds[0]
