"""Attention forward in Gluon for Hopper: persistent, warp specialised, TMA and wgmma by hand.

Owns the kernel and what its launch needs. It does not own which cases it takes nor which configuration a case gets.

The algorithm is FlashAttention-3's (Shah et al., 2024): a producer warp loads Q tiles and two rings of K and V blocks
through TMA; each of two consumer warpgroups holds 64 query rows and walks over their keys from right to left,
so that masked blocks come first. In each step it starts the scores of the next block and the product of the last one's
probabilities with V together, and exponentiates the scores while that product runs. Probabilities stay in registers.
Exponentials are powers of two with the scale folded in; rows are rescaled as the running maximum grows, and divided by
their sum once, at the end. While one consumer exponentiates, the other's products run; to make them take turns
(ping-pong) won nothing, nor did a third consumer at head size 64.

Every CTA follows a plan made beforehand (``impls.triton.schedule``), so that all of them have as many blocks to do.
"""

# Kernel code is compiled, not run, by a language without starred lists; its tuples stand for structures and are
# unpacked by all their names.
# ruff: noqa: RUF005, RUF059

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from impls.triton import schedule
from impls.triton.gluon_tiles import Blocking, padded_head
from impls.triton.kernels.program import Launch, multiprocessors
from impls.workloads.attention import Attention

# Query rows of a consumer, which are wgmma's M, and of a tile.
ROWS = gl.constexpr(64)
TILE = gl.constexpr(128)
# Masks, by the number that the kernel is specialised with.
MASKS = ("full", "causal", "window")
FULL = gl.constexpr(MASKS.index("full"))
CAUSAL = gl.constexpr(MASKS.index("causal"))
WINDOW = gl.constexpr(MASKS.index("window"))


@gluon.jit
def _entry(schedule, turn):
    """What the schedule has for this CTA in its ``turn``: a tile's number, or -1 when it is done."""
    return gl.load(schedule + turn * gl.num_programs(0) + gl.program_id(0))


@gluon.jit
def _tile(entry, sizes):
    """Tile number -> (batch entry, head, first row)."""
    batch, sq, sk, hq, group, window, turns = sizes
    rows = gl.cdiv(sq, TILE)
    head = entry // rows
    return head // hq, head % hq, entry % rows * TILE


@gluon.jit
def _blocks(row, sizes, block: gl.constexpr, mask: gl.constexpr):
    """Key blocks of a tile: (how many, the last plus one, how many of them, from the right, need a mask)."""
    batch, sq, sk, hq, group, window, turns = sizes
    if mask == FULL:
        end = gl.cdiv(sk, block)
        return end, end, end - sk // block
    seen = gl.minimum(sk, row + 1 + sk - sq)  # keys up to the last that the tile's first row sees
    end = gl.cdiv(gl.minimum(sk, row + TILE + sk - sq), block)
    if mask == CAUSAL:
        return end, end, end - seen // block
    first = gl.maximum(seen - window, 0) // block
    return end - first, end, end - first


