import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import statistics
from analysis.frame import from_lines

CASE = "gemm:512x512x512:f32"


def cells_of(records):
    frame = from_lines(records.lines)
    cells = statistics.compare(frame)
    return frame.results[["case", "impl", "replica"]].join(cells, how="inner").set_index(["case", "impl", "replica"])


@pytest.mark.parametrize("n", [5, 8, 9, 12])
def test_bootstrap_distribution_of_the_median_is_what_resampling_gives(n):
    values = np.sort(np.random.default_rng(n).normal(size=n))
    a, b, weight = statistics._median_weights(n)
    rng = np.random.default_rng(1)
    resampled = np.median(values[rng.integers(0, n, (200_000, n))], axis=1)
    medians = (values[a] + values[b]) / 2
    assert weight.sum() == pytest.approx(1)
    for x in np.quantile(values, [0.2, 0.4, 0.6, 0.8]):
        # Four standard errors of a share among 200,000.
        assert weight[medians <= x].sum() == pytest.approx((resampled <= x).mean(), abs=4 * 0.5 / math.sqrt(200_000))


def test_interval_agrees_with_scipy_bootstrap():
    # Of 40 values a resampled median takes so many values that the mid-distribution quantile is the plain one.
    rows = np.random.default_rng(3).normal(size=(5, 40))
    ours = statistics.median_interval(rows)
    theirs = stats.bootstrap(
        (rows,), np.median, axis=-1, n_resamples=20_000, method="percentile", rng=np.random.default_rng(4)
    ).confidence_interval
    assert ours.value == pytest.approx(np.median(rows, axis=1))
    width = theirs.high - theirs.low
    assert np.all(np.abs(ours.low - theirs.low) < 0.1 * width)
    assert np.all(np.abs(ours.high - theirs.high) < 0.1 * width)


@pytest.mark.parametrize("n", range(statistics.LEAST_ROUNDS, 31))
@pytest.mark.parametrize("draw", ["normal", "laplace", "exponential"])
def test_interval_covers_the_true_median_as_stated(n, draw):
    rng, cells = np.random.default_rng(n), 8000
    centre = math.log(2) if draw == "exponential" else 0.0
    estimate = statistics.median_interval(getattr(rng, draw)(size=(cells, n)) - centre)
    covered = np.mean((estimate.low <= 0) & (estimate.high >= 0))
    # The docstring says 92 to 97.5 %; four standard errors of the simulation on top.
    error = 4 * math.sqrt(0.95 * 0.05 / cells)
    assert 0.92 - error < covered < 0.975 + error


def test_interval_of_one_round_and_of_equal_rounds_is_a_point():
    for rows in (np.array([[2.0]]), np.full((1, 8), 2.0)):
        estimate = statistics.median_interval(rows)
        assert (estimate.low[0], estimate.value[0], estimate.high[0]) == (2.0, 2.0, 2.0)


def test_planted_ratios_are_recovered_in_spite_of_drift(records):
    planted = {"xla.jit": 0.8, "tvm.tensorir": 1.5, "iree.llvm_cpu": 1.0005}
    records.paired(CASE, planted)
    cells = cells_of(records)
    for impl, ratio in planted.items():
        cell = cells.loc[(CASE, impl, 0)]
        # Drift of 5 % cancels; what stays is scatter of 0.1 % (standard error of the median of 10 ratios: 0.05 %).
        assert cell.ratio == pytest.approx(ratio, rel=0.002)
        assert cell.ratio_low <= cell.ratio <= cell.ratio_high < 1.004 * cell.ratio_low
        assert cell.paired_rounds == 10
    assert cells["verdict"].to_dict() == {
        (CASE, "blas.default", 0): "baseline",
        (CASE, "blas.default", 1): "baseline",
        (CASE, "xla.jit", 0): "faster",
        (CASE, "tvm.tensorir", 0): "slower",
        (CASE, "iree.llvm_cpu", 0): "tie",
    }
    assert math.isnan(cells.loc[(CASE, "blas.default", 0)].ratio)


