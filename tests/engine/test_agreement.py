"""What other tools print is read right; bounds and ratios are what they say. Samples in ``recorded`` are of an H200."""

import json
from pathlib import Path

import pytest

from benchmarks import agreement
from impls import registry
from impls.contract import Device
from impls.workloads.base import parse_case

RECORDED = Path(__file__).parent / "recorded"
H200 = Device("cuda", "NVIDIA H200", "sm_90", 16, 150 * 10**9, frozenset())


@pytest.mark.parametrize("call", agreement.CALLS)
def test_every_call_is_a_case_that_its_implementation_takes(call):
    name, case_id = agreement.CALLS[call]
    case = parse_case(case_id)
    assert case.id == case_id
    assert registry.refusal(registry.find(name, case.workload), case, H200) is None


def test_twins_are_about_ten_microseconds_and_above_one_millisecond():
    short, long = (parse_case(c) for c in agreement.TWINS)
    assert 5e-6 < short.flops() / 989e12 * 1.5 < 15e-6
    assert long.flops() / 989e12 > 1e-3


def test_nvbench_s_medians_and_clocks_are_read_per_call_and_skipped_runs_left_out():
    # As recorded but for the axis "call" and the last, skipped state.
    times = agreement.nvbench_times(json.loads((RECORDED / "nvbench.json").read_text()))
    assert set(times) == {"GEMM 4096^3"}
    assert [round(t["time_us"], 2) for t in times["GEMM 4096^3"]] == [175.1, 175.26, 175.33]
    assert times["GEMM 4096^3"][0]["clock_mhz"] == pytest.approx(1654.1, abs=0.1)


def test_ncu_s_table_is_read_with_its_units():
    kernels = agreement.ncu_kernels((RECORDED / "ncu.csv").read_text())
    assert [k["kernel"].partition("_")[0] for k in kernels] == ["nvjet"] * 4
    assert [round(k["time_us"], 3) for k in kernels] == [175.04, 173.376, 173.024, 173.312]
    assert kernels[0]["clock_mhz"] == pytest.approx(1618.727927)


def test_ncu_without_a_table_or_with_another_unit_is_an_error():
    text = (RECORDED / "ncu.csv").read_text()
    with pytest.raises(ValueError, match="no table"):
        agreement.ncu_kernels("==ERROR== The application returned an error code (1).\n")
    with pytest.raises(ValueError, match="fortnight"):
        agreement.ncu_kernels(text.replace('"ns"', '"fortnight"'))


def kernel(name: str, time_us: float = 1.0, clock_mhz: float = 1500.0) -> dict:
    return {"kernel": name, "time_us": time_us, "clock_mhz": clock_mhz}


FLUSH = kernel("ridgemark_read", 130.0)


def test_a_call_s_kernels_are_those_after_its_flush():
    product, split = kernel("nvjet", 10.0), kernel("splitKreduce", 2.0)
    windows = agreement.ncu_windows([FLUSH, product, FLUSH, product, split])
    assert windows == [[product], [product, split]]
    with pytest.raises(ValueError, match="without a call"):
        agreement.ncu_windows([FLUSH, FLUSH, product])
    with pytest.raises(ValueError, match="nvjet before any flush"):
        agreement.ncu_windows([product, FLUSH])
    assert agreement.ncu_windows([]) == []


def test_a_call_s_kernels_add_up_and_the_longest_gives_the_clock():
    windows = [
        [kernel("a", 2.0, 1900.0), kernel("b", 10.0, 1500.0)],
        [kernel("a", 4.0, 1901.0), kernel("b", 12.0, 1502.0)],
    ]
    found = agreement.ncu_call(windows)
    assert (found["kernels_us"], found["clock_mhz"], found["kernels"]) == (14.0, 1501.0, 2)
    assert found["runs_us"] == [12.0, 16.0]


def test_agreement_is_a_share_of_long_times_and_a_constant_of_short_ones():
    assert agreement.agrees(1000.0, 1019.9) and agreement.agrees(1000.0, 980.1)
    assert not agreement.agrees(1000.0, 1020.1) and not agreement.agrees(1000.0, 979.9)
    assert agreement.agrees(5.0, 6.9) and agreement.agrees(150.0, 148.1)
    assert not agreement.agrees(5.0, 7.1) and not agreement.agrees(150.0, 147.9)


def test_twins_are_held_to_a_fifth_of_a_percent_from_a_millisecond_on():
    assert agreement.twins_agree(1000.0, [1.0019, 0.9981])
    assert not agreement.twins_agree(1000.0, [1.0, 0.9979])
    assert agreement.twins_agree(999.0, [1.0099, 0.9901])
    assert not agreement.twins_agree(10.0, [1.0, 1.0101])


