"""Planted times must lead to the answers that the module's rules state."""

import math

import pytest

from analysis import decision, table
from analysis.frame import from_lines

CASE = "gemm:1024x1024x1024:f32"


def decide(records):
    frame = from_lines(records.lines)
    return decision.decide(frame, table.tabulate(frame))


def only(records):
    (one,) = decide(records)
    return one


def test_the_fastest_of_the_faster_is_chosen_and_the_others_are_held_against_it(records):
    records.paired(CASE, {"xla.jit": 0.5, "tvm.a": 0.503, "tvm.b": 0.8, "iree.cpu": 1.5}, rounds=12)
    one = only(records)
    assert (one.answer, one.choice, one.best, one.verdict) == ("leave", "xla.jit", "xla.jit", "faster")
    assert one.speedup_low <= 2.0 <= one.speedup_high
    assert one.as_good == ("tvm.a",)
    assert one.may_be_better == ()
    assert one.runner_up == "tvm.b"
    assert one.lead_low <= 1.6 <= one.lead_high
    assert (one.compared, one.baseline) == (4, "blas.default")


def test_the_baseline_is_the_runner_up_where_nothing_else_is_faster(records):
    records.paired(CASE, {"xla.jit": 0.5, "iree.cpu": 1.5}, rounds=12)
    one = only(records)
    assert one.runner_up == "blas.default"
    assert (one.lead, one.lead_low, one.lead_high) == (one.speedup, one.speedup_low, one.speedup_high)


def test_a_noisy_rival_may_be_better(records):
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    base = [b["samples_us"][1] for b in records.lines[-1]["rounds"]]
    records.result(CASE, "tvm.a", [t * (0.85 if i % 2 else 1.3) for i, t in enumerate(base)])
    assert only(records).may_be_better == ("tvm.a",)


def test_a_rival_that_is_slower_in_every_round_may_not_be_better_though_few_rounds_decide_nothing(records):
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    records.result(CASE, "iree.vmvx", [250_000.0] * 3)
    one = only(records)
    assert (one.choice, one.may_be_better) == ("xla.jit", ())


@pytest.mark.parametrize(
    ("ratios", "answer", "choice", "best"),
    [
        ({"xla.jit": 1.001, "tvm.a": 1.5}, "tie", "blas.default", "xla.jit"),
        ({"xla.jit": 1.2, "tvm.a": 1.5}, "stay", "blas.default", "xla.jit"),
        ({}, "alone", None, None),
    ],
)
def test_answers_without_a_faster_one(records, ratios, answer, choice, best):
    records.paired(CASE, ratios, rounds=12)
    one = only(records)
    assert (one.answer, one.choice, one.best) == (answer, choice, best)
    assert one.break_even_calls is None


def test_what_may_be_faster_is_undecided(records):
    records.paired(CASE, {"xla.jit": 0.97, "tvm.a": 1.0}, rounds=12, noise=0.03)
    one = only(records)
    assert (one.answer, one.choice, one.best) == ("undecided", None, "xla.jit")
    assert "xla.jit" in one.may_be_better


def test_too_few_rounds_never_decide(records):
    records.paired(CASE, {"xla.jit": 0.5}, rounds=5)
    assert only(records).answer == "undecided"


def test_break_even_is_the_extra_start_up_over_what_a_call_saves(records):
    for replica in (0, 1):
        records.result(CASE, "blas.default", [2000.0] * 8, replica=replica, prepare_s=1.0, first_call_s=0.502)
    records.result(CASE, "xla.jit", [1000.0] * 8, prepare_s=4.0, first_call_s=0.001)
    one = only(records)
    # Start-up 1.5 s against 4 s; each call saves 1 ms.
    assert (one.startup_s, one.baseline_startup_s) == (pytest.approx(4.0), pytest.approx(1.5))
    assert one.break_even_calls == pytest.approx(2500)
    assert one.break_even_low <= one.break_even_calls <= one.break_even_high


def test_nothing_to_break_even_where_start_up_is_no_slower_or_unknown(records):
    records.paired(CASE, {"xla.jit": 0.5})
    records.lines[-1]["prepare_s"] = 0.25
    assert only(records).break_even_calls == 0.0
    records.lines[-1]["prepare_s"] = None
    assert only(records).break_even_calls is None


