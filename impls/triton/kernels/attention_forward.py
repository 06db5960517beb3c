"""Attention forward in Triton: one pass over the keys with an online softmax (Dao, FlashAttention-2, 2023).

Owns the kernels that read K and V through pointers (``forward``: cp.async on NVIDIA GPUs; whole or a share of the keys)
and through tensor descriptors (``forward_tma``: TMA), and which blocks of keys a tile of queries sees
(``visible_blocks``, which the backward pass shares). It does not own tile sizes, nor how shares of the keys are put
together (``attention_decode``).

Scores stay as the product gives them; scale and log2(e) are folded into one factor of the exponent of 2. Blocks that no
mask cuts go through a loop without mask; those before (window) and after (diagonal, end of the keys) through one with.
Rows of a tile are the queries of one head, or of ``PACK`` heads that share a key head, interleaved.
"""

import triton
import triton.language as tl

# Below every score, and finite: exp2(-inf - LOWEST) is 0 for a row that has not seen a key yet.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def visible_blocks(first, last, sk, window, BLOCK_N: tl.constexpr, MASK: tl.constexpr):
    """Keys seen by queries at positions ``first`` to ``last``: begin, whole_begin, whole_end, end, in whole blocks.

    A query's position is that of its last visible key under a causal mask. Blocks in [whole_begin, whole_end) are seen
    as a whole by every query, those before and after in part. ``end`` alone may lie within a block.
    """
    begin = 0
    whole_begin = 0
    if MASK == "full":
        end = sk
        whole_end = sk // BLOCK_N * BLOCK_N
    else:
        end = tl.minimum(last + 1, sk)
        whole_end = tl.minimum(first + 1, sk) // BLOCK_N * BLOCK_N
        if MASK == "window":
            begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
            whole_begin = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
            whole_end = tl.maximum(whole_begin, whole_end)
    return begin, whole_begin, whole_end, end


@triton.jit
def visible(position, key, sk, window, MASK: tl.constexpr):
    """Which keys (a row) queries at these positions (a column) see."""
    seen = key < sk
    if MASK != "full":
        seen = seen & (key <= position)
    if MASK == "window":
        seen = seen & (key > position - window)
    return seen


@triton.jit
def queries_of_program(sq, hq, BLOCK_M: tl.constexpr, MASK: tl.constexpr):
    """Tile of queries, head and batch entry. Grid: tiles of queries, heads, batch, the fastest first."""
    tiles = tl.cdiv(sq, BLOCK_M)
    index = tl.program_id(0)
    tile = index % tiles
    index = index // tiles
    head = index % hq
    entry = index // hq
    if MASK != "full":
        tile = tiles - 1 - tile  # the longest first: the last wave is then of short ones
    return tile, head, entry


@triton.jit
def keys_and_values(
    k_ptr, v_ptr, here, inside, key, column, sk, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr
):
    """A block of K and V, ``here`` + ``inside`` elements away; zeros beyond the keys, which only a mask meets."""
    if MASK != "none" or D != BLOCK_D:
        there = (key < sk)[:, None] & (column < D)[None, :]
        k = tl.load(k_ptr + here + inside, mask=there, other=0.0)
        v = tl.load(v_ptr + here + inside, mask=there, other=0.0)
    else:
        k = tl.load(k_ptr + here + inside)
        v = tl.load(v_ptr + here + inside)
    return k, v


