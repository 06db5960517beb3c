"""Which tiles a case takes, and that they fit."""

from __future__ import annotations

import pytest

from benchmarks.engine import cases as case_files
from impls.contract import Device
from impls.pallas import tiling, vmem
from impls.pallas.attention import MosaicGpu as MosaicAttention
from impls.pallas.attention import Tpu as TpuAttention
from impls.pallas.gemm import MosaicGpu as MosaicGemm
from impls.pallas.gemm import Tpu as TpuGemm
from impls.support.h200 import H200
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm

CPU = Device("cpu", "a CPU", "x86_64", 2, 2**34)
FLAGSHIP = [entry.case for entry in case_files.load("flagship")]


def gemm(name: str) -> Gemm:
    case = parse_case(f"gemm:{name}")
    assert isinstance(case, Gemm)
    return case


@pytest.mark.parametrize("case", FLAGSHIP, ids=lambda c: c.id)
def test_flagship_tiles_fit_a_multiprocessor(case) -> None:
    if isinstance(case, Gemm):
        if MosaicGemm().refuses(case, H200) is None:
            assert tiling.gemm(case, H200.name)[0].shared_bytes(case) <= tiling.SHARED_BYTES
    elif MosaicAttention().refuses(case, H200) is None:
        assert isinstance(case, Attention)
        choose = tiling.decode if tiling.decodes(case) else tiling.attention
        if case.direction == "bwd":
            choose = tiling.backward
        assert choose(case, H200.name)[0].shared_bytes(case) <= tiling.SHARED_BYTES


def test_a_tuned_case_takes_its_own_tiles_and_its_neighbours_take_them_too() -> None:
    own, source = tiling.gemm(gemm("8192x8192x8192:bf16"), H200.name)
    assert source.startswith("tuned for gemm:8192x8192x8192:bf16 in ")
    assert tiling.gemm(gemm("8192x8192x6144:f16"), H200.name) == (own, source)
    assert tiling.gemm(gemm("8192x8192x8192:bf16"), "another GPU")[1] == "untuned"


@pytest.mark.parametrize(("m", "cols"), [(1, 8), (8, 8), (9, 16), (33, 64), (64, 64)])
def test_few_rows_become_columns(m: int, cols: int) -> None:
    chosen, _ = tiling.gemm(gemm(f"{m}x8192x8192:bf16:nt"), H200.name)
    assert chosen.swapped and (chosen.block_m, chosen.block_n) == (cols, 64)


def test_few_rows_of_few_columns_share_k() -> None:
    case = gemm("16x1024x8192:bf16:nt")
    chosen, _ = tiling.gemm(case, H200.name)
    # 16 tiles of 64 columns, each shared by 8 blocks: 128 of 132 multiprocessors. Each leaves 64 x 16 sums in f32.
    assert (chosen.block_n, chosen.splits) == (64, 8)
    assert tiling.split_bytes(case) == 8 * 1024 * 16 * 4
    assert MosaicGemm().traffic_bytes(case) == case.compulsory_bytes() + 2 * tiling.split_bytes(case)
    # 128 tiles need no company; nor do few steps of K.
    assert tiling.gemm(gemm("16x8192x8192:bf16:nt"), H200.name)[0].splits == 1
    assert tiling.gemm(gemm("16x1024x512:bf16:nt"), H200.name)[0].splits == 1
    assert tiling.split_bytes(gemm("16x8192x8192:bf16:nt")) == 0


def test_a_weight_is_copied_only_where_its_columns_are_no_whole_segments() -> None:
    """In bytes: C of 16 x 1000 twice more where it is cut off; B of 1000 x 512 only where N lies along its rows."""
    c, b = 2 * 16 * 1000, 2 * 1000 * 512
    for layout, copied in (("nt", c), ("nn", c + b)):
        case = gemm(f"16x1000x512:bf16:{layout}")
        assert MosaicGemm().traffic_bytes(case) == case.compulsory_bytes() + 2 * copied
    odd = gemm("16x1001x512:bf16:nt")  # no whole group of 8 rows
    assert MosaicGemm().traffic_bytes(odd) == odd.compulsory_bytes() + 2 * (2 * 16 * 1001 + 2 * 1001 * 512)


def test_what_a_block_may_not_have_of_vmem_is_refused_in_a_sentence(monkeypatch) -> None:
    case = gemm("1024x1024x1024:bf16")
    # Two buffers of 512 x 512 each for A, B and C in bf16, and the sums in f32: 3 MiB and 1 MiB.
    assert vmem.gemm(case).bytes(case) == 4 * 2**20
    assert TpuGemm().refuses(case, CPU) is None
    monkeypatch.setattr(vmem, "gemm", lambda case: vmem.GemmBlocks(512, 512, 512, 2**20))
    assert TpuGemm().refuses(case, CPU) == "The kernel's blocks need 4.0 MiB of VMEM; it may have 1 MiB."
    attention = parse_case("attention:b1h1s1024d64:bf16")
    monkeypatch.setattr(vmem, "attention", lambda case: vmem.AttentionBlocks(256, 512, 2**20))
    assert "it may have 1 MiB" in (TpuAttention().refuses(attention, CPU) or "")