def test_intervals_of_ratios_cover_the_planted_ratio(records):
    rng, cells = np.random.default_rng(6), 500
    for i in range(cells):
        base = 100 * np.exp(rng.normal(0, 0.05, 12))
        records.result(f"gemm:{i + 1}x64x64:f32", "blas.default", base)
        records.result(f"gemm:{i + 1}x64x64:f32", "xla.jit", base * 0.7 * np.exp(rng.laplace(0, 0.01, 12)))
    found = cells_of(records).xs("xla.jit", level="impl")
    covered = ((found["ratio_low"] <= 0.7) & (found["ratio_high"] >= 0.7)).mean()
    assert 0.92 - 4 * math.sqrt(0.92 * 0.08 / cells) < covered < 0.975 + 4 * math.sqrt(0.975 * 0.025 / cells)


def test_ratio_is_over_the_mean_of_the_replicas_in_the_same_round(records):
    records.result(CASE, "blas.default", [100.0, 200.0, 400.0])
    records.result(CASE, "blas.default", [300.0, 200.0, 400.0], replica=1)
    records.result(CASE, "xla.jit", [100.0, 400.0, 1600.0])  # 0.5, 2 and 4 times the mean of the replicas.
    cell = cells_of(records).loc[(CASE, "xla.jit", 0)]
    assert cell.ratio == pytest.approx(2.0)
    assert cell.aa_ratio == pytest.approx(1.0)  # Of 3, 1 and 1.
    assert cell.time_us == pytest.approx(400.0)


def test_ratios_of_an_even_number_of_rounds_say_the_same_both_ways(records):
    records.result(CASE, "blas.default", [100.0, 100.0])
    records.result(CASE, "xla.jit", [50.0, 800.0])
    assert cells_of(records).loc[(CASE, "xla.jit", 0)].ratio == pytest.approx(math.sqrt(0.5 * 8))


def test_difference_smaller_than_between_two_processes_of_the_baseline_is_no_win(records):
    base = np.full(12, 100.0)
    records.result(CASE, "blas.default", base)
    records.result(CASE, "blas.default", base * 1.10, replica=1)
    records.result(CASE, "xla.jit", base * 1.05 * 0.94 * np.linspace(0.999, 1.001, 12))
    cell = cells_of(records).loc[(CASE, "xla.jit", 0)]
    assert cell.ratio == pytest.approx(0.94, abs=0.001)
    assert cell.threshold == pytest.approx(0.10)
    assert cell.verdict == "undecided"  # Nor is it a tie: noise must not make things equal.
    assert cell.verdict_reason == "The difference is not beyond that between the baseline's own processes (A/A)."


@pytest.mark.parametrize(
    ("interval", "q_value", "expected"),
    [
        ((0.90, 0.97), 0.01, "faster"),
        ((0.90, 0.97), 0.20, "undecided"),
        ((0.90, 0.99), 0.01, "undecided"),
        ((0.99, 1.01), 0.90, "tie"),
        ((0.99, 1.03), 0.90, "undecided"),
        ((1.03, 1.10), 0.05, "slower"),
        ((0.50, 2.00), 0.01, "undecided"),
        ((math.nan, math.nan), math.nan, None),
    ],
)
def test_verdicts_at_two_percent(interval, q_value, expected):
    low, high, q, threshold = (np.array([v]) for v in (*interval, q_value, 0.02))
    assert statistics.verdicts(low, high, q, threshold, 0.02) == [expected]


def test_p_value_is_the_sign_test_s_least_where_all_rounds_agree():
    # All of n rounds beyond the threshold: one of 2^n sign patterns, doubled for two directions.
    for n in (6, 8, 10):
        rows = np.log(0.5) + np.linspace(-0.01, 0.01, n)[None, :]
        assert statistics.p_beyond(rows, np.array([math.log(1.02)])) == pytest.approx([2 / 2**n])
    inside = np.linspace(-0.001, 0.001, 8)[None, :]
    assert statistics.p_beyond(inside, np.array([math.log(1.02)])) == pytest.approx([1.0])


def test_false_discoveries_stay_rare_among_many_equal_implementations(records):
    # 400 cells at exactly the threshold, where a claim of faster is wrong half of the time it could be made.
    rng = np.random.default_rng(5)
    for i in range(400):
        case = f"gemm:{i + 1}x64x64:f32"
        base = np.full(10, 100.0)
        records.result(case, "blas.default", base)
        records.result(case, "xla.jit", base / 1.02 * np.exp(rng.normal(0, 0.01, 10)))
    cells = cells_of(records)
    claims = (cells["verdict"] == "faster").sum()
    assert (cells["p_value"].dropna() < 0.05).sum() > 0  # Without control there are some ...
    assert claims == 0  # ... with it there are none.


