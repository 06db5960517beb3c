"""GEMM in Gluon for Hopper: persistent, warp specialised, TMA and wgmma by hand.

Owns the kernel and what its launch needs (descriptors, layouts, grid). It does not own which cases it takes nor which
configuration a case gets.

One CTA per SM walks over C's tiles. A producer warp fills a ring of shared-memory stages through TMA; two consumer
warpgroups each multiply half of the tile's rows by all of its columns with wgmma, one product in flight. They are
separate partitions, the first ahead of the second by some steps: one rounds its half of C while the other still
multiplies, and the producer has already begun on the next tile. C of 16 bits waits in half the registers of its
accumulator and is written, through shared memory and TMA, while the next tile's first two products run. Tiles go in
groups of rows, so that the tiles in flight share their operands in L2.

f8 sums are kept in the tensor core's short accumulator (fast), or every stage's partial sum is added to an f32
accumulator outside (promoted); the half tile then goes in two quarters, since both accumulators must fit the registers.
"""

# Kernel code is compiled, not run, by a language without starred lists; its tuples stand for structures and are
# unpacked by all their names.
# ruff: noqa: RUF005, RUF059, SIM102, SIM108, SIM109

from __future__ import annotations

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

from impls.triton.gluon_tiles import Tiling
from impls.triton.kernels.program import Launch, multiprocessors
from impls.workloads.gemm import Gemm

# Rows of a tile of C: 64, which is wgmma's M, for each of two consumers.
ROWS = gl.constexpr(128)

# Epilogues, by the number that the kernel is specialised with.
EPILOGUES = ("none", "bias", "bias+relu", "bias+gelu", "residual")
BIAS = gl.constexpr(EPILOGUES.index("bias"))
RELU = gl.constexpr(EPILOGUES.index("bias+relu"))
GELU = gl.constexpr(EPILOGUES.index("bias+gelu"))
RESIDUAL = gl.constexpr(EPILOGUES.index("residual"))


@gluon.jit
def _tile(index, tiles_m, tiles_n, group):
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
def _producer(descs, rings, bars, sizes, a_t: gl.constexpr, b_t: gl.constexpr):
    """Fills the ring: for every tile, for every step along K, one box of A and one of B."""
    a_desc, b_desc, c_desc = descs
    ring_a, ring_b, staging = rings
    full, empty, ahead = bars
    batch, m, n, k, group = sizes
    stages: gl.constexpr = ring_a.shape[0]
    bk: gl.constexpr = a_desc.block_shape[0 if a_t else 1]
    bn: gl.constexpr = b_desc.block_shape[0 if b_t else 1]
    tiles_m = gl.cdiv(m, ROWS)
    tiles_n = gl.cdiv(n, bn)
    steps = gl.maximum(gl.cdiv(k, bk), 2)  # beyond K there are zeros
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), batch * tiles_m * tiles_n, gl.num_programs(0)):
        b, tile_m, tile_n = _tile(index, tiles_m, tiles_n, group)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            if a_t:
                tma.async_copy_global_to_shared(a_desc, [b * k + step * bk, tile_m * ROWS], ready, ring_a.index(stage))
            else:
                tma.async_copy_global_to_shared(a_desc, [b * m + tile_m * ROWS, step * bk], ready, ring_a.index(stage))
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
def _multiply(
    acc, place, first, last, rings, bars, who: gl.constexpr, a_t: gl.constexpr, b_t: gl.constexpr
):  # fmt: skip
    """Steps ``first`` to ``last`` of a tile; one product stays in flight, and its stage is given back a step later.

    ``place`` is (stage, parity of its phase, stage before); the new one is returned with the accumulator.
    """
    ring_a, ring_b, staging = rings
    full, empty, ahead = bars
    stage, phase, before = place
    for step in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        a, b = _operands(ring_a, ring_b, stage, who, a_t, b_t)
        acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        before = stage
        stage, phase = _advance(stage, phase, ring_a.shape[0])
    return acc, (stage, phase, before)


