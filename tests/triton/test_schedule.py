"""Plans of persistent attention: every tile once, and every program about as much."""

from __future__ import annotations

import pytest

from impls.triton.schedule import key_blocks, plan
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case


def attention(spec: str) -> Attention:
    case = parse_case(f"attention:{spec}")
    assert isinstance(case, Attention)
    return case


def counted(case: Attention, row: int, rows: int, block: int) -> int:
    """Blocks in which any of the rows sees any key, by the definition of the masks."""
    seen = {
        key // block
        for query in range(row, min(row + rows, case.sq))
        for key in range(case.sk)
        if case.mask == "full"
        or (
            key <= query + case.sk - case.sq
            and (case.mask == "causal" or key > query + case.sk - case.sq - case.window)
        )
    }
    return len(seen)


@pytest.mark.parametrize(
    "spec",
    ["b1h1s300d64:bf16", "b1h1s300d64:bf16:causal", "b1h1q130k517d64:bf16:causal", "b1h1q190k700d64:bf16:window=77"],
)
def test_blocks_of_a_tile_are_those_in_which_it_sees_a_key(spec: str) -> None:
    case = attention(spec)
    for row in range(0, case.sq, 64):
        assert key_blocks(case, row, 64, 32) == counted(case, row, 64, 32)


@pytest.mark.parametrize("spec", ["b2h3s900d64:bf16", "b2h3s900d64:bf16:causal", "b1h4kv2q700k2300d64:bf16:window=300"])
@pytest.mark.parametrize(("section", "programs"), [(1, 7), (4, 132), (100, 3)])
def test_every_tile_is_computed_once_and_turns_end(spec: str, section: int, programs: int) -> None:
    case = attention(spec)
    found = plan(case, 128, 128, section, programs)
    tiles = case.batch * case.hq * -(-case.sq // 128)
    assert sorted(tile for turn in found for tile in turn if tile >= 0) == list(range(tiles))
    assert all(len(turn) == programs for turn in found)
    assert set(found[-1]) == {-1}
    for own in zip(*found, strict=True):
        # Who is done stays so.
        assert sorted(own, key=lambda tile: tile < 0) == list(own)


@pytest.mark.parametrize("section", [2, 4, 8])
def test_causal_tiles_are_shared_out_evenly(section: int) -> None:
    # Tile rows of 1 to 64 blocks, and one of overhead each, for 32 heads.
    case = attention("b2h16s8192d128:bf16:causal")
    found = plan(case, 128, 128, section, 132)
    loads = [sum(tile % 64 + 2 for tile in own if tile >= 0) for own in zip(*found, strict=True)]
    assert sum(loads) == 32 * sum(range(2, 66))
    assert max(loads) <= 1.01 * sum(loads) / 132
