"""One query over many keys on Hopper in the CuTe DSL: a warpgroup that multiplies, a warp that loads, keys in shares.

The query heads that share a key head are the rows of one tile, so that K and V are read once for all of them; rows of
the tile beyond these are computed and dropped, for wgmma has no fewer than 64. The keys of a head are split into
shares, as many as fill the device (``splits``); with more than one, each leaves its unnormalised rows, their maxima and
sums in f32, and a second kernel puts them together. Blocks of keys come through rings in shared memory by TMA, as in
``cute_attention``; two such groups of threads share a multiprocessor where shared memory allows, so that one computes
while the other waits for memory.

Owns both kernels and the host functions that launch them. Sizes are arguments; annotations are read when the DSL
traces. It imports the DSL.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from impls.cutlass.cute_attention import ROWS, DecodeTiles
from impls.cutlass.kernels import cute_attention_operands as operands
from impls.cutlass.kernels import cute_attention_softmax as row_wise
from impls.cutlass.kernels import cute_tma as tma
from impls.cutlass.kernels.cute_tma import WARP, WARPGROUP

# Threads of a CTA of the second kernel.
_COMBINING = 512


class Decode:
    """The kernels for one dtype, padded head size, mask, choice of tiles, and with or without a second kernel."""

    def __init__(self, tiles: DecodeTiles):
        self.tiles = tiles
        self.dtype = tma.DTYPES[tiles.dtype]
        # Threads of the second kernel that go through the shares of the same two columns in turns.
        self.takers = _COMBINING // (tiles.head // 2)

    def examples(self):
        """Arguments to trace with, but for the stream."""
        kinds = [self.dtype] * 4 + [Float32]
        return [*tma.pointers(kinds), *[Int32(1)] * 7, Float32(1.0)]

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        parts: cute.Pointer,
        batch: Int32,
        sk: Int32,
        hq: Int32,
        hkv: Int32,
        d: Int32,
        window: Int32,
        splits: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launches O = softmax(q K^T / sqrt(d)) V for q and O (batch, 1, hq, d), K and V (batch, sk, hkv, d).

        Args:
            parts: for the second kernel splits * batch * hq * (d + 2) of f32: rows, then (maximum, sum) pairs.
            window: keys that are seen; not read without a window.
            splits: shares of the keys, at most as many as there are blocks; 1 where there is no second kernel.
            scale: log2(e) / sqrt(d).
        """
        t = self.tiles
        d8 = cute.assume(d, divby=8)
        queries = cute.make_layout((hq, d8, batch), stride=(d8, 1, hq * d8))
        keys = operands.by_heads(sk, hkv, d8, batch)
        mq, mk, mv = (cute.make_tensor(x, y) for x, y in ((q, queries), (k, keys), (v, operands.turned(keys))))
        mma_qk, mma_pv, q_layout, k_layout, v_layout = operands.products(self.dtype, t, 1)
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_q, mq = cpasync.make_tiled_tma_atom(load, mq, q_layout, (ROWS, t.head))
        load_k, mk = cpasync.make_tiled_tma_atom(load, mk, k_layout, (t.keys, t.head))
        load_v, mv = cpasync.make_tiled_tma_atom(load, mv, v_layout, (t.head, t.keys))

        # O and the parts, two columns at a time.
        rows_of_all = batch * hq
        mo = cute.make_tensor(
            cute.recast_ptr(o, dtype=Int32), cute.make_layout((d // 2, rows_of_all), stride=(1, d // 2))
        )
        mp = cute.make_tensor(parts, cute.make_layout((d, rows_of_all, splits), stride=(1, d, rows_of_all * d)))
        ml = cute.make_tensor(
            parts + splits * rows_of_all * d,
            cute.make_layout((2, rows_of_all, splits), stride=(1, 2, rows_of_all * 2)),
        )
        row_tiles = cute.ceil_div(hq // hkv, ROWS)
        self.attend(
            load_q, mq, load_k, mk, load_v, mv, mo, mp, ml,
            sk, hq, hkv, d, window, splits, row_tiles, scale, q_layout, k_layout, v_layout, mma_qk, mma_pv,
        ).launch(
            grid=[splits, hkv * row_tiles, batch],
            block=[WARPGROUP + WARP, 1, 1],
            stream=stream,
        )  # fmt: skip
        if cutlass.const_expr(t.split):
            self.combine(mo, mp, ml, d, splits).launch(
                grid=[rows_of_all, 1, 1], block=[t.head // 2, self.takers, 1], stream=stream, use_pdl=True
            )

    @cute.kernel
    def attend(
        self,
        load_q: cute.CopyAtom, mq: cute.Tensor,
        load_k: cute.CopyAtom, mk: cute.Tensor,
        load_v: cute.CopyAtom, mv: cute.Tensor,
        mo: cute.Tensor, mp: cute.Tensor, ml: cute.Tensor,
        sk: Int32, hq: Int32, hkv: Int32, d: Int32, window: Int32, splits: Int32, row_tiles: Int32, scale: Float32,
        q_layout: cute.ComposedLayout, k_layout: cute.ComposedLayout, v_layout: cute.ComposedLayout,
        mma_qk: cute.TiledMma, mma_pv: cute.TiledMma,
    ):  # fmt: skip
        """One share of the keys of one key head, for up to 64 of its query heads."""
        t = self.tiles
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        q_size, k_size, v_size = (cute.cosize(x) for x in (q_layout, k_layout, v_layout))

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[cutlass.Int64, 1]
            k_full: cute.struct.MemRange[cutlass.Int64, t.stages]
            v_full: cute.struct.MemRange[cutlass.Int64, t.stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, t.stages]
            v_empty: cute.struct.MemRange[cutlass.Int64, t.stages]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, q_size], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, k_size], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, v_size], 1024]

        shared = SmemAllocator().allocate(Shared)
        sq_ = tma.swizzled(shared.q, q_layout)
        sk_ = tma.swizzled(shared.k, k_layout)
        sv_ = tma.swizzled(shared.v, v_layout)
        q_full, k_full, v_full = shared.q_full.data_ptr(), shared.k_full.data_ptr(), shared.v_full.data_ptr()
        k_empty, v_empty = shared.k_empty.data_ptr(), shared.v_empty.data_ptr()
        if warp_index == 0:
            warps = WARPGROUP // WARP
            tma.prepare(
                (load_q, load_k, load_v),
                (1, (q_full, 1)),
                (t.stages, (k_full, 1), (v_full, 1), (k_empty, warps), (v_empty, warps)),
            )
        cute.arch.sync_threads()

        if cutlass.const_expr(t.split):
            # The second kernel may come up beside the last of these, and waits for all that they write.
            cute.arch.griddepcontrol_launch_dependents()
        split, head_tile, batch = cute.arch.block_idx()
        key_head, row_tile = head_tile // row_tiles, head_tile % row_tiles
        group = hq // hkv
        first_head = key_head * group + row_tile * ROWS
        rows = cutlass.min(group - row_tile * ROWS, ROWS)
        # Blocks of this share: [begin, begin + blocks).
        start = Int32(0)
        if cutlass.const_expr(t.windowed):
            start = (sk - window) // t.keys
        all_blocks = cute.ceil_div(sk, t.keys) - start
        # No product beyond 2^31: splits are few hundred, blocks less than 2^25.
        begin = start + all_blocks // splits * split + cutlass.min(split, all_blocks % splits)
        blocks = all_blocks // splits
        if split < all_blocks % splits:
            blocks += 1

        if warp_index == WARPGROUP // WARP:
            gq = cute.local_tile(cute.domain_offset((first_head, 0), mq[None, None, batch]), (ROWS, t.head), (None, 0))
            gk = cute.local_tile(mk[None, None, key_head, batch], (t.keys, t.head), (None, 0))
            gv = cute.local_tile(mv[None, None, key_head, batch], (t.head, t.keys), (0, None))
            to_q, from_q = tma.partition(load_q, sq_, gq)
            to_k, from_k = tma.partition(load_k, sk_, gk)
            to_v, from_v = tma.partition(load_v, sv_, gv)
            row_bytes = t.head * self.dtype.width // 8
            tma.expect(q_full, ROWS * row_bytes)
            cute.copy(load_q, from_q[None, 0], to_q[None, 0], tma_bar_ptr=q_full)
            for j in cutlass.range(blocks, unroll=1):
                slot, phase = j % t.stages, j // t.stages % 2 ^ 1
                cute.arch.mbarrier_wait(k_empty + slot, phase)
                tma.expect(k_full + slot, t.keys * row_bytes)
                cute.copy(load_k, from_k[None, begin + j], to_k[None, slot], tma_bar_ptr=k_full + slot)
                cute.arch.mbarrier_wait(v_empty + slot, phase)
                tma.expect(v_full + slot, t.keys * row_bytes)
                cute.copy(load_v, from_v[None, begin + j], to_v[None, slot], tma_bar_ptr=v_full + slot)
        else:
            thread = cute.arch.thread_idx()[0]
            column = thread % 4 * 2
            thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
            c = SimpleNamespace()
            c.tiles, c.mma_qk, c.thr_qk, c.mma_pv, c.scale = t, mma_qk, thr_qk, mma_pv, scale
            c.k_full, c.k_empty, c.v_full, c.v_empty = k_full, k_empty, v_full, v_empty
            c.q = thr_qk.make_fragment_A(thr_qk.partition_A(sq_))[None, None, None, 0]
            c.k = thr_qk.make_fragment_B(thr_qk.partition_B(sk_))
            c.v = thr_pv.make_fragment_B(thr_pv.partition_B(sv_))
            o = thr_pv.make_fragment_C(thr_pv.partition_shape_C((ROWS, t.head)))
            c.o, c.p = o, thr_pv.make_fragment_A(thr_pv.partition_shape_A((ROWS, t.keys)))
            o.fill(0.0)
            most, sums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            c.most, c.sums = most, sums
            c.first, c.last, c.since = begin * t.keys, sk - 1 - column, sk - 1 - window - column

            cute.arch.mbarrier_wait(q_full, 0)
            _step(c, Int32(0), True, True)
            # The end of the keys lies in the last block alone, the start of a window in the first.
            for j in cutlass.range(1, blocks - 1, unroll=1):
                _step(c, j, False, False)
            if blocks > 1:
                _step(c, blocks - 1, False, True)

            totals = row_wise.finish(sums)
            mine = row_wise.by_rows(o)
            for r in cutlass.range_constexpr(2):
                row = thread // WARP * 16 + thread % WARP // 4 + 8 * r
                at = batch * hq + first_head + row
                if row < rows:
                    if cutlass.const_expr(t.split):
                        for i in cutlass.range_constexpr(cute.size(mine, mode=[1])):
                            if i // 2 * 8 + i % 2 + column < d:
                                mp[i // 2 * 8 + i % 2 + column, at, split] = mine[r, i]
                        if column == 0:
                            ml[0, at, split] = most[r] * scale
                            ml[1, at, split] = totals[r]
                    else:
                        factor = cute.arch.rcp_approx(totals[r])
                        for i in cutlass.range_constexpr(0, cute.size(mine, mode=[1]), 2):
                            if i * 4 + column < d:
                                mo[i * 2 + column // 2, at] = row_wise.pack(
                                    mine[r, i] * factor, mine[r, i + 1] * factor, self.dtype
                                )

    @cute.kernel
    def combine(self, mo: cute.Tensor, mp: cute.Tensor, ml: cute.Tensor, d: Int32, splits: Int32):
        """One row: ``takers`` threads for every two columns, each for some of the shares."""
        row = cute.arch.block_idx()[0]
        pair, taker, _ = cute.arch.thread_idx()

        @cute.struct
        class Shared:
            sums: cute.struct.MemRange[Float32, 3 * self.takers * (self.tiles.head // 2)]

        sums = (
            SmemAllocator().allocate(Shared).sums.get_tensor(cute.make_layout((self.tiles.head // 2, self.takers, 3)))
        )
        cute.arch.griddepcontrol_wait()
        most = -Float32.inf
        for i in cutlass.range(cute.arch.lane_idx(), splits, WARP, unroll=1):
            most = cute.arch.fmax(most, ml[0, row, i])
        most = cute.arch.warp_reduction_max(most)
        total, left, right = Float32(0.0), Float32(0.0), Float32(0.0)
        at = cutlass.min(2 * pair, d - 2)
        for i in cutlass.range(taker, splits, self.takers, unroll=4):
            weight = row_wise.exp2(ml[0, row, i] - most)
            total += weight * ml[1, row, i]
            left += weight * mp[at, row, i]
            right += weight * mp[at + 1, row, i]
        for i, value in enumerate((total, left, right)):
            sums[pair, taker, i] = value
        cute.arch.sync_threads()
        if taker == 0 and 2 * pair < d:
            for i in cutlass.range_constexpr(1, self.takers):
                total += sums[pair, i, 0]
                left += sums[pair, i, 1]
                right += sums[pair, i, 2]
            mo[pair, row] = row_wise.pack(left / total, right / total, self.dtype)


def _step(c, j, first, masked):
    """Block ``j`` of the share."""
    stages = c.tiles.stages
    slot, phase = j % stages, j // stages % 2
    s = c.thr_qk.make_fragment_C(c.thr_qk.partition_shape_C((ROWS, c.tiles.keys)))
    cute.arch.mbarrier_wait(c.k_full + slot, phase)
    row_wise.multiply(c.mma_qk, s, c.q, c.k[None, None, None, slot], True)
    warpgroup.wait_group(0)
    tma.release(c.k_empty + slot)
    if masked:
        key = c.first + j * c.tiles.keys
        row_wise.hide(s, [c.last - key] * 2, [c.since - key] * 2, c.tiles.windowed)
    # A row sees a key in every block.
    fades, _ = row_wise.softmax(s, c.most, c.sums, c.scale, first, False, False)
    row_wise.narrow(s, c.p)
    if not first:
        row_wise.rescale(c.o, fades)
    cute.arch.mbarrier_wait(c.v_full + slot, phase)
    row_wise.multiply(c.mma_pv, c.o, c.p, c.v[None, None, None, slot], False)
    warpgroup.wait_group(0)
    tma.release(c.v_empty + slot)
