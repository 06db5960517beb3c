"""What the GEMM kernels compile to for GPUs that are not there, which tiles they are given, and what tuning tries."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import environments
from impls.contract import Device
from impls.support.h200 import H200
from impls.triton import choices
from impls.triton.choices import Tile
from impls.triton.gemm import Grouped, Persistent, PersistentTma, PersistentTmaWs, SplitK, Tiled
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm

ROOT = Path(__file__).parents[2]
AMPERE = Device("cuda", "NVIDIA A100", "sm_80", 1, 80 * 2**30)
BLACKWELL = Device("cuda", "NVIDIA B200", "sm_100", 1, 180 * 2**30)
# CUDA C++ programming guide, table of compute capabilities: what a block may have on sm_90.
MOST_SHARED = 227 * 1024

PROMOTED = ("triton.persistent_tma_ws", "gemm:1024x1024x1024:f8e4m3:nt")
FAST = ("triton.persistent_tma_ws", "gemm:1024x1024x1024:f8e4m3:nt:acc=fast")
#: Target -> kernels, and families of instructions that each must and must not hold.
CODE: dict[str, dict[tuple[str, str], tuple[set[str], set[str]]]] = {
    "sm_80": {
        ("triton.tiled", "gemm:512x512x512:bf16:bias+gelu"): ({"mma", "cp_async", "ex2"}, {"wgmma", "tma_load"}),
        ("triton.split_k", "gemm:16x1024x2048:f16:nt"): ({"mma", "cp_async"}, {"wgmma"}),
        ("triton.persistent", "gemm:512x512x512:i8:nt"): ({"mma", "cp_async"}, {"wgmma"}),
        ("triton.grouped", "gemm:g100+28x512x512:bf16:nt"): ({"mma", "cp_async"}, {"wgmma", "tma_load"}),
    },
    "sm_90": {
        ("triton.persistent", "gemm:512x512x512:i8:nt"): ({"wgmma", "cp_async"}, {"mma", "tma_load"}),
        ("triton.split_k", "gemm:16x8192x8192:bf16:nt"): ({"mma", "tma_load", "mbarrier"}, {"wgmma", "local_load"}),
        ("triton.split_k", "gemm:64x8192x8192:bf16:nt"): ({"wgmma"}, {"mma", "local_load"}),
        ("triton.tiled", "gemm:512x512x512:bf16"): ({"wgmma", "cp_async"}, {"mma", "tma_load", "setmaxnreg"}),
        ("triton.tiled", "gemm:512x512x512:f32"): ({"ffma", "cp_async"}, {"wgmma", "mma"}),
        ("triton.persistent_tma", "gemm:512x512x512:bf16:bias+gelu"): (
            {"wgmma", "tma_load", "tma_store", "mbarrier", "ex2"},
            {"mma", "cp_async", "setmaxnreg"},
        ),
        ("triton.persistent_tma", "gemm:512x512x512:tf32"): ({"wgmma", "tma_load"}, {"mma"}),
        PROMOTED: ({"wgmma", "tma_load", "tma_store", "setmaxnreg"}, {"mma", "local_load"}),
        FAST: ({"wgmma", "tma_load", "tma_store", "setmaxnreg"}, {"mma", "local_load"}),
        ("triton.grouped", "gemm:g100+28x512x512:bf16:nt"): ({"wgmma", "tma_load"}, {"mma"}),
    },
    "sm_100": {
        ("triton.tiled", "gemm:512x512x512:f16"): ({"tcgen05", "cp_async"}, {"wgmma", "mma"}),
        ("triton.persistent", "gemm:512x512x512:bf16:residual"): ({"tcgen05", "cp_async"}, {"wgmma", "mma"}),
        ("triton.persistent_tma", "gemm:512x512x512:bf16"): ({"tcgen05", "tma_load", "tma_store"}, {"wgmma", "mma"}),
        ("triton.split_k", "gemm:64x1024x2048:f16:nt"): ({"cp_async"}, {"wgmma"}),
        ("triton.grouped", "gemm:g100+28x512x512:bf16:nt"): ({"tcgen05", "tma_load"}, {"wgmma", "mma"}),
    },
    "gfx942": {
        ("triton.tiled", "gemm:512x512x512:f16"): ({"mfma"}, set()),
        ("triton.persistent", "gemm:512x512x512:f16:bias+relu"): ({"mfma"}, set()),
        ("triton.persistent_tma", "gemm:512x512x512:bf16"): ({"mfma"}, set()),
        ("triton.split_k", "gemm:16x1024x2048:f16:nt"): ({"mfma"}, set()),
        ("triton.grouped", "gemm:g100+28x512x512:bf16:nt"): ({"mfma"}, set()),
    },
}


@cache
def compiled(arch: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Facts about every kernel of ``CODE`` for one target."""
    found = environments.find("triton", "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"{found.reason} {found.remedy}")
    pairs = [word for pair in CODE[arch] for word in pair]
    command = [str(found.python), "-m", "tests.triton.gemm_native", arch, *pairs]
    # Nothing of the environment's variables: they ask for the interpreter.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={}, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CODE[arch], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("arch", CODE)
def test_compiles_to_the_instructions_of_the_device(arch: str) -> None:
    for pair, (wanted, unwanted) in CODE[arch].items():
        families = set(compiled(arch)[pair]["instructions"])
        assert wanted <= families, pair
        assert not unwanted & families, pair


def test_fits_a_multiprocessor_without_spills() -> None:
    for pair, facts in compiled("sm_90").items():
        assert facts["shared_bytes"] <= MOST_SHARED, pair
        assert facts["stack_bytes"] == 0, pair


def test_promoted_sums_leave_the_tensor_core() -> None:
    """One addition in f32 per accumulator and step, which the compiler could have moved back into the tensor core."""
    facts = compiled("sm_90")
    # Two groups of 128 threads multiply.
    assert facts[PROMOTED]["additions"] >= facts[PROMOTED]["accumulators"] // 256
    assert facts[FAST]["additions"] == 0


def gemm(case_id: str) -> Gemm:
    case = parse_case(case_id)
    assert isinstance(case, Gemm)
    return case


@pytest.mark.parametrize(
    ("case", "aligned"),
    [
        ("gemm:5x24x40:bf16", True),
        ("gemm:5x24x40:bf16:nt", True),
        ("gemm:5x24x40:bf16:tn", False),  # A is stored (K, M): rows of 10 bytes
        ("gemm:5x20x40:bf16:nt", False),  # rows of C of 40 bytes
        ("gemm:5x24x40:f8e4m3:nt", False),  # rows of A of 40 bytes
        ("gemm:5x20x48:f8e4m3:out=f32:nt", True),
        ("gemm:5x6x4:f32", False),
    ],
)
def test_tma_wants_rows_of_whole_16_bytes(case: str, aligned: bool) -> None:
    assert choices.aligned(gemm(case)) == aligned
    assert (PersistentTma().refuses(gemm(case), H200) is None) == aligned


def test_refuses_what_the_device_lacks() -> None:
    assert PersistentTma().refuses(gemm("gemm:64x64x64:bf16"), AMPERE) is not None
    assert Tiled().refuses(gemm("gemm:64x64x64:bf16"), AMPERE) is None
    assert Tiled().refuses(gemm("gemm:64x64x64:f8e4m3"), AMPERE) is not None
    assert PersistentTmaWs().refuses(gemm("gemm:64x64x64:bf16"), BLACKWELL) is not None
    assert PersistentTmaWs().refuses(gemm("gemm:64x64x64:tf32"), H200) is not None
    assert PersistentTmaWs().refuses(gemm("gemm:b3x100x64x64:bf16"), H200) is not None


LARGE, FEW_ROWS, GROUPS = "gemm:8192x8192x8192:f8e4m3:nt", "gemm:1x8192x8192:bf16:nt", "gemm:g9+3x512x512:f16"


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, case) for kind in (Tiled, Persistent, SplitK, PersistentTma) for case in (LARGE, FEW_ROWS)),
        (PersistentTmaWs, LARGE),
        (Grouped, GROUPS),
    ],
)
def test_the_space_holds_only_what_fits(kind: type[Tiled], case: str) -> None:
    one = gemm(case)
    tiles = kind().space(one)
    assert len(set(tiles)) == len(tiles) > 0
    for tile in tiles:
        width = 1 if one.dtype == "f8e4m3" else 2
        assert tile.per_sm * tile.stages * tile.bk * (tile.bm + tile.bn) * width <= MOST_SHARED
        if tile.defer:
            assert tile.halves
        # A promoted sum leaves the tensor core after 128 products at most.
        assert one.dtype != "f8e4m3" or tile.bk <= 128


