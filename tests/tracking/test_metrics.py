import pytest

from analysis import frame as frames
from benchmarks.engine import records
from benchmarks.tracking import metrics

CASE = "gemm:1024x1024x1024:f32"
# 100 GFLOP/s and 10 GB/s: the product's 2 * 1024^3 FLOP take 21.47 ms at least.
CEILINGS = {
    ("ceiling:rate:f32", "ceilings.rate"): 2 * 64**3 * 16384 / 100e9 * 1e6,
    ("ceiling:read:64MiB", "ceilings.memory"): (1 << 30) / 10e9 * 1e6,
}


@pytest.fixture
def values(repository):
    """(case, implementation) -> metrics, of one run without scatter."""

    def measured(times, **options):
        repository.measure(times, commit="c" * 40, noise=0.0, **options)
        frame = frames.load([records.folder(repository.folder / "results", "box")])
        found = metrics.of(frame)
        return {(row.case, row.impl): found[row.Index] for row in frame.results.itertuples() if row.Index in found}

    return measured


def test_time_ratio_and_share_of_the_limit_have_a_figure_per_round(values):
    found = values(CEILINGS | {(CASE, "blas.default"): 40000.0, (CASE, "xla.dot"): 50000.0}, rounds=7)
    xla = found[CASE, "xla.dot"]
    assert xla["time"] == pytest.approx([0.05] * 7)
    assert xla["ratio"] == pytest.approx([1.25] * 7)
    assert xla["sol_fraction"] == pytest.approx([2 * 1024**3 / 100e9 / 0.05] * 7, rel=1e-4)
    assert xla["error"] == 0.5
    assert xla["compile"] == 0.25


def test_the_baseline_has_no_ratio_and_its_twin_is_not_followed(values):
    found = values({(CASE, "blas.default"): 40000.0})
    assert list(found) == [(CASE, "blas.default")]
    assert "ratio" not in found[CASE, "blas.default"]
    assert len(found[CASE, "blas.default"]["time"]) == 10


def test_without_ceilings_or_baseline_what_they_are_needed_for_is_left_out(values):
    assert set(values({(CASE, "xla.dot"): 50000.0})[CASE, "xla.dot"]) == {"time", "error", "compile"}


@pytest.mark.parametrize("status", ["failed", "crashed", "timeout"])
def test_a_failure_is_one_in_every_metric(values, status):
    found = values({(CASE, "blas.default"): 40000.0, (CASE, "xla.dot"): status})
    assert found[CASE, "xla.dot"] == dict.fromkeys(("time", "ratio", "sol_fraction", "error", "compile"))


def test_a_wrong_result_shows_its_error_and_no_time(values):
    found = values({(CASE, "blas.default"): 40000.0, (CASE, "xla.dot"): "wrong"})[CASE, "xla.dot"]
    assert found["error"] == 3.0
    assert found["time"] is None and found["ratio"] is None


def test_what_is_not_supported_has_no_metric(values):
    assert (CASE, "xla.dot") not in values({(CASE, "blas.default"): 40000.0, (CASE, "xla.dot"): "unsupported"})
