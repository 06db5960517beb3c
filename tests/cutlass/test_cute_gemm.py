"""Which GEMMs the CuTe kernel takes, how it cuts them, the order of tiles, and what it compiles to."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine import cases as case_files
from impls import registry
from impls.contract import Unsupported
from impls.cutlass import cute_gemm
from impls.cutlass.cute_gemm import Choice, Cute, CuteNoCluster
from impls.cutlass.cute_gemm_tiles import SHARED_BYTES, place
from impls.support.h200 import H200, MULTIPROCESSORS
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm

FLAGSHIP = [
    e.case
    for e in case_files.load("flagship")
    if isinstance(e.case, Gemm) and e.case.dtype in ("bf16", "f16", "f8e4m3")
]


def gemm(spec: str) -> Gemm:
    case = parse_case(f"gemm:{spec}")
    assert isinstance(case, Gemm)
    return case


@pytest.mark.parametrize(
    "spec, word",
    [
        ("64x64x64:f32", "f16, bf16 and f8e4m3"),
        ("64x64x64:i8:nt", "f16, bf16 and f8e4m3"),
        ("64x64x64:f16:acc=f16", "f32"),
        ("64x64x64:f8e4m3", "nt"),
        ("64x64x60:bf16", "16 bytes"),
        ("65536x65536x64:bf16", "32 bits"),
    ],
)
def test_a_refusal_says_why(spec: str, word: str) -> None:
    why = registry.refusal(Cute(), gemm(spec), H200)
    assert why is not None
    assert word in why


def test_another_device_is_refused() -> None:
    case = gemm("64x64x64:bf16")
    assert registry.refusal(registry.find("cutlass.cute", "gemm"), case, H200) is None
    for arch in ("sm_80", "sm_100"):
        assert registry.refusal(Cute(), case, replace(H200, arch=arch)) is not None


@pytest.mark.parametrize("case", FLAGSHIP, ids=lambda case: case.id)
def test_every_candidate_of_a_flagship_case_fits_a_multiprocessor(case: Gemm) -> None:
    assert Cute().refuses(case, H200) is None
    candidates = cute_gemm.space(case)
    assert len(candidates) == len(set(candidates)) > 0
    for choice in [*candidates, cute_gemm.rule(case)]:
        tiles = cute_gemm.tiles(case, choice)
        assert tiles.shared_bytes <= SHARED_BYTES
        assert tiles.stages >= 3
        # 65,536 registers, of which a warpgroup that multiplies gets 240 per thread at most.
        assert tiles.accumulators <= 208
        # A warpgroup's wgmma has 64 rows; cooperating warpgroups share a tile evenly.
        assert tiles.slabs * 64 * (1 if tiles.ping_pong else tiles.consumers) == tiles.bm
        # Parts and panels, which a wgmma's N of whole 8 and a row of 128 bytes bound, make up the tile.
        assert tiles.parts * tiles.instruction_n == tiles.bn and tiles.instruction_n % 8 == 0
        assert tiles.instruction_n % tiles.panel == 0
        threads = (128, 128 * tiles.consumers)
        assert sum(x * y for x, y in zip(tiles.registers, threads, strict=True)) <= 65536
    assert len({cute_gemm.tiles(case, choice) for choice in candidates}) <= 16


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, 1]), st.integers(1, 20))
def test_every_tile_is_taken_up_once(rows: int, columns: int, raster: int, band: int) -> None:
    order = [place(i, rows, columns, raster, band, min) for i in range(rows * columns)]
    assert sorted(order) == [(i, j) for i in range(rows) for j in range(columns)]


def test_tiles_taken_up_together_share_rows_and_columns() -> None:
    # 66 clusters of a 32 x 32 grid, in bands of 8: 8 rows and 9 columns, in place of 3 rows and 32 columns.
    together = [place(i, 32, 32, 0, 8, min) for i in range(66)]
    assert len({i for i, _ in together}) == 8
    assert len({j for _, j in together}) == 9
    transposed = [place(i, 32, 32, 1, 8, min) for i in range(66)]
    assert transposed == [(j, i) for i, j in together]


def test_clusters_are_as_many_as_the_device_holds_or_there_are_tiles_for() -> None:
    choice = Choice(128, 256, cluster_m=2)
    assert cute_gemm.clusters(gemm("8192x8192x64:bf16"), choice, MULTIPROCESSORS) == 66
    assert cute_gemm.clusters(gemm("256x512x64:bf16"), choice, MULTIPROCESSORS) == 2
    assert cute_gemm.clusters(gemm("b3x256x512x64:bf16"), choice, MULTIPROCESSORS) == 6
    # Each group begins with a tile of its own; an empty one has none.
    assert cute_gemm.clusters(gemm("g1+0+257x256x64:bf16"), choice, MULTIPROCESSORS) == 3


def test_few_rows_are_computed_as_columns() -> None:
    for rows, width in ((1, 16), (16, 16), (17, 32), (64, 64)):
        case = gemm(f"{rows}x8192x8192:bf16:nt")
        choice = cute_gemm.rule(case)
        assert choice.swapped
        assert choice.bn == width
        assert cute_gemm.sizes(case, choice) == (8192, rows)
        tiles = cute_gemm.tiles(case, choice)
        assert (tiles.a_major, tiles.b_major, tiles.d_major) == ("k", "k", "m")


def test_columns_of_no_whole_swizzle_are_those_of_the_transposed_product() -> None:
    wide = Choice(256, 208, cluster_n=2)
    assert cute_gemm.fits(gemm("8192x8192x8192:bf16:nt"), wide)
    assert not cute_gemm.fits(gemm("8192x8192x8192:bf16"), wide)
    assert cute_gemm.fits(gemm("8192x8192x8192:bf16"), replace(wide, swapped=True))
    assert not cute_gemm.fits(gemm("g512+512x8192x8192:bf16:nt"), replace(wide, swapped=True))
    tried = {(c.bm, c.bn, c.swapped) for c in cute_gemm.space(gemm("8192x8192x8192:bf16"))}
    assert {(256, 208, True), (128, 256, False)} <= tried


def test_promoted_sums_are_added_by_parts_that_make_up_the_tile() -> None:
    for bn, parts in ((256, 2), (224, 2), (192, 2), (128, 1)):
        tiles = cute_gemm.tiles(gemm("256x256x256:f8e4m3:nt"), Choice(128, bn))
        assert (tiles.parts, tiles.instruction_n) == (parts, bn // parts)
        assert tiles.accumulators == bn // 2 + bn // parts // 2
    # A slab more, half the columns at a time.
    assert cute_gemm.tiles(gemm("256x256x256:f8e4m3:nt"), Choice(256, 128)).instruction_n == 64


def test_a_variant_without_clusters_keeps_tiles_and_the_width_of_bands() -> None:
    choice = Choice(128, 256, cluster_m=2, raster="m", band=4)
    assert CuteNoCluster().variant(choice) == Choice(128, 256, raster="m", band=8)


def test_without_library_and_compiler_it_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("cutlass") is not None:
        pytest.skip("the CuTe DSL is installed here: the library would be compiled")
    monkeypatch.setenv("RIDGEMARK_CACHE", str(tmp_path))
    with pytest.raises(Unsupported, match=r"nvidia-cutlass-dsl .* is not installed: .*compile_gemm"):
        cute_gemm.library(gemm("256x256x256:bf16"), Choice(128, 256))


# --- compiled, without a GPU ------------------------------------------------------------------------------------------


@pytest.fixture
def ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """PTX of what is compiled for a case and a choice."""
    pytest.importorskip("cutlass.cute", reason="nvidia-cutlass-dsl is not installed here")
    monkeypatch.setenv("RIDGEMARK_CACHE", str(tmp_path))

    def compiled(case: Gemm, choice: Choice) -> str:
        import cuda.bindings.driver as cuda
        from cutlass import cute

        from impls.cutlass.kernels.cute_gemm import Gemm as Kernel

        monkeypatch.chdir(tmp_path)
        kernel = Kernel(cute_gemm.tiles(case, choice))
        options = "--gpu-arch sm_90a --keep-ptx"
        return str(cute.compile(kernel, *kernel.examples(), cuda.CUstream(0), options=options).artifacts.PTX)

    return compiled


def test_a_clustered_kernel_multicasts_and_one_without_does_not(ptx) -> None:
    case = gemm("4096x4096x4096:bf16:nt")
    text = ptx(case, Choice(128, 256, cluster_m=2))
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in text
    assert "cp.async.bulk.tensor.3d.shared::cluster.global" in text and ".multicast::cluster" in text
    assert "cp.async.bulk.tensor.3d.global.shared::cta" in text
    assert "setmaxnreg.dec" in text and "setmaxnreg.inc" in text
    alone = ptx(case, Choice(128, 256))
    assert ".multicast::cluster" not in alone


def test_promotion_sums_128_products_on_their_own(ptx) -> None:
    choice = Choice(128, 256, cluster_m=2)
    fast = ptx(gemm("4096x4096x4096:f8e4m3:nt:acc=fast"), choice)
    promoted = ptx(gemm("4096x4096x4096:f8e4m3:nt"), choice)
    assert "m64n256k32.f32.e4m3.e4m3" in fast
    assert "m64n128k32.f32.e4m3.e4m3" in promoted
    # One addition per sum of a thread: 64 x 256 over 128 threads.
    assert (fast.count("add.f32"), promoted.count("add.f32")) == (0, 128)


def test_a_turn_is_passed_on_in_either_accumulation(ptx) -> None:
    choice = Choice(64, 128, ping_pong=True)
    for acc in ("fast", "f32"):
        # The first turn, and the next one's.
        assert ptx(gemm(f"256x256x256:f8e4m3:nt:acc={acc}"), choice).count("bar.arrive") == 2


def test_a_tile_waits_for_the_stores_of_the_last_one(ptx) -> None:
    # Three panels in two slots: the next tile's first panel goes where this tile's last is still being read.
    text = ptx(gemm("4096x4096x4096:bf16:nt"), Choice(128, 192, ping_pong=True))
    assert text.count("cp.async.bulk.wait_group.read \t0") == 2


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_a_tile_of_208_columns_is_one_wgmma_wide_and_stored_whole(ptx, layout: str) -> None:
    case = gemm(f"8192x8192x8192:bf16:{layout}")
    text = ptx(case, Choice(256, 208, cluster_n=2, swapped=layout == "nn"))
    assert "wgmma.mma_async.sync.aligned.m64n208k16.f32.bf16.bf16" in text
    # Panels of 16 columns, of two slabs of 64 rows.
    assert text.count("cp.async.bulk.tensor.3d.global.shared::cta") == 2 * 208 // 16


def test_a_library_is_compiled_once_and_named_for_its_content(ptx) -> None:
    case, choice = gemm("4096x4096x4096:bf16:nt"), Choice(64, 64, consumers=1)
    first = cute_gemm.library(case, choice)
    made = first.stat().st_mtime_ns
    assert first.with_suffix(".cubin").is_file()
    # Another size, the same code; the order of tiles is an argument.
    assert cute_gemm.library(gemm("512x512x512:bf16:nt"), replace(choice, band=2)) == first
    assert first.stat().st_mtime_ns == made
    assert cute_gemm.library(case, replace(choice, bn=128)) != first