@gluon.jit
def _multiply_promoted(
    left, right, place, first, last, rings, bars, who: gl.constexpr, a_t: gl.constexpr, b_t: gl.constexpr
):  # fmt: skip
    """Steps of a tile, each summed by itself and then added to the accumulators of the tile's column halves."""
    ring_a, ring_b, staging = rings
    full, empty, ahead = bars
    stage, phase, before = place
    half: gl.constexpr = left.shape[1]
    # One partial sum after the other goes through the same registers: for two there is no room.
    part = gl.zeros_like(left)
    for _step in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        a, b = _operands(ring_a, ring_b, stage, who, a_t, b_t)
        part = warpgroup_mma(a, b.slice(0, half, dim=1), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        left += part
        part = warpgroup_mma(a, b.slice(half, half, dim=1), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage), count=1)
        right += part
        stage, phase = _advance(stage, phase, ring_a.shape[0])
    return left, right, (stage, phase, before)


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
    if epilogue == BIAS or epilogue == RELU or epilogue == GELU:
        columns = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
        addend = gl.load(bias + columns, mask=columns < n, other=0.0).to(gl.float32)
        acc = acc + gl.expand_dims(addend, 0)
    if epilogue == RELU:
        acc = gl.maximum(acc, 0.0)
    if epilogue == GELU:
        # The tanh form: sqrt(2 / pi) (x + 0.044715 x^3). One instruction gives 11 bits of tanh, enough for 16-bit
        # outputs; f32 outputs take 1 - 2 / (1 + exp(2 u)).
        inner = acc * (0.7978845608028654 + 0.035677408136300125 * acc * acc)
        if out.primitive_bitwidth == 16:
            acc = 0.5 * acc * (1.0 + _tanh(inner))
        else:
            acc = acc - acc / (1.0 + gl.exp2(2.8853900817779268 * inner))
    if epilogue == RESIDUAL:
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
        inside = gl.expand_dims(rows < m, 1) & gl.expand_dims(columns < n, 0)
        at = gl.expand_dims(rows.to(gl.int64) * n, 1) + gl.expand_dims(columns, 0)
        acc = acc + gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
    return acc


@gluon.jit
def _packed(x, out: gl.constexpr):
    """Two neighbouring columns, rounded to 16 bits, in a register: what waits beside the next tile's accumulator."""
    even, odd = x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
    if out == gl.bfloat16:
        round_both: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        round_both: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(round_both, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpacked(pairs, out: gl.constexpr, layout: gl.constexpr):
    """The columns again, in the accumulator's layout; no data moves between threads."""
    even, odd = pairs.to(gl.int16).to(out, bitcast=True), (pairs >> 16).to(gl.int16).to(out, bitcast=True)
    both = gl.join(even, odd).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def _store(done, c_desc, buffer, row, column):
    """Write a part of C through one of the consumer's two staging buffers."""
    tma.store_wait(1)  # what was in the buffer has been read
    buffer.store(done)
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, column], buffer)


@gluon.jit
def _store_two(pairs, part: gl.constexpr, c_desc, buffers, at, layout: gl.constexpr):
    """Write quarters ``part`` and ``part + 1`` of a tile's columns, which were packed before."""
    even, odd = buffers
    row, column = at
    first, second = pairs
    width: gl.constexpr = 2 * first.shape[1]
    _store(_unpacked(first, c_desc.dtype, layout), c_desc, even, row, column + part * width)
    _store(_unpacked(second, c_desc.dtype, layout), c_desc, odd, row, column + (part + 1) * width)


