"""The coverage table: made from what there is and what ran; the README holds the present one."""

import pytest

from analysis import coverage
from benchmarks.engine import records
from impls import registry
from impls.contract import Implementation


def implementation(called, on, simulated=()):
    class One(Implementation):
        name, workload, devices, summary, simulated_on = called, "gemm", on, "", simulated

        def prepare(self, case, device):
            raise NotImplementedError

    return One()


def result(impl, case, status, run="r"):
    return {"kind": "result", "run": run, "impl": impl, "case": case, "status": status}


def test_cases_are_counted_once_and_only_where_they_were_right():
    lines = [
        {"kind": "run", "run": "r", "device": {"kind": "cpu"}},
        {"kind": "run", "run": "g", "device": {"kind": "cuda"}},
        result("a.x", "gemm:1x1x1:f32", "ok"),
        result("a.x", "gemm:1x1x1:f32", "ok"),
        result("a.x", "gemm:2x2x2:f32", "checked"),
        result("a.x", "gemm:3x3x3:f32", "wrong"),
        result("a.x", "gemm:1x1x1:f32", "ok", run="g"),
    ]
    seen = coverage.exercised(lines)
    assert seen == {("a.x", "gemm", "cpu"): (1, 1), ("a.x", "gemm", "cuda"): (1, 0)}
    made = coverage.table([implementation("a.x", ("cpu", "cuda")), implementation("a.y", ("cpu",))], seen)
    assert made.splitlines()[2] == "| a | gemm | x (1 timed), y (conformance) | x (1 timed) |"


def test_what_a_device_only_simulates_is_said():
    seen = {("a.x", "gemm", "cpu"): (0, 2)}
    chosen = [implementation(name, ("cuda", "cpu"), ("cpu",)) for name in ("a.x", "a.y")]
    made = coverage.table(chosen, seen)
    assert made.splitlines()[2] == "| a | gemm | x (simulated: 2 judged), y (simulated: conformance) | x (-), y (-) |"


def test_the_table_is_put_between_its_marks():
    assert coverage.written(f"a\n{coverage.BEGIN}old{coverage.END}\nb", "new") == (
        f"a\n{coverage.BEGIN}\nnew\n{coverage.END}\nb"
    )
    with pytest.raises(ValueError, match="has no place"):
        coverage.written("a", "new")


def test_the_readme_holds_the_present_table():
    seen = coverage.exercised(records.read(coverage.ROOT / "results" / "records").lines)
    made = coverage.table(registry.implementations(), seen)
    assert made in (coverage.ROOT / "README.md").read_text(encoding="utf-8"), "run python -m analysis.coverage"
