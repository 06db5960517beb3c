"""What the variants of cuBLAS refuse and declare, known by hand."""

from __future__ import annotations

import pytest

from impls.contract import Device
from impls.cublas.gemm import Default, Graph, Unfused
from impls.workloads.base import parse_case

H200 = Device("cuda", "NVIDIA H200", "sm_90", 16, 1 << 37)


def test_unfused_takes_what_has_an_epilogue():
    assert "no epilogue" in Unfused().refuses(parse_case("gemm:64x64x64:bf16"), H200)
    assert Unfused().refuses(parse_case("gemm:64x64x64:bf16:bias+gelu"), H200) is None
    # cuBLASLt has no epilogue for i32, and none is asked of it.
    assert Unfused().refuses(parse_case("gemm:64x64x64:i8:bias"), H200) is None


@pytest.mark.parametrize(("epilogue", "passes"), [("bias", 1), ("residual", 1), ("bias+gelu", 2)])
def test_unfused_moves_c_twice_for_every_step(epilogue, passes):
    case = parse_case(f"gemm:64x32x16:bf16:{epilogue}")
    assert Unfused().traffic_bytes(case) - case.compulsory_bytes() == passes * 2 * (64 * 32 * 2)


def test_a_graph_is_the_baseline_by_another_launch():
    case = parse_case("gemm:64x64x8:f8e4m3:nt")
    assert "multiples of 16" in Graph().refuses(case, H200)
    assert Graph().traffic_bytes(case) == case.compulsory_bytes()


def test_gelu_of_an_f32_result_is_a_kernel_of_its_own():
    for spec, again in (
        ("f32:bias+gelu", 1),
        ("tf32:bias+gelu", 1),
        ("bf16:out=f32:bias+gelu", 1),
        ("f32:bias+relu", 0),
    ):
        case = parse_case(f"gemm:64x32x16:{spec}")
        assert Default().traffic_bytes(case) - case.compulsory_bytes() == again * 2 * (64 * 32 * 4)
    case = parse_case("gemm:64x32x16:bf16:bias+gelu")
    assert Default().traffic_bytes(case) == case.compulsory_bytes()