def test_a_ratio_is_the_median_of_the_rounds_and_its_spread_half_their_middle_half():
    pairs = [(102.0, 100.0), (99.0, 100.0), (101.0, 100.0), (300.0, 100.0), (100.0, 100.0)]
    assert agreement.twin_ratio(pairs) == 1.01
    assert agreement.spread(pairs) == pytest.approx((1.02 - 1.0) / 2)
    # A drift that both see does not show.
    assert agreement.twin_ratio([(10.0, 10.0), (20.0, 20.0), (40.0, 40.0)]) == 1.0


def test_a_failed_part_says_how_and_keeps_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "_LIMITS", {"nvbench": 60, "effects": 60})
    no_inputs = agreement._part("effects", tmp_path)
    assert set(no_inputs) == {"failed"} and no_inputs["failed"]
    monkeypatch.setattr(agreement, "_LIMITS", {"effects": 0.01})
    assert agreement._part("effects", tmp_path) == {"failed": "It took more than 0.01 s."}
    assert "No such file" in agreement._part("effects", tmp_path, ["no-such-tool"])["failed"]


def test_without_a_time_there_is_no_verdict():
    right = {"dirty": {"span_us": 12.5}, "observed": {"kernels_us": 10.0}, "nvbench": {"time_us": 14.0}}
    assert agreement._verdicts(right | {"ncu": {"kernels_us": 13.0}}, None) == {
        "nvbench": True,
        "nvbench_less_events": None,
        "ncu": False,
    }
    assert agreement._verdicts(right | {"ncu": {"failed": "x"}}, None)["ncu"] is None
    assert set(agreement._verdicts({"failed": "x", "ncu": {"kernels_us": 13.0}}, 2.3).values()) == {None}


def test_what_the_events_cost_is_what_nvbench_gives_the_least_launch_beyond_ours():
    timed = {"least launch": {"dirty": {"span_us": 1.0}, "nvbench": {"time_us": 3.3}}}
    assert agreement.events_us(timed) == 2.3
    assert agreement.events_us({"least launch": {"failed": "x"}}) is None
    assert agreement.events_us({"failed": "It took more than 1 s."}) is None
    short = {"dirty": {"span_us": 6.0}, "nvbench": {"time_us": 8.4}, "ncu": {"failed": "x"}}
    assert agreement._verdicts(short, 2.3) == {"nvbench": False, "nvbench_less_events": True, "ncu": None}
    assert not agreement._verdicts(short | {"nvbench": {"time_us": 10.4}}, 2.3)["nvbench_less_events"]
    # Two per cent of a long call are more than the events, which are not taken off there.
    long = {"dirty": {"span_us": 1000.0}, "nvbench": {"time_us": 1020.5}, "ncu": {"failed": "x"}}
    assert agreement._verdicts(long, 2.3) == {"nvbench": False, "nvbench_less_events": None, "ncu": None}


ONE = {
    "harness": {"span_us": 33.0, "clock_mhz": 1845.0},
    "observed": {"kernels_us": 33.0},
    "nvbench": {"time_us": 44.0, "clock_mhz": 1804.0},
    "ncu": {"kernels_us": 34.0, "clock_mhz": 1799.0},
    "agrees": {"nvbench": False, "ncu": True},
}


def test_nvbench_stands_beside_our_time_with_the_same_kind_of_flush():
    like = ONE | {"dirty": {"span_us": 41.0}, "agrees": ONE["agrees"] | {"nvbench_less_events": True}}
    document = {"events_us": 2.3, "calls": {"a": ONE, "b": like, "c": {"failed": "It took more than 1 s."}}}
    a, b, c = agreement.markdown(document).splitlines()[2:5]
    assert "| 33.00 us | - | 44.00 (+11.00 us, +33.3 %) **no** | - | 33.00 | 34.00 (+1.00 us, +3.0 %) |" in a
    assert "| 33.00 us | 41.00 | 44.00 (+3.00 us, +7.3 %) **no** | +0.70 us |" in b
    assert "It took more than 1 s." in c


def test_a_tool_without_a_time_is_shown_as_failed():
    document = {"calls": {"a": ONE | {"ncu": {"failed": "x"}, "agrees": {"nvbench": True, "ncu": None}}}}
    assert agreement.markdown(document).splitlines()[2].endswith("| 33.00 | failed | 1845, 1804, - | - |")
    # Where power decides the clock, the same cycles take another time.
    long = ONE | {
        "harness": {"span_us": 1000.0, "clock_mhz": 1500.0},
        "ncu": {"kernels_us": 976.0, "clock_mhz": 1538.0},
    }
    assert agreement.markdown({"calls": {"a": long}}).splitlines()[2].endswith("| +0.07 % |")


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("results/records/*/agreement.json")))
def test_committed_studies_are_shown_with_all_their_parts(path):
    document = json.loads(path.read_text())
    text = agreement.markdown(document)
    for part in ("calls", "twins", "effects"):
        assert "failed" not in document[part]
        assert all(f"| {name} |" in text for name in document[part])
