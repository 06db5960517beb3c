"""GEMM in Gluon for Hopper: persistent, warp specialised, TMA and wgmma by hand.

Owns the kernel and what its launch needs (descriptors, layouts, grid). It does not own which cases it takes nor which
configuration a case gets.

One CTA per SM walks over C's tiles. A producer warp fills a ring of shared-memory stages through TMA; two consumer
warpgroups each multiply half of the tile's rows by all of its columns with wgmma, one product in flight. They are
separate partitions and share nothing but the ring, so that they drift apart: one writes its half of C through shared
memory and a TMA store while the other still multiplies, and the producer has already begun on the next tile. Tiles go in
groups of rows, so that the tiles in flight share their operands in L2.

f8 sums are kept in the tensor core's short accumulator (fast), or every stage's partial sum is added to an f32
accumulator outside (promoted); the half tile then goes in two quarters, since both accumulators must fit the registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _tile(index, tiles_m, tiles_n, group: gl.constexpr):
    """Tile number -> (batch, tile row, tile column): down columns of groups of ``group`` tile rows."""
    per_batch = tiles_m * tiles_n
    batch = index // per_batch
    rest = index % per_batch
    in_group = group * tiles_n
    first = rest // in_group * group
    rows = gl.minimum(tiles_m - first, group)
    return batch, first + rest % in_group % rows, rest % in_group // rows


@gluon.jit
def _advance(stage, phase, stages: gl.constexpr):
    """The next slot of a ring, and the parity of its barrier's phase."""
    stage += 1
    wrapped = stage == stages
    return gl.where(wrapped, 0, stage), phase ^ wrapped.to(gl.int32)


@gluon.jit
def _producer(
    a_desc, b_desc, c_desc, ring_a, ring_b, full, empty, staging, bias, residual, m, n, k,
    a_t: gl.constexpr, b_t: gl.constexpr, bm: gl.constexpr, bn: gl.constexpr, bk: gl.constexpr,
    group: gl.constexpr, stages: gl.constexpr, epilogue: gl.constexpr, promoted: gl.constexpr, batch: gl.constexpr,
):
    """Fills the ring: for every tile, for every step along K, one box of A and one of B."""
    tiles_m = gl.cdiv(m, bm)
    tiles_n = gl.cdiv(n, bn)
    steps = gl.cdiv(k, bk)
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), batch * tiles_m * tiles_n, gl.num_programs(0)):
        b, tile_m, tile_n = _tile(index, tiles_m, tiles_n, group)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            if a_t:
                tma.async_copy_global_to_shared(a_desc, [b * k + step * bk, tile_m * bm], ready, ring_a.index(stage))
            else:
                tma.async_copy_global_to_shared(a_desc, [b * m + tile_m * bm, step * bk], ready, ring_a.index(stage))
            if b_t:
                tma.async_copy_global_to_shared(b_desc, [b * n + tile_n * bn, step * bk], ready, ring_b.index(stage))
            else:
                tma.async_copy_global_to_shared(b_desc, [b * k + step * bk, tile_n * bn], ready, ring_b.index(stage))
            stage, phase = _advance(stage, phase, stages)


@gluon.jit
def _operands(ring_a, ring_b, stage, who: gl.constexpr, a_t: gl.constexpr, b_t: gl.constexpr):
    """Views of one stage as wgmma takes them: this consumer's 64 rows of A as (64, K), B as (K, N)."""
    a = ring_a.index(stage)
    b = ring_b.index(stage)
    if a_t:
        a = a.slice(64 * who, 64, dim=1).permute((1, 0))
    else:
        a = a.slice(64 * who, 64, dim=0)
    if b_t:
        b = b.permute((1, 0))
    return a, b


@gluon.jit
def _halves(x, layout: gl.constexpr):
    """The left and right half of a tile's columns; no data moves between threads."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1] // 2
    left, right = x.reshape([rows, 2, columns]).permute(0, 2, 1).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _finish(acc, column, row, bias, residual, m, n, epilogue: gl.constexpr, layout: gl.constexpr, out: gl.constexpr):
    """The epilogue of a part of C whose first element is (row, column); bias and residual are in C's dtype."""
    if epilogue == "bias" or epilogue == "bias+relu" or epilogue == "bias+gelu":
        columns = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
        addend = gl.load(bias + columns, mask=columns < n, other=0.0).to(gl.float32)
        acc = acc + gl.expand_dims(addend, 0)
    if epilogue == "bias+relu":
        acc = gl.maximum(acc, 0.0)
    if epilogue == "bias+gelu":
        # The tanh form: sqrt(2 / pi) (x + 0.044715 x^3). One instruction gives 11 bits of tanh, enough for 16-bit
        # outputs; f32 outputs take 1 - 2 / (1 + exp(2 u)).
        inner = acc * (0.7978845608028654 + 0.035677408136300125 * acc * acc)
        if out.primitive_bitwidth == 16:
            acc = 0.5 * acc * (1.0 + _tanh(inner))
        else:
            acc = acc - acc / (1.0 + gl.exp2(2.8853900817779268 * inner))
    if epilogue == "residual":
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
        inside = gl.expand_dims(rows < m, 1) & gl.expand_dims(columns < n, 0)
        at = gl.expand_dims(rows.to(gl.int64) * n, 1) + gl.expand_dims(columns, 0)
        acc = acc + gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
    return acc


