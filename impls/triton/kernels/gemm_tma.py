"""GEMM by tensor descriptors: the tensor memory accelerator (TMA) brings tiles of A and B and takes tiles of C.

Persistent: a program per multiprocessor, so that the loads of its next tile run during the epilogue of this one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from impls.triton.kernels.gemm_tile import finish, raster, start, step


@triton.jit
def load(descriptor, batch, height, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STACKED: tl.constexpr):
    """A tile at (row, column) of matrix ``batch``. Elements beyond the descriptor are zeros.

    STACKED: the matrices, of ``height`` rows, lie one below the other in a single one, so that a tile that leaves its
    matrix reaches into the next. Otherwise the descriptor has an axis for them, and it does not.
    """
    if STACKED:
        return descriptor.load([batch * height + row, column])
    else:
        return descriptor.load([batch, row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def put(
    descriptor, values, batch, height, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STACKED: tl.constexpr
):
    """A tile of C, as above; elements beyond the descriptor are dropped."""
    values = values.to(descriptor.dtype)
    if STACKED:
        descriptor.store([batch * height + row, column], values)
    else:
        descriptor.store([batch, row, column], values.reshape(1, ROWS, COLUMNS))


@triton.jit
def operands(
    a,
    b,
    batch,
    row,
    column,
    i,
    m,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    A_STACKED: tl.constexpr,
    B_STACKED: tl.constexpr,
):
    """A[row .. row + BM, i .. i + BK] and B[i .. i + BK, column .. column + BN]."""
    if A_TRANSPOSED:
        a_tile = load(a, batch, k, i, row, BK, BM, A_STACKED).T
    else:
        a_tile = load(a, batch, m, row, i, BM, BK, A_STACKED)
    if B_TRANSPOSED:
        b_tile = load(b, batch, n, column, i, BN, BK, B_STACKED).T
    else:
        b_tile = load(b, batch, k, i, column, BK, BN, B_STACKED)
    return a_tile, b_tile


@triton.jit
def product_by_descriptors(
    a,
    b,
    batch,
    row,
    column,
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
    A_STACKED: tl.constexpr,
    B_STACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum over k from ``first`` to ``last`` of A[row .. row + BM, k] B[k, column .. column + BN]."""
    acc = start(BM, BN, PRECISION)
    for i in tl.range(first, last, BK):
        a_tile, b_tile = operands(
            a, b, batch, row, column, i, m, n, k, BM, BN, BK, A_TRANSPOSED, B_TRANSPOSED, A_STACKED, B_STACKED
        )
        acc = step(a_tile, b_tile, acc, PRECISION)
    return acc