@gluon.jit
def _producer(descs, buffers, bars, schedule, sizes, mask: gl.constexpr):
    """Loads Q of every tile, and its blocks of K and V in the order in which consumers want them."""
    q_desc, k_desc, v_desc, o_desc = descs
    q_ring, k_ring, v_ring, o_ring = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    batches, sq, sk, hq, group, window, turns = sizes
    stages: gl.constexpr = k_ring.shape[0]
    block: gl.constexpr = k_ring.shape[2]
    done = 0  # blocks of all tiles before
    entry = _entry(schedule, 0)
    for turn in range(turns):
        following = _entry(schedule, turn + 1)
        if entry >= 0:
            batch, head, row = _tile(entry, sizes)
            blocks, end, masked = _blocks(row, sizes, block, mask)
            for who in gl.static_range(2):
                mbarrier.wait(q_empty.index(who), (turn & 1) ^ 1)
                mbarrier.expect(q_full.index(who), q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q_desc, [batch, row + who * ROWS, head, 0], q_full.index(who), q_ring.index(who)
                )
            # K of every block, and V of the block before it.
            for back in range(blocks + 1):
                if back < blocks:
                    count = done + back
                    slot = count % stages
                    mbarrier.wait(k_empty.index(slot), (count // stages & 1) ^ 1)
                    mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
                    key = (end - 1 - back) * block
                    tma.async_copy_global_to_shared(
                        k_desc, [batch, key, head // group, 0], k_full.index(slot), k_ring.index(slot)
                    )
                if back > 0:
                    count = done + back - 1
                    slot = count % stages
                    mbarrier.wait(v_empty.index(slot), (count // stages & 1) ^ 1)
                    mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
                    key = (end - back) * block
                    tma.async_copy_global_to_shared(
                        v_desc, [batch, key, head // group, 0], v_full.index(slot), v_ring.index(slot)
                    )
            done += blocks
        entry = following


@gluon.jit
def _masked(s, row, key, sizes, mask: gl.constexpr, layout: gl.constexpr):
    """Scores of rows from ``row`` on with keys from ``key`` on, minus infinity where a row does not see a key."""
    batch, sq, sk, hq, group, window, turns = sizes
    keys = key + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    if mask == FULL:
        visible = gl.expand_dims(keys < sk, 0)
    else:
        # The rows below Sq see the last key at most.
        last = row + sk - sq + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout))
        last = gl.expand_dims(gl.minimum(last, sk - 1), 1)
        visible = gl.expand_dims(keys, 0) <= last
        if mask == WINDOW:
            visible = visible & (gl.expand_dims(keys, 0) > last - window)
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _softmax(s, top, scale, careful: gl.constexpr):
    """Probabilities under the new running maximum: (p, the maximum, what older sums are multiplied by).

    ``careful`` where a row may not have seen any key yet: its maximum is minus infinity then.
    """
    new = gl.maximum(top, gl.max(s, axis=1))
    base = new * scale
    if careful:
        base = gl.where(new == float("-inf"), 0.0, base)
    p = gl.exp2(s * scale - gl.expand_dims(base, 1))
    return p, new, gl.exp2(top * scale - base)


@gluon.jit
def _pin(total):
    """``total``, before anything that follows: ptxas would otherwise sink the exponentials below the next wait.

    A barrier of a warp with itself, whose mask (all lanes, since sums of probabilities are not negative) hangs on the
    value.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 m; shr.u32 m, $1, 31; sub.u32 m, 0xffffffff, m; bar.warp.sync m; mov.b32 $0, $1; }",
        "=r,r",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _per_row(x, layout: gl.constexpr):
    """One value a row, as a column beside a tile of ``layout``; no data moves between threads."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def _step(
    state, q, count, row, key, buffers, bars, sizes, scale,
    who: gl.constexpr, mask: gl.constexpr, masked: gl.constexpr,
):  # fmt: skip
    """Scores of block ``count`` of all, and the product with V of the block before."""
    o, p, total, top = state
    q_ring, k_ring, v_ring, o_ring = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    stages: gl.constexpr = k_ring.shape[0]
    block: gl.constexpr = k_ring.shape[2]
    d: gl.constexpr = k_ring.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block, 16])
    o_layout: gl.constexpr = o.type.layout
    k_slot = count % stages
    v_slot = (count - 1) % stages
    mbarrier.wait(k_full.index(k_slot), count // stages & 1)
    nothing = gl.zeros([ROWS, block], gl.float32, s_layout)
    k = k_ring.index(k_slot).reshape([block, d]).permute((1, 0))
    s = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_slot), (count - 1) // stages & 1)
    o = warpgroup_mma(p, v_ring.index(v_slot).reshape([block, d]), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(k_slot), count=1)
    if masked:
        s = _masked(s, row, key, sizes, mask, s_layout)
    values, top, shrink = _softmax(s, top, scale, masked)
    total = _pin(total * shrink + gl.sum(values, axis=1))
    new = gl.convert_layout(values.to(q.dtype), p.type.layout)
    o, p, new = warpgroup_mma_wait(0, deps=(o, p, new))
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    return o * _per_row(shrink, o_layout), new, total, top


@gluon.jit
def _consumer(
    descs, buffers, bars, schedule, sizes, scale, who: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """Attention of half of every tile's rows."""
    q_desc, k_desc, v_desc, o_desc = descs
    q_ring, k_ring, v_ring, o_ring = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    stages: gl.constexpr = k_ring.shape[0]
    block: gl.constexpr = k_ring.shape[2]
    d: gl.constexpr = k_ring.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, d, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q = q_ring.index(who).reshape([ROWS, d])
    # At head size 256 there is no room for a buffer of O's own.
    own: gl.constexpr = d < 256
    staging = o_ring.index(who) if own else q_ring.index(who)
    count = 0  # blocks, of all tiles
    batches, sq, sk, hq, group, window, turns = sizes
    entry = _entry(schedule, 0)
    for turn in range(turns):
        following = _entry(schedule, turn + 1)
        if entry >= 0:
            batch, head, tile_row = _tile(entry, sizes)
            blocks, end, masked = _blocks(tile_row, sizes, block, mask)
            row = tile_row + who * ROWS
            mbarrier.wait(q_full.index(who), turn & 1)
            slot = count % stages
            mbarrier.wait(k_full.index(slot), count // stages & 1)
            nothing = gl.zeros([ROWS, block], gl.float32, s_layout)
            k = k_ring.index(slot).reshape([block, d]).permute((1, 0))
            s = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            s = _masked(s, row, (end - 1) * block, sizes, mask, s_layout)
            start = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
            values, top, shrink = _softmax(s, start, scale, True)
            total = gl.sum(values, axis=1)
            p = gl.convert_layout(values.to(q.dtype), p_layout)
            o = gl.zeros([ROWS, d], gl.float32, o_layout)
            count += 1
            careful = gl.minimum(gl.maximum(masked, 1), blocks)
            for back in range(1, careful):
                key = (end - 1 - back) * block
                o, p, total, top = _step(
                    (o, p, total, top), q, count, row, key, buffers, bars, sizes, scale,
                    who, mask, True,
                )  # fmt: skip
                count += 1
            for back in range(careful, blocks):
                key = (end - 1 - back) * block
                o, p, total, top = _step(
                    (o, p, total, top), q, count, row, key, buffers, bars, sizes, scale,
                    who, mask, False,
                )  # fmt: skip
                count += 1
            if own:
                mbarrier.arrive(q_empty.index(who), count=1)
            slot = (count - 1) % stages
            mbarrier.wait(v_full.index(slot), (count - 1) // stages & 1)
            o = warpgroup_mma(p, v_ring.index(slot).reshape([block, d]), o, is_async=True)
            o, p = warpgroup_mma_wait(0, deps=(o, p))
            mbarrier.arrive(v_empty.index(slot), count=1)
            result = (o * _per_row(1.0 / total, o_layout)).to(q.dtype)
            tma.store_wait(0)  # the last tile's rows have been read
            staging.reshape([ROWS, d]).store(result)
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [batch, row, head, 0], staging)
            if not own:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(who), count=1)
        entry = following
    tma.store_wait(0)


@gluon.jit
def attention(
    q_desc, k_desc, v_desc, o_desc, schedule, batch, sq, sk, hq, group, window, turns, scale,
    stages: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """O = softmax(Q K^T / sqrt(d)) V; tensors are (batch, rows, heads, d). ``scale`` is log2(e) / sqrt(d)."""
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_shape, q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [stages] + k_desc.block_shape, k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [stages] + v_desc.block_shape, v_desc.layout)
    if o_desc.block_shape[3] < 256:
        o_ring = gl.allocate_shared_memory(o_desc.dtype, [2] + o_desc.block_shape, o_desc.layout)
    else:
        o_ring = q_ring
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    k_full = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    for who in gl.static_range(2):
        mbarrier.init(q_full.index(who), count=1)
        mbarrier.init(q_empty.index(who), count=1)
    for slot in gl.static_range(stages):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=2)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, o_desc)
    buffers = (q_ring, k_ring, v_ring, o_ring)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (batch, sq, sk, hq, group, window, turns)
    gl.warp_specialize(
        [
            (_consumer, (descs, buffers, bars, schedule, sizes, scale, 0, mask)),
            (_consumer, (descs, buffers, bars, schedule, sizes, scale, 1, mask)),
            (_producer, (descs, buffers, bars, schedule, sizes, mask)),
        ],
        [4, 1],
        [240, 24],
    )


