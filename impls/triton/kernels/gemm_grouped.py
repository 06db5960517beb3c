"""Grouped GEMM: the rows of A are cut into groups, each of which is multiplied by a B of its own.

Persistent. How long the groups are is read on the device, as a mixture of experts has it there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from impls.triton.kernels.gemm_pointer import product_by_pointers
from impls.triton.kernels.gemm_tile import raster, store
from impls.triton.kernels.gemm_tma import product_by_descriptors


@triton.jit
def grouped(
    a,
    b,
    c,
    sizes,
    n,
    k,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UN: tl.constexpr,
    UK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_K: tl.constexpr,
    WIDE: tl.constexpr,
    TMA: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Every n-th tile of C, n being the number of programs.

    Args:
        a, b: pointers; with TMA descriptors of A (M, K) and B (groups, ...) with tiles of theirs.
        c: pointer; a tile may end within the next group's rows, which are then left out.
        sizes: rows of each group, (GROUPS,) i32.
        n, k: divided by UN and UK, see ``gemm_pointer``.
        LANES: the next power of two from GROUPS.
        WHOLE, WHOLE_K: N, K are whole numbers of tiles.
    """
    n, k = n * UN, k * UK
    lanes = tl.arange(0, LANES)
    heights = tl.load(sizes + lanes, mask=lanes < GROUPS, other=0)
    tiles_n = tl.cdiv(n, BN)
    tiles = tl.cdiv(heights, BM) * tiles_n
    ends = tl.cumsum(tiles, 0)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0), flatten=FLATTEN):
        before = ends <= tile
        group = tl.sum(before.to(tl.int32), 0)
        top = tl.sum(tl.where(before, heights, 0), 0)
        height = tl.sum(tl.where(lanes == group, heights, 0), 0)
        tile_m, tile_n = raster(tile - tl.sum(tl.where(before, tiles, 0), 0), tl.cdiv(height, BM), tiles_n, GROUP)
        row, column = top + tile_m * BM, tile_n * BN
        rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
        if WIDE:
            rows = rows.to(tl.int64)
        if TMA:
            acc = product_by_descriptors(
                a,
                b,
                group,
                row,
                column,
                0,
                k,
                0,
                n,
                k,
                BM,
                BN,
                BK,
                False,
                B_TRANSPOSED,
                True,
                False,
                PRECISION,
            )
        else:
            acc = product_by_pointers(
                a,
                b + group.to(tl.int64) * n * k,
                rows,
                columns,
                0,
                k,
                top + height,
                n,
                k,
                BM,
                BN,
                BK,
                False,
                B_TRANSPOSED,
                False,
                WHOLE_K,
                PRECISION,
            )
        store(c, acc, rows, columns, top + height, n, False)