@gluon.jit
def _store(acc, c_desc, staging, row, column, bias, residual, m, n, epilogue: gl.constexpr, layout: gl.constexpr):
    """Finish a part of C, and write it through the consumer's staging buffer."""
    done = _finish(acc, column, row, bias, residual, m, n, epilogue, layout, c_desc.dtype).to(c_desc.dtype)
    tma.store_wait(0)  # the buffer's former contents have been read
    staging.store(done)
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, column], staging)


@gluon.jit
def _consumer(
    who: gl.constexpr, a_desc, b_desc, c_desc, ring_a, ring_b, full, empty, staging, bias, residual, m, n, k,
    a_t: gl.constexpr, b_t: gl.constexpr, bm: gl.constexpr, bn: gl.constexpr, bk: gl.constexpr,
    group: gl.constexpr, stages: gl.constexpr, epilogue: gl.constexpr, promoted: gl.constexpr, batch: gl.constexpr,
):
    """Multiplies rows 64 who .. 64 who + 63 of every tile, and writes them."""
    instruction_k: gl.constexpr = 256 // a_desc.dtype.primitive_bitwidth
    half: gl.constexpr = bn // 2
    whole_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, bn, instruction_k])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, half, instruction_k])
    part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c_desc.block_shape[1], instruction_k])
    tiles_m = gl.cdiv(m, bm)
    tiles_n = gl.cdiv(n, bn)
    steps = gl.cdiv(k, bk)
    buffer = staging.index(who)
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), batch * tiles_m * tiles_n, gl.num_programs(0)):
        b_index, tile_m, tile_n = _tile(index, tiles_m, tiles_n, group)
        if promoted:
            left = gl.zeros([64, half], gl.float32, half_layout)
            right = gl.zeros([64, half], gl.float32, half_layout)
            nothing = gl.zeros([64, half], gl.float32, half_layout)
            for step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                a, b = _operands(ring_a, ring_b, stage, who, a_t, b_t)
                part = warpgroup_mma(a, b.slice(0, half, dim=1), nothing, use_acc=False, is_async=True)
                left += warpgroup_mma_wait(0, deps=(part,))
                part = warpgroup_mma(a, b.slice(half, half, dim=1), nothing, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage), count=1)
                right += part
                stage, phase = _advance(stage, phase, stages)
        else:
            acc = gl.zeros([64, bn], gl.float32, whole_layout)
            before = 0
            for step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                a, b = _operands(ring_a, ring_b, stage, who, a_t, b_t)
                acc = warpgroup_mma(a, b, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
                before = stage
                stage, phase = _advance(stage, phase, stages)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            left, right = _halves(acc, half_layout)
        row = b_index * m + tile_m * bm + 64 * who
        column = tile_n * bn
        width: gl.constexpr = c_desc.block_shape[1]
        if width == half:
            _store(left, c_desc, buffer, row, column, bias, residual, batch * m, n, epilogue, part_layout)
            _store(right, c_desc, buffer, row, column + half, bias, residual, batch * m, n, epilogue, part_layout)
        else:
            first, second = _halves(left, part_layout)
            _store(first, c_desc, buffer, row, column, bias, residual, batch * m, n, epilogue, part_layout)
            _store(second, c_desc, buffer, row, column + width, bias, residual, batch * m, n, epilogue, part_layout)
            first, second = _halves(right, part_layout)
            _store(first, c_desc, buffer, row, column + half, bias, residual, batch * m, n, epilogue, part_layout)
            _store(
                second, c_desc, buffer, row, column + half + width, bias, residual, batch * m, n, epilogue, part_layout
            )
    tma.store_wait(0)


@gluon.jit
def gemm(
    a_desc, b_desc, c_desc, bias, residual, m, n, k,
    a_t: gl.constexpr, b_t: gl.constexpr, bm: gl.constexpr, bn: gl.constexpr, bk: gl.constexpr,
    group: gl.constexpr, stages: gl.constexpr, epilogue: gl.constexpr, promoted: gl.constexpr, batch: gl.constexpr,
):
    """C = epilogue(A B), C of (batch m, n). A and B as stored: (batch m, k) or (batch k, m), (batch k, n) or (batch n, k)."""
    ring_a = gl.allocate_shared_memory(a_desc.dtype, [stages] + a_desc.block_shape, a_desc.layout)
    ring_b = gl.allocate_shared_memory(b_desc.dtype, [stages] + b_desc.block_shape, b_desc.layout)
    staging = gl.allocate_shared_memory(c_desc.dtype, [2] + c_desc.block_shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    shared = (a_desc, b_desc, c_desc, ring_a, ring_b, full, empty, staging, bias, residual, m, n, k,
              a_t, b_t, bm, bn, bk, group, stages, epilogue, promoted, batch)  # fmt: skip
    gl.warp_specialize(
        [(_consumer0, shared), (_consumer1, shared), (_producer, shared)],
        [4, 1],
        [240, 24],
    )
