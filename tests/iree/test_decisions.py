"""What is decided before IREE is asked: packing, tile size, targets, Vulkan's driver, the compiler's first error."""

from __future__ import annotations

from pathlib import Path

import pytest

from impls.contract import Device, Unsupported
from impls.iree import attention, gemm, targets
from impls.workloads.base import parse_case

DEVICE = Device("cpu", "test", "x86_64", 2, 1 << 34)


def product(spec: str) -> gemm.Gemm:
    case = parse_case(f"gemm:{spec}")
    assert isinstance(case, gemm.Gemm)
    return case


@pytest.mark.parametrize(
    ("spec", "packs"),
    [
        ("1024x1024x1024:f32", True),
        ("1024x1024x1024:bf16:nt", True),
        ("4x4096x4096:f32:nt", False),
        ("4x4095x4096:f32:nt", True),  # no whole vectors
        ("4x4096x4096:bf16:nt", True),
        ("4x4096x4096:bf16", False),
        ("48x4096x4096:f32:nt", False),
        ("49x4096x4096:f32:nt", True),
    ],
)
def test_packing_follows_the_shape(spec: str, packs: bool) -> None:
    flags = gemm.LlvmCpu().flags(product(spec), DEVICE)
    assert ("--iree-opt-data-tiling" in flags) == packs


@pytest.mark.parametrize(
    ("spec", "threads", "expected"),
    [
        ("64x64x64:f32", 2, 1 << 18),  # the compiler's default
        ("1024x1024x1024:f32", 2, 1 << 20),  # 8 MiB of operands over 4 times 2 threads
        ("1024x1024x1024:f16", 2, 1 << 20),  # multiplied in f32
        ("8192x8192x8192:f32", 2, 1 << 22),
        ("8192x8192x8192:f32", 64, 1 << 21),
    ],
)
def test_a_workgroups_operands(spec: str, threads: int, expected: int) -> None:
    device = Device("cpu", "test", "x86_64", threads, 1 << 34)
    assert f"--iree-llvmcpu-matmul-tile-bytes={expected}" in gemm.LlvmCpu().flags(product(spec), device)


@pytest.mark.parametrize(
    ("spec", "tiled"),
    [
        ("b2h14kv2q1k257d96:f32", False),  # loses rows
        ("b3h28kv4q1k1024d128:bf16:bwd", False),
        ("b2h8kv2q1k257d96:f32", True),
        ("b1h14kv2q1k257d96:f32", True),
        ("b2h7kv1q1k257d96:f32", True),
        ("b1h8s1024d64:f32:causal", False),  # faster without
        ("b1h8s1024d64:bf16:causal", True),
    ],
)
def test_data_tiling_of_attention_only_where_it_is_right_and_fast(spec: str, tiled: bool) -> None:
    case = parse_case(f"attention:{spec}")
    assert isinstance(case, attention.Attention)
    assert ("--iree-opt-data-tiling" in attention.StableHlo().flags(case)) == tiled


def test_vmvx_counts_the_scores_that_a_mask_hides() -> None:
    small, masked = parse_case("attention:b1h2s40d64:f32"), parse_case("attention:b1h4s1024d64:f32:window=1")
    assert attention.Vmvx().refuses(small, DEVICE) is None
    refusal = attention.Vmvx().refuses(masked, DEVICE)
    assert refusal is not None
    assert "GFLOP" in refusal
    assert masked.flops() < targets.VMVX_FLOPS


def test_without_a_driver_vulkan_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VK_ICD_FILENAMES", raising=False)
    manifest = tmp_path / "lvp_icd.x86_64.json"
    monkeypatch.setenv("VK_DRIVER_FILES", str(manifest))
    with pytest.raises(Unsupported, match="mesa-vulkan-drivers"):
        gemm.Vulkan().prepare(product("8x8x8:f32"), DEVICE)
    manifest.write_text("{}")
    gemm.require_vulkan()


def test_the_compilers_first_error_becomes_a_sentence() -> None:
    told = (
        "Error invoking IREE compiler tool iree-compile\nError code: 1\nDiagnostics:\n"
        "<stdin>:4:10: error: failed to legalize operation 'vector.bitcast': %58 = \"vector.bitcast\"(%43) : ...\n"
        "<stdin>:2:3: error: another\n"
    )
    assert targets._first_error(told, targets.VULKAN) == (
        "iree-compile refuses this for vulkan-spirv: failed to legalize operation 'vector.bitcast'."
    )


def test_targets_have_distinct_names_and_flags() -> None:
    assert len({t.name for t in targets.TARGETS}) == len({t.flags for t in targets.TARGETS}) == 9