def test_takes_what_was_tuned_for_the_nearest_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Tile(64, 64, 64).config(), Tile(128, 256, 64).config()
    tuned = {
        "choices": {
            "triton.tiled": {
                "gemm:512x512x512:bf16": {"choice": small, "seconds": 1.5},
                "gemm:8192x8192x8192:bf16": {"choice": large, "seconds": 2.0},
                "gemm:300x300x300:f8e4m3": {"choice": large, "seconds": 2.0},
            }
        }
    }
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "h200.json").write_text(json.dumps(tuned))
    monkeypatch.setattr(choices, "_STACK", tmp_path)
    for case, expected in (
        ("gemm:600x600x600:bf16", "gemm:512x512x512:bf16"),
        ("gemm:600x600x600:f16", "gemm:512x512x512:bf16"),  # the same bytes and instructions
        ("gemm:4096x8192x4096:bf16:nt", "gemm:8192x8192x8192:bf16"),
        # 2048 is nearer to 8192 by logarithms, in three of three sizes
        ("gemm:2112x2112x2112:bf16", "gemm:8192x8192x8192:bf16"),
        ("gemm:1904x1904x1904:bf16", "gemm:512x512x512:bf16"),
    ):
        tile, origin = choices.choose("triton.tiled", gemm(case), H200.name)
        assert origin == f"tuned for {expected} in {tuned['choices']['triton.tiled'][expected]['seconds']} s"
        assert tile.config() == tuned["choices"]["triton.tiled"][expected]["choice"]
    # Six doublings in all, and nothing that was tuned is near enough.
    assert choices.choose("triton.tiled", gemm("gemm:64x64x64:bf16"), H200.name)[1] == "rule"
    # A device without choices of its own takes the H200's; another accumulation takes the rule.
    assert choices.choose("triton.tiled", gemm("gemm:600x600x600:bf16"), "NVIDIA B200")[1].startswith("tuned for")
    assert choices.choose("triton.tiled", gemm("gemm:600x600x600:f16:acc=f16"), H200.name)[1] == "rule"


