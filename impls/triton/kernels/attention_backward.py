"""Attention backward in Triton, from the forward pass's O and log2-sum-exp.

Owns delta = rowsum(dO O), dK and dV by tiles of keys, and dQ by tiles of queries, which computes scores and dP once
more: seven products where five would do, but nothing is added up in memory, and gradients repeat bit for bit. It does
not own tile sizes.

Per query p = 2^(score factor - lse), dp = dO v^T, ds = p (dp - delta); dV = p^T dO, dK = scale ds^T Q, dQ = scale ds K.
Scores are computed transposed where dK and dV are: p^T and ds^T then leave the registers of one product for another.
Query heads that share a key head are walked through by the same program: dK and dV are summed in registers.
"""

import triton
import triton.language as tl

from impls.triton.kernels.attention_forward import keys_and_values, queries_of_program, visible, visible_blocks


@triton.jit
def delta(
    o_ptr, do_ptr, delta_ptr, rows, hq, sq, lse_row, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """rowsum(dO O), f32 (B, Hq, lse_row), of O and dO (B, Sq, Hq, D). Grid: tiles of the ``rows`` = B Sq Hq rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    there = (row < rows)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    o = tl.load(o_ptr + at, mask=there, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=there, other=0.0).to(tl.float32)
    head = row % hq
    query = row // hq % sq
    entry = row // (hq * sq)
    tl.store(delta_ptr + (entry * hq + head) * lse_row + query, tl.sum(o * do, 1), mask=row < rows)


@triton.jit
def seeing_blocks(start, sq, sk, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr):
    """Queries that see keys start to start + BLOCK_N - 1: begin, whole_begin, whole_end, end, in whole blocks.

    Queries in [whole_begin, whole_end) see all of these keys, those before and after some. ``whole_end`` is ``end``
    where no window is: what lies beyond the last query needs no mask, since dO and delta are 0 there.
    """
    begin = 0
    whole_begin = 0
    end = sq
    whole_end = sq
    if MASK != "full":
        shift = sk - sq
        begin = tl.maximum(start - shift, 0) // BLOCK_M * BLOCK_M
        whole_begin = tl.cdiv(tl.maximum(start + BLOCK_N - 1 - shift, 0), BLOCK_M) * BLOCK_M
        if MASK == "window":
            end = tl.maximum(tl.minimum(sq, tl.minimum(start + BLOCK_N, sk) - 1 + window - shift), 0)
            whole_end = tl.maximum(tl.minimum(sq, start + window - shift), 0) // BLOCK_M * BLOCK_M
    if start + BLOCK_N > sk:  # the last keys do not fill a block
        whole_begin = tl.cdiv(end, BLOCK_M) * BLOCK_M
    whole_begin = tl.minimum(whole_begin, end)
    return begin, whole_begin, tl.maximum(whole_begin, whole_end), end


@triton.jit
def _gradients(
    dk, dv, q, k, v, do, lse, delta_row, position, key, sk, window, factor,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries into dK and dV."""
    scores = tl.dot(k, q.T, input_precision=PRECISION)
    p = tl.exp2(scores * factor - lse[None, :])
    if MASK != "none":
        p = tl.where(visible(position[None, :], key[:, None], sk, window, MASK), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    ds = (p * (dp - delta_row[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _walk_queries(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, row, begin, end, key, sq, sk, window, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``_gradients`` over queries [begin, end) through pointers to one head's first row; ``row`` is a row's stride."""
    column = tl.arange(0, BLOCK_D)
    offset = tl.arange(0, BLOCK_M)
    inside = offset[:, None] * row + column[None, :]
    for start in range(begin, end, BLOCK_M):
        query = start + offset
        here = tl.cast(start, tl.int64) * row
        there = (query < sq)[:, None]
        if D != BLOCK_D:
            there = there & (column < D)[None, :]
        q = tl.load(q_ptr + here + inside, mask=there, other=0.0)
        do = tl.load(do_ptr + here + inside, mask=there, other=0.0)
        # Beyond the queries p becomes 2^-inf.
        lse = tl.load(lse_ptr + query, mask=query < sq, other=float("inf"))
        delta_row = tl.load(delta_ptr + query, mask=query < sq, other=0.0)
        dk, dv = _gradients(
            dk, dv, q, k, v, do, lse, delta_row, query + sk - sq, key, sk, window, factor, MASK, PRECISION
        )
    return dk, dv


@triton.jit
def backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, hq, hkv, sq, sk, lse_row, window, factor, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV (B, Sk, Hkv, D). Grid: tiles of keys, key heads, batch, the fastest first."""
    tiles = tl.cdiv(sk, BLOCK_N)
    index = tl.program_id(0)
    start = index % tiles * BLOCK_N
    index = index // tiles
    kv = index % hkv
    entry = (index // hkv).to(tl.int64)
    key = start + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    stored = (key < sk)[:, None] & (column < D)[None, :]
    at = ((entry * sk + key) * hkv + kv)[:, None] * D + column[None, :]
    k = tl.load(k_ptr + at, mask=stored, other=0.0)
    v = tl.load(v_ptr + at, mask=stored, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    begin, whole_begin, whole_end, end = seeing_blocks(start, sq, sk, window, BLOCK_M, BLOCK_N, MASK)
    group = hq // hkv
    for head in range(kv * group, kv * group + group):
        corner = (entry * sq * hq + head) * D
        corner_lse = (entry * hq + head) * lse_row
        dk, dv = _walk_queries(
            dk, dv, k, v, q_ptr + corner, do_ptr + corner, lse_ptr + corner_lse, delta_ptr + corner_lse, hq * D,
            begin, whole_begin, key, sq, sk, window, factor, D, BLOCK_D, BLOCK_M, MASK, PRECISION,
        )  # fmt: skip
        dk, dv = _walk_queries(
            dk, dv, k, v, q_ptr + corner, do_ptr + corner, lse_ptr + corner_lse, delta_ptr + corner_lse, hq * D,
            whole_begin, whole_end, key, sq, sk, window, factor, D, BLOCK_D, BLOCK_M, "none", PRECISION,
        )  # fmt: skip
        if MASK == "window":
            dk, dv = _walk_queries(
                dk, dv, k, v, q_ptr + corner, do_ptr + corner, lse_ptr + corner_lse, delta_ptr + corner_lse, hq * D,
                whole_end, end, key, sq, sk, window, factor, D, BLOCK_D, BLOCK_M, MASK, PRECISION,
            )  # fmt: skip
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=stored)
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _query_gradient(
    dq, q, do, lse, delta_row, k, v, position, key, sk, window, factor, MASK: tl.constexpr, PRECISION: tl.constexpr
):
    """One block of keys into dQ."""
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    p = tl.exp2(scores * factor - lse[:, None])
    if MASK != "none":
        p = tl.where(visible(position[:, None], key[None, :], sk, window, MASK), p, 0.0)
    ds = (p * (dp - delta_row[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


@triton.jit
def _walk_keys(
    dq, q, do, lse, delta_row, k_ptr, v_ptr, row, begin, end, position, sk, window, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``_query_gradient`` over keys [begin, end) through pointers to one head's first row."""
    column = tl.arange(0, BLOCK_D)
    offset = tl.arange(0, BLOCK_N)
    inside = offset[:, None] * row + column[None, :]
    for start in range(begin, end, BLOCK_N):
        key = start + offset
        here = tl.cast(start, tl.int64) * row
        k, v = keys_and_values(k_ptr, v_ptr, here, inside, key, column, sk, D, BLOCK_D, MASK)
        dq = _query_gradient(dq, q, do, lse, delta_row, k, v, position, key, sk, window, factor, MASK, PRECISION)
    return dq


@triton.jit
def backward_q(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, hq, hkv, sq, sk, lse_row, window, factor, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ (B, Sq, Hq, D). Grid: tiles of queries, query heads, batch, the fastest first."""
    tiles = tl.cdiv(sq, BLOCK_M)
    index = tl.program_id(0)
    tile = index % tiles
    index = index // tiles
    head = index % hq
    entry = (index // hq).to(tl.int64)
    if MASK != "full":
        tile = tiles - 1 - tile
    first = tile * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    last = tl.minimum(first + BLOCK_M, sq) - 1
    column = tl.arange(0, BLOCK_D)
    stored = (query < sq)[:, None] & (column < D)[None, :]
    at = ((entry * sq + query) * hq + head)[:, None] * D + column[None, :]
    q = tl.load(q_ptr + at, mask=stored, other=0.0)
    do = tl.load(do_ptr + at, mask=stored, other=0.0)
    at_lse = (entry * hq + head) * lse_row + query
    lse = tl.load(lse_ptr + at_lse, mask=query < sq, other=float("inf"))
    delta_row = tl.load(delta_ptr + at_lse, mask=query < sq, other=0.0)
    corner = (entry * sk * hkv + head // (hq // hkv)) * D
    begin, whole_begin, whole_end, end = visible_blocks(first + sk - sq, last + sk - sq, sk, window, BLOCK_N, MASK)
    position = query + sk - sq
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if MASK == "window":
        dq = _walk_keys(
            dq, q, do, lse, delta_row, k_ptr + corner, v_ptr + corner, hkv * D, begin, tl.minimum(whole_begin, end),
            position, sk, window, factor, D, BLOCK_D, BLOCK_N, MASK, PRECISION,
        )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, lse, delta_row, k_ptr + corner, v_ptr + corner, hkv * D, whole_begin, whole_end,
        position, sk, window, factor, D, BLOCK_D, BLOCK_N, "none", PRECISION,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, lse, delta_row, k_ptr + corner, v_ptr + corner, hkv * D, whole_end, end,
        position, sk, window, factor, D, BLOCK_D, BLOCK_N, MASK, PRECISION,
    )  # fmt: skip
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _walk_queries_tma(
    dk, dv, k, v, q_desc, do_desc, lse_desc, delta_desc, entry, head, hq, begin, end, key, sq, sk, window, factor,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``_gradients`` over queries [begin, end) through descriptors."""
    offset = tl.arange(0, BLOCK_M)
    for start in range(begin, end, BLOCK_M):
        q = q_desc.load([entry, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        do = do_desc.load([entry, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        # Beyond the queries q, dO, log-sum-exp and delta arrive as zeros: p is 1 there, and adds 0 to dV and dK.
        lse = lse_desc.load([entry * hq + head, start]).reshape(BLOCK_M)
        delta_row = delta_desc.load([entry * hq + head, start]).reshape(BLOCK_M)
        position = start + offset + sk - sq
        dk, dv = _gradients(dk, dv, q, k, v, do, lse, delta_row, position, key, sk, window, factor, MASK, PRECISION)
    return dk, dv


@triton.jit
def backward_kv_tma(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_ptr, dv_ptr, hq, hkv, sq, sk, window, factor, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``backward_kv``; descriptors are (B, H, S, D) with boxes (1, 1, BLOCK, BLOCK_D), log-sum-exp and delta
    (B Hq, Sq) with boxes (1, BLOCK_M). What lies beyond arrives as zeros.
    """
    tiles = tl.cdiv(sk, BLOCK_N)
    index = tl.program_id(0)
    start = index % tiles * BLOCK_N
    index = index // tiles
    kv = index % hkv
    entry = index // hkv
    key = start + tl.arange(0, BLOCK_N)
    k = k_desc.load([entry, kv, start, 0]).reshape(BLOCK_N, BLOCK_D)
    v = v_desc.load([entry, kv, start, 0]).reshape(BLOCK_N, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    begin, whole_begin, whole_end, end = seeing_blocks(start, sq, sk, window, BLOCK_M, BLOCK_N, MASK)
    group = hq // hkv
    for head in range(kv * group, kv * group + group):
        dk, dv = _walk_queries_tma(
            dk, dv, k, v, q_desc, do_desc, lse_desc, delta_desc, entry, head, hq,
            begin, whole_begin, key, sq, sk, window, factor, BLOCK_D, BLOCK_M, MASK, PRECISION,
        )  # fmt: skip
        dk, dv = _walk_queries_tma(
            dk, dv, k, v, q_desc, do_desc, lse_desc, delta_desc, entry, head, hq,
            whole_begin, whole_end, key, sq, sk, window, factor, BLOCK_D, BLOCK_M, "none", PRECISION,
        )  # fmt: skip
        if MASK == "window":
            dk, dv = _walk_queries_tma(
                dk, dv, k, v, q_desc, do_desc, lse_desc, delta_desc, entry, head, hq,
                whole_end, end, key, sq, sk, window, factor, BLOCK_D, BLOCK_M, MASK, PRECISION,
            )  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    stored = (key < sk)[:, None] & (column < D)[None, :]
    at = ((entry.to(tl.int64) * sk + key) * hkv + kv)[:, None] * D + column[None, :]
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=stored)
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _walk_keys_tma(
    dq, q, do, lse, delta_row, k_desc, v_desc, entry, kv, begin, end, position, sk, window, factor,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``_query_gradient`` over keys [begin, end) through descriptors."""
    offset = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        k = k_desc.load([entry, kv, start, 0]).reshape(BLOCK_N, BLOCK_D)
        v = v_desc.load([entry, kv, start, 0]).reshape(BLOCK_N, BLOCK_D)
        dq = _query_gradient(
            dq, q, do, lse, delta_row, k, v, position, start + offset, sk, window, factor, MASK, PRECISION
        )
    return dq


@triton.jit
def backward_q_tma(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dq_ptr, hq, hkv, sq, sk, lse_row, window, factor, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``backward_q``, through descriptors as ``backward_kv_tma``."""
    tile, head, entry = queries_of_program(sq, hq, BLOCK_M, MASK)
    kv = head // (hq // hkv)
    first = tile * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    last = tl.minimum(first + BLOCK_M, sq) - 1
    q = q_desc.load([entry, head, first, 0]).reshape(BLOCK_M, BLOCK_D)
    do = do_desc.load([entry, head, first, 0]).reshape(BLOCK_M, BLOCK_D)
    at_lse = (entry.to(tl.int64) * hq + head) * lse_row + query
    lse = tl.load(lse_ptr + at_lse, mask=query < sq, other=float("inf"))
    delta_row = tl.load(delta_ptr + at_lse, mask=query < sq, other=0.0)
    begin, whole_begin, whole_end, end = visible_blocks(first + sk - sq, last + sk - sq, sk, window, BLOCK_N, MASK)
    position = query + sk - sq
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if MASK == "window":
        dq = _walk_keys_tma(
            dq, q, do, lse, delta_row, k_desc, v_desc, entry, kv, begin, tl.minimum(whole_begin, end),
            position, sk, window, factor, BLOCK_D, BLOCK_N, MASK, PRECISION,
        )  # fmt: skip
    dq = _walk_keys_tma(
        dq, q, do, lse, delta_row, k_desc, v_desc, entry, kv, whole_begin, whole_end,
        position, sk, window, factor, BLOCK_D, BLOCK_N, "none", PRECISION,
    )  # fmt: skip
    dq = _walk_keys_tma(
        dq, q, do, lse, delta_row, k_desc, v_desc, entry, kv, whole_end, end,
        position, sk, window, factor, BLOCK_D, BLOCK_N, MASK, PRECISION,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    at = ((entry.to(tl.int64) * sq + query) * hq + head)[:, None] * D + column[None, :]
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(query < sq)[:, None] & (column < D)[None, :])