@gluon.jit
def _consumer(
    descs, rings, bars, sizes, extra, who: gl.constexpr, a_t: gl.constexpr, b_t: gl.constexpr,
    lead: gl.constexpr, epilogue: gl.constexpr, promoted: gl.constexpr,
):  # fmt: skip
    """Multiplies rows 64 who .. 64 who + 63 of every tile, and writes them."""
    a_desc, b_desc, c_desc = descs
    ring_a, ring_b, staging = rings
    full, empty, ahead = bars
    batch, m, n, k, group = sizes
    bias, residual = extra
    bk: gl.constexpr = a_desc.block_shape[0 if a_t else 1]
    bn: gl.constexpr = b_desc.block_shape[0 if b_t else 1]
    instruction_k: gl.constexpr = 256 // a_desc.dtype.primitive_bitwidth
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, bn, instruction_k])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, bn // 2, instruction_k])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, bn // 4, instruction_k])
    tiles_m = gl.cdiv(m, ROWS)
    tiles_n = gl.cdiv(n, bn)
    steps = gl.maximum(gl.cdiv(k, bk), 2)  # beyond K there are zeros
    even = staging.index(2 * who)
    odd = staging.index(2 * who + 1)
    buffers = (even, odd)
    place = (0, 0, 0)
    parity = 0
    acc = gl.zeros([64, bn], gl.float32, whole)
    # C in 16 bits waits, packed, until the next tile's first products are under way.
    defers: gl.constexpr = not promoted and c_desc.dtype.primitive_bitwidth == 16
    at = (0, 0)
    if defers:
        nothing = _packed(gl.zeros([64, bn // 4], gl.float32, quarter), c_desc.dtype)
        left_pairs = (nothing, nothing)
        right_pairs = (nothing, nothing)
    for index in range(gl.program_id(0), batch * tiles_m * tiles_n, gl.num_programs(0)):
        if lead > 0 and who == 1:
            mbarrier.wait(ahead, parity)
            parity ^= 1
        if promoted:
            b_index, tile_m, tile_n = _tile(index, tiles_m, tiles_n, group)
            left = gl.zeros([64, bn // 2], gl.float32, half)
            right = gl.zeros([64, bn // 2], gl.float32, half)
            if lead > 0 and who == 0:
                left, right, place = _multiply_promoted(left, right, place, 0, lead, rings, bars, who, a_t, b_t)
                mbarrier.arrive(ahead, count=1)
                left, right, place = _multiply_promoted(left, right, place, lead, steps, rings, bars, who, a_t, b_t)
            else:
                left, right, place = _multiply_promoted(left, right, place, 0, steps, rings, bars, who, a_t, b_t)
        else:
            acc, place = _multiply(acc, place, 0, 1, rings, bars, who, a_t, b_t)
            # Here, where a product is in flight: divisions take some hundred cycles.
            b_index, tile_m, tile_n = _tile(index, tiles_m, tiles_n, group)
            if defers:
                if index >= gl.num_programs(0):
                    _store_two(left_pairs, 0, c_desc, buffers, at, quarter)
            acc, place = _multiply(acc, place, 1, 2, rings, bars, who, a_t, b_t)
            if defers:
                if index >= gl.num_programs(0):
                    _store_two(right_pairs, 2, c_desc, buffers, at, quarter)
            if lead > 0 and who == 0:
                acc, place = _multiply(acc, place, 2, lead, rings, bars, who, a_t, b_t)
                mbarrier.arrive(ahead, count=1)
                acc, place = _multiply(acc, place, lead, steps, rings, bars, who, a_t, b_t)
            else:
                acc, place = _multiply(acc, place, 2, steps, rings, bars, who, a_t, b_t)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(place[2]), count=1)
            left, right = _halves(acc, half)
        row = b_index * m + tile_m * ROWS + 64 * who
        column = tile_n * bn
        at = (row, column)
        width: gl.constexpr = bn // 4
        first, second = _halves(left, quarter)
        third, fourth = _halves(right, quarter)
        out: gl.constexpr = c_desc.dtype
        first = _finish(first, column, row, bias, residual, batch * m, n, epilogue, quarter, out)
        second = _finish(second, column + width, row, bias, residual, batch * m, n, epilogue, quarter, out)
        if defers:
            left_pairs = (_packed(first, out), _packed(second, out))
        else:
            _store(first.to(out), c_desc, even, row, column)
            _store(second.to(out), c_desc, odd, row, column + width)
        third = _finish(third, column + 2 * width, row, bias, residual, batch * m, n, epilogue, quarter, out)
        fourth = _finish(fourth, column + 3 * width, row, bias, residual, batch * m, n, epilogue, quarter, out)
        if defers:
            right_pairs = (_packed(third, out), _packed(fourth, out))
        else:
            _store(third.to(out), c_desc, even, row, column + 2 * width)
            _store(fourth.to(out), c_desc, odd, row, column + 3 * width)
    if defers:
        _store_two(left_pairs, 0, c_desc, buffers, at, quarter)
        _store_two(right_pairs, 2, c_desc, buffers, at, quarter)
    tma.store_wait(0)


@gluon.jit
def gemm(
    a_desc, b_desc, c_desc, bias, residual, batch, m, n, k, group, a_t: gl.constexpr, b_t: gl.constexpr,
    stages: gl.constexpr, lead: gl.constexpr, epilogue: gl.constexpr, promoted: gl.constexpr,
):  # fmt: skip
    """C = epilogue(A B), a batch one on top of the other: C is (batch m, n), A and B are as they are stored."""
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    ring_a = gl.allocate_shared_memory(a_desc.dtype, [stages] + a_desc.block_shape, a_desc.layout)
    ring_b = gl.allocate_shared_memory(b_desc.dtype, [stages] + b_desc.block_shape, b_desc.layout)
    staging = gl.allocate_shared_memory(c_desc.dtype, [4] + c_desc.block_shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    ahead = gl.allocate_shared_memory(gl.int64, [1], barriers)
    mbarrier.init(ahead, count=1)
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    descs = (a_desc, b_desc, c_desc)
    rings = (ring_a, ring_b, staging)
    bars = (full, empty, ahead)
    sizes = (batch, m, n, k, group)
    extra = (bias, residual)
    gl.warp_specialize(
        [
            (_consumer, (descs, rings, bars, sizes, extra, 0, a_t, b_t, lead, epilogue, promoted)),
            (_consumer, (descs, rings, bars, sizes, extra, 1, a_t, b_t, lead, epilogue, promoted)),
            (_producer, (descs, rings, bars, sizes, a_t, b_t)),
        ],
        [4, 1],
        [240, 24],
    )


_TYPES = {"f16": gl.float16, "bf16": gl.bfloat16, "f8e4m3": gl.float8e4nv, "tf32": gl.float32, "f32": gl.float32}


def launch(case: Gemm, tensors: Mapping[str, torch.Tensor], tiling: Tiling) -> Launch:
    """The kernel over a case's tensors, with one CTA per SM or per tile, whichever are fewer."""

    def descriptor(name: str, dtype: str, box: list[int]) -> TensorDescriptor:
        rows = tensors[name].view(-1, tensors[name].shape[-1])
        return TensorDescriptor.from_tensor(rows, box, gl.NVMMASharedLayout.get_default_for(box, _TYPES[dtype]))

    a_t, b_t = (stored == "t" for stored in case.layout)
    bn, bk = tiling.bn, tiling.bk
    tiles = case.batch * -(-case.m // ROWS.value) * -(-case.n // bn)
    arguments = {
        "a_desc": descriptor("A", case.dtype, [bk, ROWS.value] if a_t else [ROWS.value, bk]),
        "b_desc": descriptor("B", case.dtype, [bn, bk] if b_t else [bk, bn]),
        "c_desc": descriptor("C", case.out, [64, bn // 4]),
        # A pointer that no epilogue of the case follows is C's.
        "bias": tensors.get("bias", tensors["C"]),
        "residual": tensors.get("residual", tensors["C"]),
        "batch": case.batch,
        "m": case.m,
        "n": case.n,
        "k": case.k,
        "group": tiling.group,
        "a_t": a_t,
        "b_t": b_t,
        "stages": tiling.stages,
        # With fewer steps than this the leader could be a whole tile ahead, which the barrier's parity cannot tell.
        "lead": max(2, tiling.lead) if tiling.lead and -(-case.k // bk) >= 2 * tiling.stages else 0,
        "epilogue": EPILOGUES.index(case.epilogue),
        "promoted": case.dtype == "f8e4m3" and case.acc == "f32",
    }
    return Launch(gemm, (min(tiles, multiprocessors()),), arguments, {"num_warps": 4})