def test_rule_keeps_multiprocessors_busy() -> None:
    for case, tiles in (
        ("gemm:512x512x512:bf16", 64),
        ("gemm:1024x1024x1024:bf16", 256),
        ("gemm:8192x8192x64:bf16", 2048),
    ):
        tile = choices.rule("tiled", gemm(case))
        assert (gemm(case).m // tile.bm) * (gemm(case).n // tile.bn) == tiles
    assert choices.rule("split_k", gemm("gemm:512x512x16384:bf16")).split > 1


@pytest.mark.parametrize(
    ("shape", "split"),
    # Tiles of 16 x 64 whose pipeline fills a multiprocessor: 128 are one turn of 132, 20 take four programs each, 160
    # two turns of which the second is nearly empty, 896 nearly seven full ones, and 512 of K no second program.
    [("16x8192x8192", 1), ("16x1280x8192", 4), ("16x10240x8192", 2), ("16x57344x8192", 1), ("16x1280x512", 1)],
)
def test_k_is_split_as_multiprocessors_would_idle(shape: str, split: int) -> None:
    assert choices.parts(Tile(16, 64, 128, warps=4, stages=8), gemm(f"gemm:{shape}:bf16:nt")) == split


def test_a_neighbours_tile_takes_the_cases_own_split() -> None:
    tuned, _ = choices.choose("triton.split_k", gemm("gemm:16x8192x8192:bf16:nt"), H200.name)
    near, origin = choices.choose("triton.split_k", gemm("gemm:16x1280x8192:bf16:nt"), H200.name)
    assert origin.startswith("tuned for gemm:16x8192x8192:bf16:nt") and (tuned.split, near.split) == (1, 4)
    assert replace(near, split=1) == tuned


def test_a_tile_is_no_larger_than_the_case() -> None:
    tile = choices.fitted("tiled", Tile(128, 256, 64), gemm("gemm:17x40x64:bf16"))
    assert (tile.bm, tile.bn) == (32, 64)
    # Rows that do not begin at multiples of 16 bytes are loaded one element at a time.
    tile = choices.fitted("tiled", Tile(128, 256, 64), gemm("gemm:999x999x999:bf16"))
    assert (tile.bm, tile.bn) == (128, 128)
    assert choices.fitted("split_k", Tile(16, 64, 64, split=8), gemm("gemm:1x64x1024:bf16")).split == 8
    assert choices.fitted("split_k", Tile(16, 64, 64, split=8), gemm("gemm:1x64x1000:bf16")).split == 4
    assert choices.fitted("split_k", Tile(16, 64, 64, split=8), gemm("gemm:1x64x33:bf16")).split == 1
    assert choices.fitted("split_k", Tile(16, 64, 64, tma=True), gemm("gemm:1x64x65:bf16:nt")).tma is False
    # Half of the rows must still fill a wgmma, and a tile of C can wait for the third step of the next one.
    pair = Tile(128, 128, 128, pair=True)
    assert choices.fitted("persistent_tma", pair, gemm("gemm:65x128x128:f8e4m3:nt")).pair
    assert not choices.fitted("persistent_tma", pair, gemm("gemm:64x128x128:f8e4m3:nt")).pair
    waiting = Tile(128, 256, 64, halves=True, defer=True)
    for case, waits in (("512x512x129:bf16", True), ("512x512x128:bf16", False), ("512x512x512:bf16:out=f32", False)):
        assert choices.fitted("persistent_tma", waiting, gemm(f"gemm:{case}")).defer == waits
