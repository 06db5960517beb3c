"""Which CTA computes which tile of an attention, in which order.

Owns the plan of a persistent kernel whose tiles differ in length; it imports no Triton. A plan depends on sizes alone,
so it is made once, where the kernel is prepared.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

from impls.workloads.attention import Attention

# What a tile costs beyond its blocks of keys, in blocks: its first scores and its last product wait for one another.
_OVERHEAD = 1


def key_blocks(case: Attention, row: int, rows: int, block: int) -> int:
    """Blocks of ``block`` keys that the queries from ``row`` on, ``rows`` of them, see between them."""
    last_row = min(row + rows, case.sq) - 1
    offset = case.sk - case.sq
    end = case.sk if case.mask == "full" else last_row + offset + 1
    first = max(0, row + offset + 1 - case.window) if case.mask == "window" else 0
    return -(-end // block) - first // block


@lru_cache(maxsize=8)
def plan(case: Attention, rows: int, block: int, section: int, programs: int) -> tuple[tuple[int, ...], ...]:
    """Tile numbers by turn and program, -1 where a program is done; the last turn is all -1.

    Tile t is tile row ``t % n`` of head ``t // n`` of all batch entries, where n = ceil(Sq / rows). Tiles are dealt out
    one by one to the program that has had least so far (list scheduling, Graham 1969), sections of heads in turn and
    the longest of a section first: heads of a section share their keys in L2, and the short tiles at the end even out.

    Args:
        case: the attention.
        rows: queries of a tile.
        block: keys of a block.
        section: heads whose tiles are walked together.
        programs: CTAs.
    """
    tiles = -(-case.sq // rows)
    cost = [key_blocks(case, tile * rows, rows, block) + _OVERHEAD for tile in range(tiles)]
    longest = sorted(range(tiles), key=lambda tile: -cost[tile])
    heads = case.batch * case.hq
    free = [(0, program) for program in range(programs)]
    given: list[list[int]] = [[] for _ in range(programs)]
    for first in range(0, heads, section):
        for tile in longest:
            for head in range(first, min(first + section, heads)):
                load, program = free[0]
                given[program].append(head * tiles + tile)
                heapq.heapreplace(free, (load + cost[tile], program))
    turns = max(map(len, given)) + 1
    return tuple(tuple(own[turn] if turn < len(own) else -1 for own in given) for turn in range(turns))
