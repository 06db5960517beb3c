"""GEMM by pointers: any strides, any sizes; loads are pipelined by cp.async.

``tiled`` gives every tile a program of its own, ``persistent`` a few programs per multiprocessor many tiles each,
``split_k`` several programs one tile.

M, N and K come divided by powers of two (UM, UN, UK). The compiler, which by itself looks for multiples of 16 only,
then knows what divides the lengths of rows, and so where it may load 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from impls.triton.kernels.gemm_tile import finish, raster, start, step, store
from impls.triton.kernels.gemm_tma import product_by_descriptors


@triton.jit
def product_by_pointers(
    a,
    b,
    rows,
    columns,
    first,
    last,
    m,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum over k from ``first`` to ``last`` of A[rows, k] B[k, columns]; what lies beyond M, N and ``last`` is zero.

    A is stored (M, K) or, A_TRANSPOSED, (K, M); B is stored (K, N) or (N, K).
    """
    acc = start(BM, BN, PRECISION)
    ks = tl.arange(0, BK)
    down, along = (first + ks)[:, None].to(rows.dtype), (first + ks)[None, :].to(rows.dtype)
    a_at = a + (rows[:, None] + along * m if A_TRANSPOSED else rows[:, None] * k + along)
    b_at = b + (down + columns[None, :].to(rows.dtype) * k if B_TRANSPOSED else down * n + columns[None, :])
    for i in tl.range(first, last, BK):
        if WHOLE and WHOLE_K:
            a_tile, b_tile = tl.load(a_at), tl.load(b_at)
        elif WHOLE_K:
            a_tile = tl.load(a_at, mask=(rows < m)[:, None], other=0.0)
            b_tile = tl.load(b_at, mask=(columns < n)[None, :], other=0.0)
        else:
            within = i + ks < last
            a_tile = tl.load(a_at, mask=(rows < m)[:, None] & within[None, :], other=0.0)
            b_tile = tl.load(b_at, mask=within[:, None] & (columns < n)[None, :], other=0.0)
        acc = step(a_tile, b_tile, acc, PRECISION)
        a_at += BK * m if A_TRANSPOSED else BK
        b_at += BK if B_TRANSPOSED else BK * n
    return acc


@triton.jit
def one_tile(
    a,
    b,
    c,
    addend,
    tile,
    tiles_m,
    tiles_n,
    m,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_K: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """One tile of C, by its number. WIDE: offsets need 64 bits."""
    batch = (tile // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = raster(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    rows, columns = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    if WIDE:
        rows = rows.to(tl.int64)
    acc = product_by_pointers(
        a + batch * m * k,
        b + batch * n * k,
        rows,
        columns,
        0,
        k,
        m,
        n,
        k,
        BM,
        BN,
        BK,
        A_TRANSPOSED,
        B_TRANSPOSED,
        WHOLE,
        WHOLE_K,
        PRECISION,
    )
    if EPILOGUE == "residual":
        addend += batch * m * n
    values = finish(acc, addend, rows, columns, m, n, WHOLE, EPILOGUE)
    store(c + batch * m * n, values, rows, columns, m, n, WHOLE)


@triton.jit
def tiled(
    a,
    b,
    c,
    addend,
    m,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    UM: tl.constexpr,
    UN: tl.constexpr,
    UK: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_K: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """A program for every tile of C."""
    m, n, k = m * UM, n * UN, k * UK
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    one_tile(
        a, b, c, addend, tl.program_id(0), tiles_m, tiles_n, m, n, k, BM, BN, BK,
        A_TRANSPOSED, B_TRANSPOSED, GROUP, WHOLE, WHOLE_K, WIDE, PRECISION, EPILOGUE,
    )  # fmt: skip


@triton.jit
def persistent(
    a,
    b,
    c,
    addend,
    batches,
    m,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    UM: tl.constexpr,
    UN: tl.constexpr,
    UK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_K: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Every n-th tile of C, n being the number of programs."""
    m, n, k = m * UM, n * UN, k * UK
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), batches * tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        one_tile(
            a, b, c, addend, tile, tiles_m, tiles_n, m, n, k, BM, BN, BK,
            A_TRANSPOSED, B_TRANSPOSED, GROUP, WHOLE, WHOLE_K, WIDE, PRECISION, EPILOGUE,
        )  # fmt: skip


@triton.jit
def split_k(
    a,
    b,
    c,
    addend,
    partial,
    arrived,
    m,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    UM: tl.constexpr,
    UN: tl.constexpr,
    UK: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_K: tl.constexpr,
    WIDE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """A SPLIT-th of the sums of one tile of C; the program that comes last adds all of them, in the order of K.

    Args:
        a, b: pointers; with TMA, for a single product, descriptors of A and B as they are stored, with tiles of theirs.
        partial: sums, (tiles, SPLIT, BM, BN) in the accumulator's type.
        arrived: how many programs of a tile have left their sums, (tiles,) i32; zeros before and after.
    """
    m, n, k = m * UM, n * UN, k * UK
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    batch = (tile // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = raster(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    rows, columns = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    if WIDE:
        rows = rows.to(tl.int64)
    length = tl.cdiv(tl.cdiv(k, BK), SPLIT) * BK
    first = part * length
    last = min(k, first + length)
    if TMA:
        acc = product_by_descriptors(
            a,
            b,
            0,
            tile_m * BM,
            tile_n * BN,
            first,
            last,
            m,
            n,
            k,
            BM,
            BN,
            BK,
            A_TRANSPOSED,
            B_TRANSPOSED,
            True,
            True,
            PRECISION,
        )
    else:
        acc = product_by_pointers(
            a + batch * m * k,
            b + batch * n * k,
            rows,
            columns,
            first,
            last,
            m,
            n,
            k,
            BM,
            BN,
            BK,
            A_TRANSPOSED,
            B_TRANSPOSED,
            WHOLE,
            WHOLE_K,
            PRECISION,
        )
    if EPILOGUE == "residual":
        addend += batch * m * n
    if SPLIT > 1:
        within = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        sums = partial + tile.to(tl.int64) * (SPLIT * BM * BN) + within
        tl.store(sums + part * (BM * BN), acc)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
            acc = start(BM, BN, PRECISION)
            for i in tl.range(SPLIT):
                acc += tl.load(sums + i * (BM * BN), cache_modifier=".cg")
            values = finish(acc, addend, rows, columns, m, n, WHOLE, EPILOGUE)
            store(c + batch * m * n, values, rows, columns, m, n, WHOLE)
            tl.store(arrived + tile, 0)
    else:
        values = finish(acc, addend, rows, columns, m, n, WHOLE, EPILOGUE)
        store(c + batch * m * n, values, rows, columns, m, n, WHOLE)