def launch(case: Attention, tensors: Mapping[str, torch.Tensor], blocking: Blocking) -> Launch:
    """The kernel over a case's tensors, with one CTA per SM or per tile, whichever are fewer."""
    kind = gl.bfloat16 if case.dtype == "bf16" else gl.float16
    # TMA fills what a head has not up to the next power of two with zeros, and leaves it out when it stores.
    d = padded_head(case)

    def descriptor(name: str, rows: int) -> TensorDescriptor:
        box = [1, rows, 1, d]
        return TensorDescriptor.from_tensor(tensors[name], box, gl.NVMMASharedLayout.get_default_for(box, kind))

    tiles = case.batch * case.hq * -(-case.sq // TILE.value)
    programs = min(tiles, multiprocessors())
    plan = schedule.plan(case, TILE.value, blocking.block, blocking.section, programs)
    arguments = {
        "q_desc": descriptor("Q", ROWS.value),
        "k_desc": descriptor("K", blocking.block),
        "v_desc": descriptor("V", blocking.block),
        "o_desc": descriptor("O", ROWS.value),
        "schedule": torch.tensor(plan, dtype=torch.int32, device=tensors["O"].device),
        "batch": case.batch,
        "sq": case.sq,
        "sk": case.sk,
        "hq": case.hq,
        "group": case.group,
        "window": case.window,
        "turns": len(plan) - 1,
        "scale": math.log2(math.e) / math.sqrt(case.d),
        "stages": blocking.stages,
        "mask": MASKS.index(case.mask),
    }
    return Launch(attention, (programs,), arguments, {"num_warps": 4})
