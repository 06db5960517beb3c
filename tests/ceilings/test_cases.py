"""Which ceilings are worth measuring: every level is probed by what fits it and does not fit the level above."""

from __future__ import annotations

import pytest

from impls.ceilings import cpu_ceiling_cases, gpu_ceiling_cases
from impls.workloads.base import parse_case

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MACHINES = {
    "2-core EPYC": ({"L1d": 64 * KIB, "L2": 2 * MIB, "L3": 32 * MIB}, 2),
    "56-core Xeon, L3 smaller than all L2": ({"L1d": 2688 * KIB, "L2": 112 * MIB, "L3": 105 * MIB}, 56),
    "virtual machine that sees a whole socket's L3": ({"L1d": 64 * KIB, "L2": 4 * MIB, "L3": 480 * MIB}, 2),
    "96 cores with stacked cache": ({"L1d": 3 * MIB, "L2": 96 * MIB, "L3": 1152 * MIB}, 96),
    "no L3": ({"L1d": 128 * KIB, "L2": 1 * MIB}, 4),
}


def _working_sets(caches: dict[str, int], threads: int, probe: str) -> list[int]:
    cases = cpu_ceiling_cases(caches, threads, ["f32"])
    return [c.bytes * (2 if probe == "copy" else 1) for c in cases if c.probe == probe]


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("probe", ["read", "copy"])
def test_every_level_has_a_working_set_of_its_own(name: str, probe: str) -> None:
    caches, threads = MACHINES[name]
    *levels, memory = _working_sets(caches, threads, probe)
    held = list(caches.values())
    assert len(levels) == len(held)
    for i, working_set in enumerate(levels):
        assert working_set > (held[i - 1] if i else 0) / 2
        assert working_set <= held[i] or working_set <= held[i] + held[i - 1]
        if i:
            assert working_set > held[i - 1] or working_set == held[i] // 2
    last = caches.get("L3", 0)
    assert memory >= max(256 * MIB, 2 * last)
    assert memory >= 4 * last or memory >= GIB


def test_l3_smaller_than_all_l2_is_probed_beyond_l2() -> None:
    caches, threads = MACHINES["56-core Xeon, L3 smaller than all L2"]
    assert 112 * MIB < _working_sets(caches, threads, "read")[2] < (112 + 105) * MIB


def test_rates_of_the_dtypes_asked_for_once_each() -> None:
    cases = cpu_ceiling_cases({}, 2, ["bf16", "f32", "bf16", "i32"])
    assert [c.dtype for c in cases if c.probe == "rate"] == ["bf16", "f32"]
    assert [c.probe for c in cases if c.probe in ("launch", "exp")] == ["launch", "exp"]


def test_work_grows_with_the_threads() -> None:
    few, many = (cpu_ceiling_cases(MACHINES["2-core EPYC"][0], threads, ["f32"]) for threads in (2, 64))
    for small, large in zip(few, many, strict=True):
        if small.probe in ("rate", "exp"):
            assert large.repeats == 32 * small.repeats


def test_a_gpu_s_f32_rate_is_always_measured_and_once() -> None:
    for dtypes in (["bf16"], ["f32", "bf16"]):
        rates = [c.dtype for c in gpu_ceiling_cases(dtypes) if c.probe == "rate"]
        assert sorted(rates) == ["bf16", "f32"]


def test_a_gpu_s_memory_is_swept_once_cold_and_its_l2_often() -> None:
    cases = gpu_ceiling_cases(["bf16"])
    l2 = 50 * MIB
    for probe in ("read", "copy"):
        moved = {c.id: c.bytes * (2 if probe == "copy" else 1) for c in cases if c.probe == probe}
        once = [size for i, size in moved.items() if parse_case(i).repeats == 1]
        often = [size for i, size in moved.items() if parse_case(i).repeats > 1]
        assert (min(once), max(once)) == (1 * MIB, 2 * GIB)
        assert often
        assert max(often) < l2
        assert all(GIB < c.compulsory_bytes() <= 2 * GIB for c in cases if c.probe == probe and c.repeats > 1)