def test_rivals_of_another_run_are_compared_through_the_baseline_with_a_wider_interval(records):
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    records.run("r2")
    records.paired(CASE, {"tvm.a": 0.7}, rounds=12, run="r2", seed=1)
    one = only(records)
    assert (one.choice, one.runner_up) == ("xla.jit", "tvm.a")
    assert one.lead_low < 1.4 < one.lead_high
    ends = {r.impl: (r.ratio_low, r.ratio_high) for r in table.rows(from_lines(records.lines))}
    assert one.lead_low == pytest.approx(ends["tvm.a"][0] / ends["xla.jit"][1])
    assert one.lead_high == pytest.approx(ends["tvm.a"][1] / ends["xla.jit"][0])


def test_methods_are_not_compared(records):
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    records.result(CASE, "tvm.a", [100.0] * 12, method="cupti")
    one = only(records)
    assert (one.choice, one.may_be_better, one.compared) == ("xla.jit", (), 1)


def test_without_a_baseline_the_fastest_is_named_and_nothing_claimed(records):
    records.result(CASE, "xla.jit", [1000.0] * 8)
    records.result(CASE, "tvm.a", [500.0] * 8)
    records.result(CASE, "blas.default", status="failed", reason="It is not there.")
    one = only(records)
    assert (one.answer, one.best, one.choice, one.speedup) == ("no baseline", "tvm.a", None, None)


def test_nothing_timed_and_ceilings_have_no_decision(records):
    records.ceilings()
    records.result(CASE, "xla.jit", status="failed", reason="No.")
    assert only(records).answer == "nothing"


def test_uncompared_where_no_round_is_shared(records):
    records.result(CASE, "blas.default", [1000.0] * 8)
    records.result(CASE, "xla.jit", [500.0] * 8, method="cupti")
    assert only(records).answer == "uncompared"


def test_speed_of_light_is_that_of_what_runs(records):
    records.ceilings()
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    made = table.tabulate(from_lines(records.lines))
    sol = dict(zip(made["impl"], made["sol_fraction"], strict=True))
    assert only(records).sol_fraction == pytest.approx(sol["xla.jit"])


def test_each_device_has_its_own_decision(records):
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    records.run("r2", machine="node", threads=8)
    records.paired(CASE, {"xla.jit": 1.5}, rounds=12, run="r2")
    assert {(d.machine, d.threads, d.answer) for d in decide(records)} == {("box", 2, "leave"), ("node", 8, "stay")}


def test_an_unknown_thread_count_is_one_place(records):
    records.lines[0]["device"]["threads"] = None
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    assert only(records).threads is None


def test_implementations_are_counted_and_averaged_geometrically(records):
    records.paired(CASE, {"xla.jit": 0.5, "tvm.a": 1.25}, rounds=12, noise=1e-6)
    records.paired("gemm:512x512x512:f32", {"xla.jit": 2.0}, rounds=12, noise=1e-6)
    records.result("gemm:512x512x512:f32", "tvm.a", status="wrong", reason="It is wrong.")
    records.result("gemm:64x64x64:f32", "tvm.a", status="crashed", reason="SIGSEGV.")
    records.run("r2", machine="node", kind="cuda")
    records.result(CASE, "xla.jit", [10.0] * 8, run="r2", regime="burst")
    frame = from_lines(records.lines)
    seen = decision.implementations(table.tabulate(frame))
    of = {(r.machine, r.impl): r for r in seen.itertuples()}
    xla, tvm, blas = of["box", "xla.jit"], of["box", "tvm.a"], of["box", "blas.default"]
    assert (xla.cases, xla.ok, xla.faster, xla.slower, xla.compared) == (2, 2, 1, 1, 2)
    assert xla.geomean_speedup == pytest.approx(1.0, rel=1e-4)
    assert xla.devices == "cpu, cuda"
    assert (tvm.cases, tvm.ok, tvm.wrong, tvm.failed, tvm.slower) == (3, 1, 1, 1, 1)
    assert tvm.geomean_speedup == pytest.approx(0.8, rel=1e-4)
    assert blas.baseline and not xla.baseline
    assert math.isnan(blas.geomean_speedup)


def test_nothing_gives_nothing():
    frame = from_lines([])
    made = table.tabulate(frame)
    assert decision.decide(frame, made) == []
    assert decision.implementations(made).empty