def test_q_values_are_benjamini_and_hochberg_s(records):
    for i, ratio in enumerate((0.5, 0.9, 0.97, 0.99, 1.0, 1.03)):
        records.paired(f"gemm:{i + 1}x64x64:f32", {"xla.jit": ratio}, noise=0.02, seed=i)
    cells = cells_of(records)
    p = np.sort(cells["p_value"].dropna().to_numpy())
    m = len(p)
    by_hand = [min(p[j] * m / (j + 1) for j in range(i, m)) for i in range(m)]
    assert np.sort(cells["q_value"].dropna().to_numpy()) == pytest.approx(np.minimum(by_hand, 1))


def test_baseline_that_was_not_run_is_named(records):
    records.result(CASE, "xla.jit", [1.0] * 8)
    cell = cells_of(records).iloc[0]
    assert math.isnan(cell.ratio)
    assert cell.verdict is None
    assert cell.verdict_reason == "The baseline blas.default was not part of this run."


def test_baseline_that_failed_gives_its_reason(records):
    records.result(CASE, "blas.default", status="crashed", reason="Killed by SIGSEGV in run.")
    records.result(CASE, "xla.jit", [1.0] * 8)
    assert cells_of(records).iloc[0].verdict_reason == "The baseline blas.default is crashed: Killed by SIGSEGV in run."


def test_methods_are_never_compared(records):
    records.result(CASE, "blas.default", [1.0] * 8, method="cuda_events")
    records.result(CASE, "xla.jit", [1.0] * 8, method="cupti")
    cell = cells_of(records).loc[(CASE, "xla.jit", 0)]
    assert math.isnan(cell.ratio)
    assert "timed by cuda_events, this by cupti" in cell.verdict_reason


def test_runs_are_never_compared(records):
    records.run("r2")
    records.result(CASE, "blas.default", [1.0] * 8, run="r1")
    records.result(CASE, "xla.jit", [1.0] * 8, run="r2")
    assert cells_of(records)["ratio"].isna().all()


def test_too_few_rounds_are_undecided(records):
    records.paired(CASE, {"xla.jit": 0.5}, rounds=5)
    cell = cells_of(records).loc[(CASE, "xla.jit", 0)]
    assert cell.verdict == "undecided"
    assert cell.verdict_reason == "Only 5 paired rounds: a verdict needs 6."


def test_device_kind_without_baseline_is_said(records):
    records.run("r2", kind="tpu")
    records.result(CASE, "xla.jit", [1.0] * 8, run="r2")
    assert cells_of(records).iloc[0].verdict_reason == "No baseline is fixed for gemm on tpu."


def test_noise_floor_is_the_departure_that_most_cells_stay_under(records):
    for i in range(20):
        case, base = f"gemm:{i + 1}x64x64:f32", np.full(8, 100.0)
        records.result(case, "blas.default", base)
        records.result(case, "blas.default", base * (1.5 if i == 0 else 1.01), replica=1)
    cells = statistics.compare(from_lines(records.lines))
    assert statistics.noise_floor(cells) == pytest.approx(0.01, abs=0.03)
    assert statistics.noise_floor(cells.iloc[:0]) is None


def test_against_another_than_the_baseline_follows_the_same_rules(records):
    records.paired(CASE, {"xla.jit": 0.5, "tvm.a": 0.505, "tvm.b": 0.6}, rounds=12)
    loaded = from_lines(records.lines)
    cells = statistics.compare(loaded)
    number = {impl: result for result, impl in loaded.results["impl"].items()}
    other = pd.Series({number[name]: number["xla.jit"] for name in ("tvm.a", "tvm.b", "blas.default")})
    seen = statistics.against(loaded, cells, other)
    assert seen["verdict"].to_dict() == {
        number["tvm.a"]: "tie",
        number["tvm.b"]: "slower",
        number["blas.default"]: "slower",
    }
    assert seen.loc[number["tvm.b"], "ratio_low"] <= 1.2 <= seen.loc[number["tvm.b"], "ratio_high"]
    assert seen["paired_rounds"].tolist() == [12, 12, 12]


def test_against_without_a_common_round_says_nothing(records):
    records.result(CASE, "a.a", [1.0, 1.0])
    records.result(CASE, "a.b", [1.0, 1.0])
    for block in records.lines[-1]["rounds"]:
        block["round"] += 2
    loaded = from_lines(records.lines)
    first, second = loaded.results.index
    assert statistics.against(loaded, statistics.compare(loaded), pd.Series({first: second})).empty
