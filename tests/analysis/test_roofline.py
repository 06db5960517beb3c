import pytest

from analysis import roofline
from analysis.frame import from_lines

F32 = "gemm:1024x1024x1024:f32"  # 2^31 FLOPs, 12 MiB
SKINNY = "gemm:1x4096x4096:f32"  # 2^25 FLOPs, 64 MiB and 32 KiB
MIB = 1 << 20
# One head, 256 queries and keys, head size 16: 4 x 256 x 16 elements of bf16 are read and written.
ATTENTION = roofline.Work(
    flops=2 * 256 * 256 * 32, exps=256 * 256, compulsory_bytes=32768, total_bytes=32768, dtype="bf16"
)


def roofs(records):
    (made,) = roofline.ceilings(from_lines(records.lines)).values()
    return made


def test_ceilings_are_the_best_round_s_rates(records):
    records.ceilings()
    made = roofs(records)
    assert made.rates == pytest.approx({"f32": 100e9, "bf16": 400e9})
    assert made.exp_rates == pytest.approx({"f32": 1e9})
    assert made.launch_s == pytest.approx(1e-6)
    assert made.ridge_point("f32") == pytest.approx(10.0)  # 100 GFLOP/s over 10 GB/s
    assert made.ridge_point("f16") is None


def test_bandwidth_is_that_of_the_level_a_working_set_lives_in(records):
    records.ceilings()
    made = roofs(records)
    assert made.bandwidth(1024) == pytest.approx(100e9)
    assert made.bandwidth(MIB / 2) == pytest.approx(100e9)
    assert made.bandwidth(8 * MIB) == pytest.approx(10**1.5 * 1e9)  # Half-way from 1 to 64 MiB, in logarithms.
    assert made.bandwidth(1e12) == pytest.approx(10e9)


def test_copy_counts_where_it_is_faster_and_its_working_set_is_twice_its_size(records):
    records.ceilings()
    records.result("ceiling:copy:4MiB", "ceilings.avx512", [2 * (1 << 30) / 80e9 * 1e6])
    made = roofs(records)
    assert made.curves["copy"].size == (8 * MIB,)
    assert made.bandwidth(8 * MIB) == pytest.approx(80e9)
    assert made.bandwidth(MIB / 2) == pytest.approx(100e9)


def test_cold_regimes_take_single_sweeps_only(records):
    records.run("r2", machine="h200", kind="cuda")
    for case, seconds in (
        ("ceiling:read:1MiB", (1 << 30) / 9e12),  # Swept a thousand times: that is L2.
        ("ceiling:read:1MiB:repeats=1", MIB / 0.5e12),
        ("ceiling:read:1GiB", (1 << 30) / 4e12),
    ):
        records.result(case, "ceilings.cuda", [seconds * 1e6], run="r2", regime="burst")
    made = roofs(records)
    assert made.bandwidth(MIB) == pytest.approx(0.5e12)
    assert made.memory_bandwidth() == pytest.approx(4e12)


def test_ceilings_of_machines_and_regimes_stay_apart(records):
    records.ceilings()
    records.run("r2", machine="other")
    records.ceilings("r2")
    assert {(m, regime) for m, _, _, regime in roofline.ceilings(from_lines(records.lines))} == {
        ("box", "warm"),
        ("other", "warm"),
    }


def test_compute_bound_gemm_by_hand(records):
    records.ceilings()
    # 2^31 FLOPs at 100 GFLOP/s: 21.47 ms. Loaded: two sets of 12 MiB.
    placed = roofline.place(roofline.work(F32), 30e-3, roofs(records))
    assert placed.sol_fraction == pytest.approx(2**31 / 100e9 / 30e-3)
    assert (placed.sol_roof, placed.class_ai, placed.bound_by) == ("compute", "compute-bound", "compute")
    assert placed.intensity == pytest.approx(2**31 / (12 * MIB))
    assert placed.ridge_point == pytest.approx(100e9 / roofs(records).bandwidth(24 * MIB))
    assert placed.own_roof_fraction == pytest.approx(placed.sol_fraction)


def test_memory_bound_gemm_by_hand(records):
    records.ceilings()
    placed = roofline.place(roofline.work(SKINNY), 8e-3, roofs(records))
    assert placed.sol_fraction == pytest.approx((64 * MIB + 2 * 4096 * 4) / 10e9 / 8e-3)
    assert (placed.sol_roof, placed.class_ai, placed.bound_by) == ("memory", "memory-bound", "memory")


def test_waste_is_not_rewarded_but_diagnosed(records):
    records.ceilings()
    moved = 4 * 64 * MIB
    placed = roofline.place(roofline.work(SKINNY), 30e-3, roofs(records), traffic_bytes=moved)
    assert placed.sol_fraction == pytest.approx((64 * MIB + 2 * 4096 * 4) / 10e9 / 30e-3)
    assert placed.own_roof_fraction == pytest.approx(moved / 10e9 / 30e-3)
    assert placed.bound_by == "memory"