@triton.jit
def _absorb(acc, total, top, scores, v, position, key, sk, window, factor, MASK: tl.constexpr, PRECISION: tl.constexpr):
    """One block of keys into the running sums; ``MASK`` is ``none`` where every query sees all of it."""
    if MASK != "none":
        scores = tl.where(visible(position[:, None], key[None, :], sk, window, MASK), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    p = tl.exp2(scores * factor - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new_top


@triton.jit
def _walk(
    acc, total, top, q, k_ptr, v_ptr, row, begin, end, position, sk, window, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``_absorb`` over keys [begin, end), K and V by pointers to one head's first row; ``row`` is a row's stride."""
    column = tl.arange(0, BLOCK_D)
    offset = tl.arange(0, BLOCK_N)
    inside = offset[:, None] * row + column[None, :]
    for start in range(begin, end, BLOCK_N):
        key = start + offset
        here = tl.cast(start, tl.int64) * row
        k, v = keys_and_values(k_ptr, v_ptr, here, inside, key, column, sk, D, BLOCK_D, MASK)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        acc, total, top = _absorb(acc, total, top, scores, v, position, key, sk, window, factor, MASK, PRECISION)
    return acc, total, top


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, batch, hq, hkv, sq, sk, lse_row, window, factor, share,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACK: tl.constexpr,
    MASK: tl.constexpr, SPLIT: tl.constexpr, KEEP_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O (B, Sq, Hq, D) and, with KEEP_LSE, the log2 of the sums of 2^(score factor) (B, Hq, lse_row), f32.

    Grid: tiles of PACK Sq rows, heads / PACK, batch, and shares of the keys, in this order from the fastest, along one
    axis. With SPLIT a program takes keys [share n, share (n + 1)), ``share`` a multiple of BLOCK_N, and O (in the
    output's dtype, f32) and log-sum-exp have a leading axis of shares; else ``share`` is not looked at.
    """
    tiles = tl.cdiv(sq * PACK, BLOCK_M)
    heads = hq // PACK
    index = tl.program_id(0)
    tile = index % tiles
    index = index // tiles
    head = index % heads * PACK
    index = index // heads
    entry = (index % batch).to(tl.int64)
    part = index // batch
    entries = (index - index % batch).to(tl.int64)  # of the shares before
    if MASK != "full":
        tile = tiles - 1 - tile  # the longest first: the last wave is then of short ones

    line = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = line // PACK
    in_pack = line % PACK
    column = tl.arange(0, BLOCK_D)
    first = tile * BLOCK_M // PACK
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // PACK, sq - 1)
    stored = (query < sq)[:, None] & (column < D)[None, :]
    at = (query.to(tl.int64) * hq + in_pack)[:, None] * D + column[None, :]
    corner = (entry * sq * hq + head) * D
    q = tl.load(q_ptr + corner + at, mask=stored, other=0.0)

    corner_kv = (entry * sk * hkv + head // (hq // hkv)) * D
    begin, whole_begin, whole_end, end = visible_blocks(first + sk - sq, last + sk - sq, sk, window, BLOCK_N, MASK)
    if SPLIT:
        low = part * share
        high = low + share
        begin = tl.minimum(tl.maximum(begin, low), high)
        whole_begin = tl.minimum(tl.maximum(whole_begin, low), high)
        whole_end = tl.minimum(tl.maximum(whole_end, low), high)
        end = tl.minimum(tl.maximum(end, low), high)

    position = query + sk - sq
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    if MASK == "window":
        acc, total, top = _walk(
            acc, total, top, q, k_ptr + corner_kv, v_ptr + corner_kv, hkv * D, begin, tl.minimum(whole_begin, end),
            position, sk, window, factor, D, BLOCK_D, BLOCK_N, MASK, PRECISION,
        )  # fmt: skip
    acc, total, top = _walk(
        acc, total, top, q, k_ptr + corner_kv, v_ptr + corner_kv, hkv * D, whole_begin, whole_end,
        position, sk, window, factor, D, BLOCK_D, BLOCK_N, "none", PRECISION,
    )  # fmt: skip
    acc, total, top = _walk(
        acc, total, top, q, k_ptr + corner_kv, v_ptr + corner_kv, hkv * D, whole_end, end,
        position, sk, window, factor, D, BLOCK_D, BLOCK_N, MASK, PRECISION,
    )  # fmt: skip

    if SPLIT:
        total = tl.where(total == 0.0, 1.0, total)  # no key of this share is seen: O is 0 and its weight 2^LOWEST
        o_ptr += entries * sq * hq * D
        lse_ptr += entries * lse_row * hq
    o = acc / total[:, None]
    tl.store(o_ptr + corner + at, o.to(o_ptr.dtype.element_ty), mask=stored)
    if KEEP_LSE:
        at_lse = (entry * hq + head + in_pack) * lse_row + query
        tl.store(lse_ptr + at_lse, top + tl.log2(total), mask=query < sq)


@triton.jit
def _walk_tma(
    acc, total, top, q, k_desc, v_desc, entry, head, begin, end, position, sk, window, factor,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``_absorb`` over keys [begin, end), K and V through descriptors."""
    offset = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        k = k_desc.load([entry, head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        v = v_desc.load([entry, head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        key = start + offset
        acc, total, top = _absorb(acc, total, top, scores, v, position, key, sk, window, factor, MASK, PRECISION)
    return acc, total, top


@triton.jit
def forward_tma(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, hq, hkv, sq, sk, lse_row, window, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, KEEP_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``forward``, without shares and packing; descriptors are (B, H, S, D) with boxes (1, 1, BLOCK, BLOCK_D).

    What lies beyond the keys or beyond D arrives as zeros. Grid: tiles of queries, heads, batch.
    """
    tile, head, entry = queries_of_program(sq, hq, BLOCK_M, MASK)
    kv = head // (hq // hkv)
    first = tile * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    last = tl.minimum(first + BLOCK_M, sq) - 1
    position = query + sk - sq
    q = q_desc.load([entry, head, first, 0]).reshape(BLOCK_M, BLOCK_D)
    begin, whole_begin, whole_end, end = visible_blocks(first + sk - sq, last + sk - sq, sk, window, BLOCK_N, MASK)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    if MASK == "window":
        acc, total, top = _walk_tma(
            acc, total, top, q, k_desc, v_desc, entry, kv, begin, tl.minimum(whole_begin, end),
            position, sk, window, factor, BLOCK_D, BLOCK_N, MASK, PRECISION,
        )  # fmt: skip
    acc, total, top = _walk_tma(
        acc, total, top, q, k_desc, v_desc, entry, kv, whole_begin, whole_end,
        position, sk, window, factor, BLOCK_D, BLOCK_N, "none", PRECISION,
    )  # fmt: skip
    acc, total, top = _walk_tma(
        acc, total, top, q, k_desc, v_desc, entry, kv, whole_end, end,
        position, sk, window, factor, BLOCK_D, BLOCK_N, MASK, PRECISION,
    )  # fmt: skip

    o = acc / total[:, None]
    column = tl.arange(0, BLOCK_D)
    at = ((entry.to(tl.int64) * sq + query) * hq + head)[:, None] * D + column[None, :]
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=(query < sq)[:, None] & (column < D)[None, :])
    if KEEP_LSE:
        tl.store(lse_ptr + (entry.to(tl.int64) * hq + head) * lse_row + query, top + tl.log2(total), mask=query < sq)