@triton.jit
def pair_by_descriptors(
    a,
    b,
    batch,
    row,
    column,
    m,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    STACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The product of a tile as two of BM / 2 rows each, which share B's tile: promoted sums then take the registers of
    half a tile, one after the other."""
    HALF: tl.constexpr = BM // 2
    top, bottom = start(HALF, BN, PRECISION), start(HALF, BN, PRECISION)
    for i in tl.range(0, k, BK):
        if A_TRANSPOSED:
            above = load(a, batch, k, i, row, BK, HALF, STACKED).T
            below = load(a, batch, k, i, row + HALF, BK, HALF, STACKED).T
        else:
            above = load(a, batch, m, row, i, HALF, BK, STACKED)
            below = load(a, batch, m, row + HALF, i, HALF, BK, STACKED)
        if B_TRANSPOSED:
            b_tile = load(b, batch, n, column, i, BN, BK, STACKED).T
        else:
            b_tile = load(b, batch, k, i, column, BK, BN, STACKED)
        top = step(above, b_tile, top, PRECISION)
        bottom = step(below, b_tile, bottom, PRECISION)
    return top, bottom


@triton.jit
def tiles(
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
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    PAIR: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALISE: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    STACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Every n-th tile of C, n being the number of programs.

    Args:
        a, b, c: descriptors of A, B and C as they are stored, with tiles of theirs (A and C: BM / (1 + PAIR) rows, C:
            BN / (1 + HALVES) columns).
        addend: pointer to bias or residual.
        HALVES: C leaves in two halves of BN / 2 columns, which takes half of the shared memory.
        PAIR: in two halves of BM / 2 rows, each a product of its own; not with HALVES.
        FLATTEN: the loops over tiles and over K are pipelined as one.
        SPECIALISE: loads, products and epilogue get warps of their own.
    """
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    for tile in tl.range(
        tl.program_id(0),
        batches * tiles_m * tiles_n,
        tl.num_programs(0),
        flatten=FLATTEN,
        warp_specialize=SPECIALISE,
    ):
        batch = tile // (tiles_m * tiles_n)
        tile_m, tile_n = raster(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
        row, column = tile_m * BM, tile_n * BN
        at = addend
        if EPILOGUE == "residual":
            at += batch.to(tl.int64) * m * n
        rows = row + tl.arange(0, BM // (1 + PAIR))
        if WIDE:
            rows = rows.to(tl.int64)
        if PAIR:
            top, bottom = pair_by_descriptors(
                a, b, batch, row, column, m, n, k, BM, BN, BK, A_TRANSPOSED, B_TRANSPOSED, STACKED, PRECISION
            )
            columns = column + tl.arange(0, BN)
            values = finish(top, at, rows, columns, m, n, WHOLE, EPILOGUE)
            put(c, values, batch, m, row, column, BM // 2, BN, STACKED)
            values = finish(bottom, at, rows + BM // 2, columns, m, n, WHOLE, EPILOGUE)
            put(c, values, batch, m, row + BM // 2, column, BM // 2, BN, STACKED)
        else:
            acc = product_by_descriptors(
                a,
                b,
                batch,
                row,
                column,
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
                STACKED,
                STACKED,
                PRECISION,
            )
            if HALVES:
                left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
                columns = column + tl.arange(0, BN // 2)
                values = finish(left, at, rows, columns, m, n, WHOLE, EPILOGUE)
                put(c, values, batch, m, row, column, BM, BN // 2, STACKED)
                values = finish(right, at, rows, columns + BN // 2, m, n, WHOLE, EPILOGUE)
                put(c, values, batch, m, row, column + BN // 2, BM, BN // 2, STACKED)
            else:
                values = finish(acc, at, rows, column + tl.arange(0, BN), m, n, WHOLE, EPILOGUE)
                put(c, values, batch, m, row, column, BM, BN, STACKED)


@triton.jit
def persistent_tma(
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
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    PAIR: tl.constexpr,
    FLATTEN: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    STACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Over descriptors that the host has made."""
    tiles(
        a,
        b,
        c,
        addend,
        batches,
        m,
        n,
        k,
        BM,
        BN,
        BK,
        GROUP,
        HALVES,
        PAIR,
        FLATTEN,
        False,
        WHOLE,
        WIDE,
        A_TRANSPOSED,
        B_TRANSPOSED,
        STACKED,
        PRECISION,
        EPILOGUE,
    )


@triton.jit
def packed(values, dtype: tl.constexpr):
    """Two neighbouring columns, rounded to 16 bits, in a register (half a tile of f32 in a quarter of its registers).

    Left to itself the compiler keeps a register for each element that goes around a loop.
    """
    even, odd = values.reshape(values.shape[0], values.shape[1] // 2, 2).split()
    if dtype == tl.bfloat16:
        convert: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        convert: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(convert, "=r,r,r", [even, odd], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def unpacked(pairs, dtype: tl.constexpr):
    """The columns again."""
    even, odd = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    columns = tl.join(even, odd).reshape(pairs.shape[0], 2 * pairs.shape[1])
    return columns.to(dtype, bitcast=True)


@triton.jit
def place(tile, tiles_m, tiles_n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Batch element, first row and first column of a tile."""
    each = tiles_m * tiles_n
    tile_m, tile_n = raster(tile % each, tiles_m, tiles_n, GROUP)
    return tile // each, tile_m * BM, tile_n * BN


@triton.jit
def persistent_tma_deferred(
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
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    STACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """As ``persistent_tma`` with HALVES, but a tile of C waits, rounded and packed, and leaves while the next tile's
    second and third product run. For C of 16 bits, and K of three steps at least."""
    HALF: tl.constexpr = BN // 2
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    programs = tl.num_programs(0)
    total = batches * tiles_m * tiles_n
    left_pairs = packed(tl.zeros((BM, HALF), tl.float32), c.dtype)
    right_pairs = left_pairs
    for tile in tl.range(tl.program_id(0), total, programs, flatten=FLATTEN):
        batch, row, column = place(tile, tiles_m, tiles_n, BM, BN, GROUP)
        acc = start(BM, BN, PRECISION)
        for i in tl.range(0, k, BK):
            a_tile, b_tile = operands(
                a, b, batch, row, column, i, m, n, k, BM, BN, BK, A_TRANSPOSED, B_TRANSPOSED, STACKED, STACKED
            )
            acc = step(a_tile, b_tile, acc, PRECISION)
            # Where the waiting tile lies is computed again: carried around the flattened loop it would be known too
            # early (Triton 3.6), and be the next tile's place.
            before = tile - programs
            if (before >= 0) & (i == BK):
                at_batch, at_row, at_column = place(before, tiles_m, tiles_n, BM, BN, GROUP)
                put(c, unpacked(left_pairs, c.dtype), at_batch, m, at_row, at_column, BM, HALF, STACKED)
            if (before >= 0) & (i == 2 * BK):
                at_batch, at_row, at_column = place(before, tiles_m, tiles_n, BM, BN, GROUP)
                put(c, unpacked(right_pairs, c.dtype), at_batch, m, at_row, at_column + HALF, BM, HALF, STACKED)
        at = addend
        if EPILOGUE == "residual":
            at += batch.to(tl.int64) * m * n
        rows = row + tl.arange(0, BM)
        if WIDE:
            rows = rows.to(tl.int64)
        columns = column + tl.arange(0, HALF)
        left, right = acc.reshape(BM, 2, HALF).permute(0, 2, 1).split()
        left_pairs = packed(finish(left, at, rows, columns, m, n, WHOLE, EPILOGUE), c.dtype)
        right_pairs = packed(finish(right, at, rows, columns + HALF, m, n, WHOLE, EPILOGUE), c.dtype)
    last = (total - 1 - tl.program_id(0)) // programs * programs + tl.program_id(0)
    at_batch, at_row, at_column = place(last, tiles_m, tiles_n, BM, BN, GROUP)
    put(c, unpacked(left_pairs, c.dtype), at_batch, m, at_row, at_column, BM, HALF, STACKED)
    put(c, unpacked(right_pairs, c.dtype), at_batch, m, at_row, at_column + HALF, BM, HALF, STACKED)


@triton.jit
def describe(pointer, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A descriptor of a matrix with tiles of ROWS x COLUMNS."""
    return tl.make_tensor_descriptor(pointer, [rows, columns], [columns, 1], [ROWS, COLUMNS])


@triton.jit
def persistent_tma_ws(
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
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Over descriptors of its own making, matrices stacked: the compiler cuts tiles for two groups of warps, and those
    of a descriptor that comes from outside it cannot cut (Triton 3.6)."""
    a_tiles = describe(a, batches * k, m, BK, BM) if A_TRANSPOSED else describe(a, batches * m, k, BM, BK)
    b_tiles = describe(b, batches * n, k, BN, BK) if B_TRANSPOSED else describe(b, batches * k, n, BK, BN)
    tiles(
        a_tiles,
        b_tiles,
        describe(c, batches * m, n, BM, BN),
        addend,
        batches,
        m,
        n,
        k,
        BM,
        BN,
        BK,
        GROUP,
        False,
        False,
        False,
        True,
        WHOLE,
        WIDE,
        A_TRANSPOSED,
        B_TRANSPOSED,
        True,
        PRECISION,
        EPILOGUE,
    )
