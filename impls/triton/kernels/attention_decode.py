"""Attention over shares of the keys, put together: few queries, many keys (Dao et al., Flash-Decoding, 2023).

Owns the reduction over shares. A share's O and log-sum-exp come from ``attention_forward.forward`` with SPLIT.
"""

import triton
import triton.language as tl

from impls.triton.kernels.attention_forward import LOWEST


@triton.jit
def combine(
    part_ptr, lse_ptr, o_ptr, rows, hq, sq, shares,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SHARES: tl.constexpr,
):  # fmt: skip
    """O (B, Sq, Hq, D) from f32 parts (shares, B, Sq, Hq, D) and their log2-sum-exp (shares, B, Hq, Sq).

    Grid: the ``rows`` = B Sq Hq rows of O. Shares are taken BLOCK_SHARES at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    head = row % hq
    query = row // hq % sq
    entry = row // (hq * sq)
    column = tl.arange(0, BLOCK_D)
    wanted = (column < D)[None, :]
    number = tl.arange(0, BLOCK_SHARES)
    at_lse = (entry * hq + head) * sq + query

    top = tl.full([], LOWEST, tl.float32)
    for start in range(0, shares, BLOCK_SHARES):
        there = start + number < shares
        lse = tl.load(lse_ptr + (start + number).to(tl.int64) * rows + at_lse, mask=there, other=LOWEST)
        top = tl.maximum(top, tl.max(lse, 0))
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, shares, BLOCK_SHARES):
        share = (start + number).to(tl.int64)
        there = share < shares
        weight = tl.exp2(tl.load(lse_ptr + share * rows + at_lse, mask=there, other=float("-inf")) - top)
        part = tl.load(
            part_ptr + (share * rows + row)[:, None] * D + column[None, :], mask=there[:, None] & wanted, other=0.0
        )
        acc += tl.sum(part * weight[:, None], 0)
        total += tl.sum(weight, 0)
    tl.store(o_ptr + row * D + column, (acc / total).to(o_ptr.dtype.element_ty), mask=column < D)