def test_far_from_every_roof_is_neither_and_host_bound_is_host(records):
    records.ceilings()
    slow = roofline.place(roofline.work(F32), 100e-3, roofs(records))
    assert slow.bound_by == "neither"
    host = roofline.place(roofline.work(F32), 100e-3, roofs(records), flags=["host_bound: span 100 ms, busy 30 ms"])
    assert host.bound_by == "host"


def test_a_call_hardly_longer_than_the_least_call_is_bound_by_launch(records):
    records.ceilings()
    placed = roofline.place(roofline.work("gemm:8x8x8:f32"), 1.5e-6, roofs(records))
    assert placed.bound_by == "launch"
    assert placed.own_roof_fraction < 0.1


def test_faster_than_a_ceiling_is_flagged(records):
    records.ceilings()
    placed = roofline.place(roofline.work(F32), 20e-3, roofs(records))
    assert placed.sol_fraction > 1
    assert placed.note == "Faster than the compute ceiling that was measured: measure the ceilings again."


def test_exponentials_can_bind(records):
    records.ceilings()
    # 65,536 exponentials at 1e9/s: 65.5 us; 4.2 MFLOP at 400 GFLOP/s: 10.5 us.
    placed = roofline.place(ATTENTION, 80e-6, roofs(records))
    assert placed.sol_fraction == pytest.approx(65536 / 1e9 / 80e-6)
    assert (placed.sol_roof, placed.bound_by) == ("exp", "exp")


def test_what_is_missing_is_said(records):
    records.result(F32, "blas.default", [30e3] * 8)
    frame = from_lines(records.lines)
    times = frame.results["rounds"] * 0 + 30e3
    (placed,) = roofline.placements(frame, times)
    assert placed.note == "No ceilings were measured on box's device (box, warm)."

    records.result("ceiling:rate:bf16", "ceilings.avx512", [1e3])
    (placed,) = roofline.placements(from_lines(records.lines), times)
    assert placed.note == "No measured ceiling for the rate of f32 and the bandwidth of box's device (box) (warm)."
    assert placed.sol_fraction is None
    assert placed.intensity == pytest.approx(2**31 / (12 * MIB))


def test_missing_exp_rate_leaves_a_bound_and_says_so(records):
    records.ceilings()
    records.lines = [line for line in records.lines if line.get("case") != "ceiling:exp:f32"]
    placed = roofline.place(ATTENTION, 80e-6, roofs(records))
    assert placed.sol_roof == "compute"
    assert placed.note.startswith("No exp rate was measured")


def test_a_case_that_cannot_be_read_is_shown_with_its_reason(records):
    records.ceilings()
    records.result("fft:1024", "x.y", [10.0] * 8)
    frame = from_lines(records.lines)
    times = frame.results["rounds"] * 0 + 10.0
    (placed,) = roofline.placements(frame, times)
    assert placed.note.startswith("This case cannot be read here")


def test_counted_bytes_decide_the_class_where_there_are_any(records):
    records.run("r2", machine="h200", kind="cuda")
    for case, seconds in {
        "ceiling:rate:f32": 2 * 64**3 * 16384 / 100e9,
        "ceiling:read:64MiB:repeats=1": 64 * MIB / 10e9,
    }.items():
        records.result(case, "ceilings.gpu", [seconds * 1e6], run="r2", regime="burst")
    # 2^31 FLOPs over 12 MiB is 171 FLOP/B by design; the ridge point is 10. Counted: 256 MiB, 8 FLOP/B.
    for regime in ("burst", "sustained"):
        for impl in ("cublas.default", "xla.default"):
            records.result(F32, impl, [50e3], run="r2", regime=regime)
    records.profile(F32, "xla.default", run="r2", read=1 << 20)
    records.run("r3", machine="h200", kind="cuda")
    records.profile(F32, "xla.default", run="r3", read=250 * MIB, written=4 * MIB, back=2 * MIB)
    frame = from_lines(records.lines)
    times = frame.results["rounds"].map(lambda _: 50e3)
    placed = roofline.placements(frame, times)
    found = {(r.impl, r.regime): placed[r.Index] for r in frame.results.loc[placed.index].itertuples()}
    assert found["xla.default", "burst"].counted_bytes == 256 * MIB
    assert found["xla.default", "burst"].counted_intensity == pytest.approx(8.0)
    assert found["xla.default", "burst"].class_ai == "memory-bound"
    assert found["cublas.default", "burst"].counted_intensity is None
    assert found["cublas.default", "burst"].class_ai == "compute-bound"
    # Where a cache may hold what the call before left, a cold call's count says nothing.
    assert found["xla.default", "sustained"].counted_bytes is None
    for one in found.values():
        assert one.intensity == pytest.approx(2**31 / (12 * MIB))
