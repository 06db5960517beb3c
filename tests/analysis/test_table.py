import csv
import io
import json

import pytest
from rich.console import Console

from analysis import table
from benchmarks.engine.records import Loaded

CASE = "gemm:1024x1024x1024:f32"


def rows(records, **options):
    return table.rows(Loaded(records.lines), **options)


def text(made, width=200):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(table.rich_table(made))
    return console.file.getvalue()


@pytest.fixture
def full(records):
    """A baseline with its twin, a faster and a broken implementation, ceilings."""
    records.ceilings()
    records.paired(CASE, {"xla.jit": 0.5}, traffic_bytes=12 << 20)
    records.result(CASE, "tvm.tensorir", status="failed", reason="LLVM said no.")
    return records


def test_a_row_says_everything(full):
    made = rows(full)
    assert [r.impl for r in made if r.case == CASE] == ["blas.default", "xla.jit", "tvm.tensorir"]
    base, xla, tvm = (r for r in made if r.case == CASE)
    assert base.verdict == "baseline" and base.ratio is None
    assert xla.verdict == "faster"
    assert xla.ratio_low <= 0.5 <= xla.ratio_high
    assert xla.speedup == pytest.approx(1 / xla.ratio)
    assert xla.tflop_per_s == pytest.approx(2**31 / xla.time_us * 1e-6)
    assert xla.gb_per_s == pytest.approx((12 << 20) / xla.time_us * 1e-3)
    assert xla.sol_fraction == pytest.approx(2**31 / 100e9 / (xla.time_us * 1e-6))
    assert (xla.class_ai, xla.error_worst, xla.rounds) == ("compute-bound", 0.25, 10)
    assert (tvm.status, tvm.reason, tvm.time_us, tvm.verdict) == ("failed", "LLVM said no.", None, None)


def test_ceilings_rates_are_in_their_own_units(full):
    of = {r.case: r for r in rows(full)}
    # The median of rounds that took 1.0, 1.1 and 1.2 times as long as the ceiling's best.
    assert of["ceiling:rate:f32"].tflop_per_s == pytest.approx(0.1 / 1.1)
    assert of["ceiling:read:64MiB"].gb_per_s == pytest.approx(10 / 1.1)
    assert of["ceiling:rate:f32"].reason is None


def test_json_and_csv_hold_the_same_columns_and_no_nan(full):
    made = rows(full)
    objects = json.loads(table.to_json(made))
    assert list(objects[0]) == list(table.COLUMNS)
    assert "NaN" not in table.to_json(made)
    records_csv = list(csv.DictReader(io.StringIO(table.to_csv(made))))
    assert [r["case"] for r in records_csv] == [o["case"] for o in objects]
    broken = next(r for r in records_csv if r["impl"] == "tvm.tensorir")
    assert broken["time_us"] == "" and broken["reason"] == "LLVM said no."
    assert float(records_csv[0]["time_us"]) == objects[0]["time_us"]


def test_terminal_table_shows_numbers_reasons_and_the_legend(full):
    shown = text(rows(full))
    for wanted in (CASE, "xla.jit", "faster", "compute", "failed", "LLVM said no.", "GFLOP/s", "A/A difference"):
        assert wanted in shown


def test_eighty_columns_cut_no_figure_and_what_is_left_out_is_said(records):
    records.ceilings()
    records.paired(CASE, {"stack.a_variant_of_24_letters": 0.004, "xla.jit": 231.5}, rounds=12)
    shown = text(rows(records), width=80)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown and max(map(len, shown.splitlines())) <= 80
    for wanted in ("stack.a_variant_of_24_letters", " us", " ms", "0.004", "faster", "slower", "baseline"):
        assert wanted in shown
    assert "Left out on this narrow terminal: error, interval of the time, rate" in shown


def test_markup_and_control_characters_from_records_stay_text(records):
    records.result(CASE, "[red]x.y[/red]", status="failed", reason="\x1b[2J[bold]gone[/bold]")
    shown = text(rows(records))
    assert "[red]x.y[/red]" in shown
    assert "[bold]gone[/bold]" in shown
    assert "\x1b" not in shown


def test_latest_run_is_shown_and_ceilings_of_older_runs_serve_it(full):
    full.run("r2")
    full.paired(CASE, {"xla.jit": 2.0}, run="r2")
    made = {r.impl: r for r in rows(full) if r.case == CASE}
    assert made["xla.jit"].run == "r2" and made["xla.jit"].verdict == "slower"
    assert made["xla.jit"].sol_fraction is not None
    assert made["tvm.tensorir"].run == "r1"
    assert {r.run for r in rows(full, run="r1")} == {"r1"}
    assert next(r for r in rows(full, run="r1") if r.impl == "xla.jit").verdict == "faster"


def test_a_result_keeps_the_baseline_of_its_own_run_when_a_later_run_measures_another_stack(records):
    records.paired(CASE, {"xla.jit": 0.5})
    records.run("r2")
    records.paired(CASE, {"tvm.tensorir": 2.0}, run="r2", seed=1)
    made = {r.impl: r for r in rows(records)}
    assert {name: r.run for name, r in made.items()} == {"blas.default": "r2", "xla.jit": "r1", "tvm.tensorir": "r2"}
    assert (made["xla.jit"].verdict, made["tvm.tensorir"].verdict) == ("faster", "slower")
    assert made["xla.jit"].ratio == pytest.approx(0.5, rel=0.01)


def test_one_implementation_only_is_shown_and_what_is_missing_said(records):
    records.result(CASE, "xla.jit", [1000.0] * 8)
    (row,) = rows(records)
    assert row.time_us == pytest.approx(1000.0) and row.ratio is None and row.sol_fraction is None
    assert "The baseline blas.default was not part of this run." in row.reason
    assert "No ceilings were measured on box's device" in row.reason
    assert "not part of this run" in text([row], width=250)


def test_several_machines_each_get_their_table(records):
    records.run("r2", machine="h200", kind="cuda")
    records.paired(CASE, {"xla.jit": 0.5})
    records.result(CASE, "cublas.default", [10.0] * 8, run="r2", regime="burst", method="cupti")
    made = rows(records)
    assert {(r.machine, r.impl, r.verdict) for r in made if r.verdict == "baseline"} == {
        ("box", "blas.default", "baseline"),
        ("h200", "cublas.default", "baseline"),
    }
    shown = text(made)
    assert "box's device, 2 threads, warm" in shown
    assert "h200's device, 2 threads, burst" in shown


def test_a_failed_second_replica_is_shown(records):
    records.result(CASE, "blas.default", [1000.0] * 8)
    records.result(CASE, "blas.default", replica=1, status="crashed", reason="Killed by SIGKILL.")
    first, second = rows(records)
    assert (first.status, second.status, second.replica) == ("ok", "crashed", 1)
    assert "blas.default (replica 1)" in text([first, second])


def test_ok_without_rounds_says_so(records):
    records.result(CASE, "blas.default", [])
    (row,) = rows(records)
    assert row.reason == "No round was measured."


def test_no_results_is_a_sentence():
    assert "No results." in text([])


def test_counted_traffic_stands_beside_the_model(records):
    records.run("r2", machine="h200", kind="cuda")
    records.result(CASE, "cublas.default", [10.0], run="r2", regime="burst", traffic_bytes=3 << 20)
    records.result(CASE, "xla.default", [10.0], run="r2", regime="burst", traffic_bytes=3 << 20)
    records.profile(CASE, "xla.default", run="r2", read=3 << 20, written=1 << 19, back=1 << 19)
    baseline, other = rows(records)
    assert (baseline.counted_bytes, baseline.counted_intensity) == (None, None)
    assert other.counted_bytes == 4 << 20
    assert other.counted_intensity == pytest.approx(2 * 1024**3 / (4 << 20))
    assert other.intensity == pytest.approx(2 * 1024**3 / (3 << 20))
