"""Attention backward on Hopper in the CuTe DSL: dQ, dK and dV by five products for every block of keys and queries.

A CTA owns 128 keys of one key head and goes through the queries that see them, of every query head of the group. Two
warpgroups hold dK and dV of 64 keys each in registers; scores are computed transposed, so that probabilities and their
gradients go on to dV and dK from registers (FlashAttention-3, Shah et al. 2024, appendix B). The gradient of the scores
passes through shared memory, from where dQ is computed and added in f32 to global memory, in the order of the
accumulators' registers. That addition has no order of its own: dQ differs from run to run in its last bits.

Owns three kernels, for the row sums of O dO, for the gradients, and for rounding dQ, and the host function that
launches them. Sizes are arguments; annotations are read when the DSL traces. It imports the DSL.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from impls.cutlass.cute_attention import BACKWARD_KEYS, ROWS, BackwardTiles, query_blocks
from impls.cutlass.kernels import cute_attention_operands as operands
from impls.cutlass.kernels import cute_attention_softmax as row_wise
from impls.cutlass.kernels import cute_tma as tma
from impls.cutlass.kernels.cute_tma import WARP, WARPGROUP

_CONSUMERS = BACKWARD_KEYS // ROWS
# Registers of a thread: of the warpgroup that loads, of those that multiply.
_REGISTERS = (24, 240)
# Named barriers: 0 is the CTA's; of both consumers; of each.
_MET, _OWN = 1, 2
# Columns of dQ that a warpgroup computes in a step.
_COLUMNS = 64
# Beyond every query.
_NEVER = 2**30


class Backward:
    """The kernels for one dtype, padded head size and mask."""

    def __init__(self, tiles: BackwardTiles):
        self.tiles = tiles
        self.dtype = tma.DTYPES[tiles.dtype]
        self.causal = tiles.mask != "full"
        self.windowed = tiles.mask == "window"
        # With 128 columns each warpgroup computes half of them over all keys; with 64 all of them over its own keys.
        self.halves = tiles.head // _COLUMNS

    def examples(self):
        """Arguments to trace with, but for the stream."""
        kinds = [self.dtype] * 8 + [Float32] * 3
        return [*tma.pointers(kinds), *[Int32(1)] * 7, Float32(1.0), Float32(1.0)]

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        do: cute.Pointer,
        dq: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        lse: cute.Pointer,
        delta: cute.Pointer,
        sums: cute.Pointer,
        batch: Int32,
        sq: Int32,
        sk: Int32,
        hq: Int32,
        hkv: Int32,
        d: Int32,
        window: Int32,
        scale2: Float32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launches dQ, dK, dV of O = softmax(Q K^T / sqrt(d)) V on ``stream``; tensors are (batch, rows, heads, d).

        Args:
            lse: logarithms in base 2 of the rows' sums of exponentials, (batch, hq, sq padded to 64), infinite beyond
                sq.
            delta: room for as many sums of O dO.
            sums: room for dQ in f32, of ``head`` columns and as many rows.
            window: keys a query sees at most; not read by other masks.
            scale2, scale: log2(e) / sqrt(d), 1 / sqrt(d).
        """
        t = self.tiles
        d8 = cute.assume(d, divby=8)
        queries, keys = operands.by_heads(sq, hq, d8, batch), operands.by_heads(sk, hkv, d8, batch)
        row_tiles = cute.ceil_div(sq, ROWS)
        rows = row_tiles * ROWS * hq * batch
        pairs = cute.make_layout((d // 2, hq, sq, batch), stride=(1, d // 2, hq * (d // 2), sq * hq * (d // 2)))
        by_pairs = [cute.make_tensor(cute.recast_ptr(x, dtype=Int32), pairs) for x in (o, do, dq)]
        mlse, mdelta = (cute.make_tensor(x, cute.make_layout(rows)) for x in (lse, delta))
        msums = cute.make_tensor(sums, cute.make_layout(rows * t.head))
        self.before(by_pairs[0], by_pairs[1], mdelta, msums, sq, hq, d, row_tiles * ROWS, rows).launch(
            grid=[cute.ceil_div(rows, 4), 1, 1], block=[4 * WARP, 1, 1], stream=stream
        )

        major_k, major_n = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        rmem = warpgroup.OperandSource.RMEM
        kind = self.dtype
        mma_s = hopper.make_trivial_tiled_mma(kind, kind, major_k, major_k, Float32, (1, 1, 1), (ROWS, ROWS))
        mma_kv = hopper.make_trivial_tiled_mma(kind, kind, major_k, major_n, Float32, (1, 1, 1), (ROWS, t.head), rmem)
        mma_q = hopper.make_trivial_tiled_mma(kind, kind, major_n, major_n, Float32, (1, 1, 1), (ROWS, _COLUMNS))
        tile = (ROWS, ROWS, t.head)
        k_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, kind, _CONSUMERS)
        q_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, kind, t.stages)
        s_layout = hopper.make_smem_layout_a(LayoutEnum.COL_MAJOR, (ROWS, ROWS, BACKWARD_KEYS), kind, 2)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        box = (ROWS, t.head)
        load_q, mq = cpasync.make_tiled_tma_atom(load, cute.make_tensor(q, queries), q_layout, box)
        load_do, mdo = cpasync.make_tiled_tma_atom(load, cute.make_tensor(do, queries), q_layout, box)
        load_k, mk = cpasync.make_tiled_tma_atom(load, cute.make_tensor(k, keys), k_layout, box)
        load_v, mv = cpasync.make_tiled_tma_atom(load, cute.make_tensor(v, keys), k_layout, box)
        store_dk, mdk = cpasync.make_tiled_tma_atom(store, cute.make_tensor(dk, keys), k_layout, box)
        store_dv, mdv = cpasync.make_tiled_tma_atom(store, cute.make_tensor(dv, keys), k_layout, box)
        key_tiles = cute.ceil_div(sk, BACKWARD_KEYS)
        self.kernel(
            load_q, mq, load_do, mdo, load_k, mk, load_v, mv, store_dk, mdk, store_dv, mdv, mlse, mdelta, msums,
            sq, sk, hq, hkv, window, row_tiles, scale2, scale, k_layout, q_layout, s_layout, mma_s, mma_kv, mma_q,
        ).launch(
            grid=[*((key_tiles, hkv) if t.by_keys else (hkv, key_tiles)), batch],
            block=[(_CONSUMERS + 1) * WARPGROUP, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip
        self.after(by_pairs[2], msums, sq, d, row_tiles, scale).launch(
            grid=[row_tiles, hq, batch], block=[WARPGROUP, 1, 1], stream=stream
        )

    @cute.kernel
    def before(
        self, mo: cute.Tensor, mdo: cute.Tensor, mdelta: cute.Tensor, msums: cute.Tensor,
        sq: Int32, hq: Int32, d: Int32, padded: Int32, rows: Int32,
    ):  # fmt: skip
        """A warp for each row: its sum of O dO, and zeros where its dQ will be added up."""
        thread = cute.arch.thread_idx()[0]
        lane, row = thread % WARP, cute.arch.block_idx()[0] * 4 + thread // WARP
        if row < rows:
            head, at = row // padded, row % padded
            total = Float32(0.0)
            if at < sq:
                for i in cutlass.range_constexpr(self.tiles.head // 2 // WARP):
                    pair = lane + i * WARP
                    if 2 * pair < d:
                        left = row_wise.unpack(mo[pair, head % hq, at, head // hq], self.dtype)
                        right = row_wise.unpack(mdo[pair, head % hq, at, head // hq], self.dtype)
                        total += left[0] * right[0] + left[1] * right[1]
            total = cute.arch.warp_reduction_sum(total)
            if lane == 0:
                mdelta[row] = total
            for i in cutlass.range_constexpr(self.tiles.head // WARP):
                msums[row * self.tiles.head + i * WARP + lane] = Float32(0.0)

    @cute.kernel
    def after(self, mdq: cute.Tensor, msums: cute.Tensor, sq: Int32, d: Int32, row_tiles: Int32, scale: Float32):
        """A tile of rows of one head: its dQ, out of the order of registers, scaled and rounded."""
        thread = cute.arch.thread_idx()[0]
        row_tile, head, batch = cute.arch.block_idx()
        heads = cute.arch.grid_dim()[1]
        first = ((batch * heads + head) * row_tiles + row_tile) * (ROWS * self.tiles.head) + thread * 4
        row = row_tile * ROWS + thread // WARP * 16 + thread % WARP // 4
        for i in cutlass.range_constexpr(self.tiles.head // 8):
            pair = i * 4 + thread % 4
            for r in cutlass.range_constexpr(2):
                if 2 * pair < d and row + 8 * r < sq:
                    at = first + i * (WARPGROUP * 4) + 2 * r
                    mdq[pair, head, row + 8 * r, batch] = row_wise.pack(
                        msums[at] * scale, msums[at + 1] * scale, self.dtype
                    )

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom, mq: cute.Tensor, load_do: cute.CopyAtom, mdo: cute.Tensor,
        load_k: cute.CopyAtom, mk: cute.Tensor, load_v: cute.CopyAtom, mv: cute.Tensor,
        store_dk: cute.CopyAtom, mdk: cute.Tensor, store_dv: cute.CopyAtom, mdv: cute.Tensor,
        mlse: cute.Tensor, mdelta: cute.Tensor, msums: cute.Tensor,
        sq: Int32, sk: Int32, hq: Int32, hkv: Int32, window: Int32, row_tiles: Int32, scale2: Float32, scale: Float32,
        k_layout: cute.ComposedLayout, q_layout: cute.ComposedLayout, s_layout: cute.ComposedLayout,
        mma_s: cute.TiledMma, mma_kv: cute.TiledMma, mma_q: cute.TiledMma,
    ):  # fmt: skip
        """128 keys of one key head."""
        t = self.tiles
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        k_size, q_size, s_size = (cute.cosize(x) for x in (k_layout, q_layout, s_layout))

        @cute.struct
        class Shared:
            kv_full: cute.struct.MemRange[cutlass.Int64, 1]
            q_full: cute.struct.MemRange[cutlass.Int64, t.stages]
            do_full: cute.struct.MemRange[cutlass.Int64, t.stages]
            empty: cute.struct.MemRange[cutlass.Int64, t.stages]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, t.stages * ROWS], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, t.stages * ROWS], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, k_size], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, k_size], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, q_size], 1024]
            do: cute.struct.Align[cute.struct.MemRange[self.dtype, q_size], 1024]
            s: cute.struct.Align[cute.struct.MemRange[self.dtype, s_size], 1024]

        shared = SmemAllocator().allocate(Shared)
        sk_ = tma.swizzled(shared.k, k_layout)
        sv_ = tma.swizzled(shared.v, k_layout)
        sq_ = tma.swizzled(shared.q, q_layout)
        sdo = tma.swizzled(shared.do, q_layout)
        ss_ = tma.swizzled(shared.s, s_layout)
        slse = shared.lse.get_tensor(cute.make_layout((ROWS, t.stages)))
        sdelta = shared.delta.get_tensor(cute.make_layout((ROWS, t.stages)))
        kv_full, q_full = shared.kv_full.data_ptr(), shared.q_full.data_ptr()
        do_full, empty = shared.do_full.data_ptr(), shared.empty.data_ptr()
        if warp_index == 0:
            tma.prepare(
                (load_q, load_do, load_k, load_v, store_dk, store_dv),
                (1, (kv_full, 1)),
                (t.stages, (q_full, 1), (do_full, 1), (empty, _CONSUMERS * 4)),
            )
        cute.arch.sync_threads()

        key_head, key_tile, batch = cute.arch.block_idx()
        if cutlass.const_expr(t.by_keys):
            key_head, key_tile = key_tile, key_head
        spans = query_blocks(
            key_tile * BACKWARD_KEYS, BACKWARD_KEYS, sq, sk, window, ROWS, t.mask, cutlass.min, cutlass.max
        )
        group = hq // hkv
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(_REGISTERS[0])
            if warp_index == 0:
                self.load(
                    (load_k, mk, sk_), (load_v, mv, sv_), kv_full, (load_q, mq, sq_, mlse, slse, q_full),
                    (load_do, mdo, sdo, mdelta, sdelta, do_full), empty,
                    batch, key_head, key_tile, hq, group, row_tiles, spans[0], spans[3],
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(_REGISTERS[1])
            self.differentiate(
                (sk_, sv_, kv_full), (sq_, slse, q_full), (sdo, sdelta, do_full), empty, ss_, msums,
                (store_dk, mdk), (store_dv, mdv), mma_s, mma_kv, mma_q,
                batch, key_head, key_tile, hq, group, row_tiles, sk, sk - sq, window, spans, scale2, scale,
            )  # fmt: skip

    @cute.jit
    def load(
        self, of_k, of_v, kv_full, of_q, of_do, empty,
        batch: Int32, key_head: Int32, key_tile: Int32, hq: Int32, group: Int32, row_tiles: Int32,
        begin: Int32, end: Int32,
    ):  # fmt: skip
        """One warp: K and V once; Q with its logarithms and dO with its sums of every block of queries."""
        t = self.tiles
        tile_bytes = ROWS * t.head * self.dtype.width // 8
        vector_bytes = ROWS * Float32.width // 8
        tma.expect(kv_full, 2 * _CONSUMERS * tile_bytes)
        for atom, source, into in (of_k, of_v):
            tiles = cute.local_tile(source[None, None, key_head, batch], (ROWS, t.head), (None, 0))
            to, from_ = tma.partition(atom, into, tiles)
            for i in cutlass.range_constexpr(_CONSUMERS):
                cute.copy(atom, from_[None, key_tile * _CONSUMERS + i], to[None, i], tma_bar_ptr=kv_full)
        load_q, mq, sq_, mlse, slse, q_full = of_q
        load_do, mdo, sdo, mdelta, sdelta, do_full = of_do
        step = Int32(0)
        for g in cutlass.range(group, unroll=1):
            head = key_head * group + g
            gq = cute.local_tile(mq[None, None, head, batch], (ROWS, t.head), (None, 0))
            gdo = cute.local_tile(mdo[None, None, head, batch], (ROWS, t.head), (None, 0))
            to_q, from_q = tma.partition(load_q, sq_, gq)
            to_do, from_do = tma.partition(load_do, sdo, gdo)
            first = (batch * hq + head) * row_tiles
            for i in cutlass.range(begin, end, unroll=1):
                slot = step % t.stages
                cute.arch.mbarrier_wait(empty + slot, step // t.stages % 2 ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(q_full + slot, tile_bytes + vector_bytes)
                    _bring(mlse.iterator + (first + i) * ROWS, slse.iterator + slot * ROWS, vector_bytes, q_full + slot)
                cute.copy(load_q, from_q[None, i], to_q[None, slot], tma_bar_ptr=q_full + slot)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(do_full + slot, tile_bytes + vector_bytes)
                    _bring(
                        mdelta.iterator + (first + i) * ROWS,
                        sdelta.iterator + slot * ROWS,
                        vector_bytes,
                        do_full + slot,
                    )
                cute.copy(load_do, from_do[None, i], to_do[None, slot], tma_bar_ptr=do_full + slot)
                step += 1

    @cute.jit
    def differentiate(
        self, of_kv, of_q, of_do, empty, ss_, msums, of_dk, of_dv,
        mma_s: cute.TiledMma, mma_kv: cute.TiledMma, mma_q: cute.TiledMma,
        batch: Int32, key_head: Int32, key_tile: Int32, hq: Int32, group: Int32, row_tiles: Int32,
        sk: Int32, shift: Int32, window: Int32, spans, scale2: Float32, scale: Float32,
    ):  # fmt: skip
        """A consumer warpgroup: dK and dV of its 64 keys, and its part of dQ."""
        t = self.tiles
        sk_, sv_, kv_full = of_kv
        sq_, slse, q_full = of_q
        sdo, sdelta, do_full = of_do
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        who = warp_index // 4 - 1
        thr_s, thr_kv, thr_q = (mma.get_slice(thread) for mma in (mma_s, mma_kv, mma_q))

        c = SimpleNamespace()
        c.tiles, c.causal, c.windowed, c.halves, c.who = t, self.causal, self.windowed, self.halves, who
        c.mma_s, c.mma_kv, c.mma_q, c.thr_s, c.thr_q = mma_s, mma_kv, mma_q, thr_s, thr_q
        c.k = thr_s.make_fragment_A(thr_s.partition_A(sk_))[None, None, None, who]
        c.v = thr_s.make_fragment_A(thr_s.partition_A(sv_))[None, None, None, who]
        c.q = thr_s.make_fragment_B(thr_s.partition_B(sq_))
        c.do = thr_s.make_fragment_B(thr_s.partition_B(sdo))
        # The same with rows and columns exchanged.
        turned = cute.make_layout((t.head, ROWS, t.stages), stride=(ROWS, 1, ROWS * t.head))
        c.q_turned = thr_kv.make_fragment_B(thr_kv.partition_B(cute.composition(sq_, turned)))
        c.do_turned = thr_kv.make_fragment_B(thr_kv.partition_B(cute.composition(sdo, turned)))
        all_keys = cute.make_layout((t.head, (ROWS, _CONSUMERS)), stride=(ROWS, (1, ROWS * t.head)))
        k_turned = cute.composition(sk_, all_keys)
        s_turned = cute.composition(
            ss_, cute.make_layout((BACKWARD_KEYS, ROWS, 2), stride=(ROWS, 1, ROWS * BACKWARD_KEYS))
        )
        if cutlass.const_expr(self.halves == 2):
            s_mine, k_mine = ss_, cute.local_tile(k_turned, (_COLUMNS, BACKWARD_KEYS), (who, 0))
        else:
            s_mine = cute.local_tile(ss_, (ROWS, ROWS, 2), (0, who, 0))
            k_mine = cute.local_tile(k_turned, (_COLUMNS, ROWS), (0, who))
        c.s_turned = thr_q.make_fragment_A(thr_q.partition_A(s_mine))
        c.k_turned = thr_q.make_fragment_B(thr_q.partition_B(k_mine))
        to_shared = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_s)
        c.to_shared, mine = to_shared, to_shared.get_slice(thread)
        c.mine, c.s_place = mine, mine.partition_D(cute.local_tile(s_turned, (ROWS, ROWS, 2), (who, 0, 0)))
        c.p, c.ds = (thr_kv.make_fragment_A(thr_kv.partition_shape_A((ROWS, ROWS))) for _ in range(2))
        dk, dv = (thr_kv.make_fragment_C(thr_kv.partition_shape_C((ROWS, t.head))) for _ in range(2))
        dk.fill(0.0)
        dv.fill(0.0)
        c.dk, c.dv, c.slse, c.sdelta, c.scale2 = dk, dv, slse, sdelta, scale2
        c.q_full, c.do_full, c.empty = q_full, do_full, empty
        c.column = thread % 4 * 2
        # This thread's keys, as the first query that sees each; with a window, the first one that does not any more.
        key = key_tile * BACKWARD_KEYS + who * ROWS + thread // WARP * 16 + thread % WARP // 4
        if cutlass.const_expr(self.causal):
            c.since = [i - shift - c.column for i in (key, key + 8)]
        else:  # all see it that is there
            c.since = [cutlass.select_(i < sk, -c.column, Int32(_NEVER)) for i in (key, key + 8)]
        c.until = [i - shift + window - c.column for i in (key, key + 8)]
        half = who if self.halves == 2 else 0
        c.sums = msums.iterator + (half * ROWS * _COLUMNS + thread * 4)

        cute.arch.mbarrier_wait(kv_full, 0)
        begin, whole, partial, end = spans
        whole = cutlass.max(cutlass.min(whole, end), begin)
        partial = cutlass.max(cutlass.min(partial, end), whole)
        step = Int32(0)
        for g in cutlass.range(group, unroll=1):
            first = (batch * hq + key_head * group + g) * row_tiles
            for i in cutlass.range(begin, whole, unroll=1):
                _step(c, step + (i - begin), i, first, True)
            for i in cutlass.range(whole, partial, unroll=1):
                _step(c, step + (i - begin), i, first, False)
            if cutlass.const_expr(self.windowed):
                for i in cutlass.range(partial, end, unroll=1):
                    _step(c, step + (i - begin), i, first, True)
            step += end - begin

        # K and V have been read for the last time by both: their places take dK and dV.
        cute.arch.barrier(barrier_id=_MET, number_of_threads=_CONSUMERS * WARPGROUP)
        row_wise.rescale(dk, [scale, scale])
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_kv)
        place = copy.get_slice(thread)
        narrow = cute.make_rmem_tensor_like(dk, self.dtype)
        for wide, room in ((dk, sk_), (dv, sv_)):
            row_wise.narrow(wide, narrow)
            cute.copy(copy, place.retile(narrow), place.partition_D(room[None, None, who]))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_OWN + who, number_of_threads=WARPGROUP)
        if warp_index % 4 == 0:
            for store, out, room in ((*of_dk, sk_), (*of_dv, sv_)):
                tiles = cute.local_tile(out[None, None, key_head, batch], (ROWS, t.head), (None, 0))
                from_s, to_g = tma.partition(store, room[None, None, who], tiles)
                cute.copy(store, from_s, to_g[None, key_tile * _CONSUMERS + who])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def _step(c, step, block, first, masked):
    """One block of queries."""
    stages = c.tiles.stages
    slot, phase, side = step % stages, step // stages % 2, step % 2
    s, dp = (c.thr_s.make_fragment_C(c.thr_s.partition_shape_C((ROWS, ROWS))) for _ in range(2))
    cute.arch.mbarrier_wait(c.q_full + slot, phase)
    row_wise.multiply(c.mma_s, s, c.k, c.q[None, None, None, slot], True)
    cute.arch.mbarrier_wait(c.do_full + slot, phase)
    row_wise.multiply(c.mma_s, dp, c.v, c.do[None, None, None, slot], True)
    warpgroup.wait_group(1)
    rows = row_wise.by_rows(s)
    columns = cute.size(rows, mode=[1])
    at = [i // 2 * 8 + i % 2 for i in range(columns)]
    for i in range(columns):
        logarithm = c.slse[at[i] + c.column, slot]
        for r in range(2):
            p = row_wise.exp2(rows[r, i] * c.scale2 - logarithm)
            if masked:
                query = block * ROWS + at[i]
                seen = c.since[r] <= query
                if c.windowed:
                    seen = seen & (query < c.until[r])
                p = Float32(cutlass.select_(seen, p, Float32(0.0)))
            rows[r, i] = p
    row_wise.narrow(s, c.p)
    row_wise.multiply(c.mma_kv, c.dv, c.p, c.do_turned[None, None, None, slot], False)
    warpgroup.wait_group(1)
    gradients = row_wise.by_rows(dp)
    for i in range(columns):
        delta = c.sdelta[at[i] + c.column, slot]
        for r in range(2):
            gradients[r, i] = rows[r, i] * (gradients[r, i] - delta)
    row_wise.narrow(dp, c.ds)
    places = cute.make_tensor(c.ds.iterator, dp.layout)
    cute.copy(c.to_shared, c.mine.retile(places), c.s_place[None, None, None, side])
    cute.arch.fence_proxy("async.shared", space="cta")
    # The gradients of all keys that are multiplied now are there; and what lay there two steps ago has been read.
    if c.halves == 2:
        cute.arch.barrier(barrier_id=_MET, number_of_threads=_CONSUMERS * WARPGROUP)
    else:
        cute.arch.barrier(barrier_id=_OWN + c.who, number_of_threads=WARPGROUP)
    # dQ is added up beside the product with Q: the other order took 10 % longer.
    dq = c.thr_q.make_fragment_C(c.thr_q.partition_shape_C((ROWS, _COLUMNS)))
    row_wise.multiply(c.mma_q, dq, c.s_turned[None, None, None, side], c.k_turned, True)
    row_wise.multiply(c.mma_kv, c.dk, c.ds, c.q_turned[None, None, None, slot], False)
    warpgroup.wait_group(1)
    sums = c.sums + (first + block) * (ROWS * c.tiles.head)
    flat = cute.make_tensor(dq.iterator, cute.make_layout(cute.size(dq)))
    for i in range(cute.size(flat) // 4):
        _add(sums + i * (WARPGROUP * 4), [flat[4 * i + j] for j in range(4)])
    warpgroup.wait_group(0)
    # Every thread has read its logarithms and sums.
    cute.arch.sync_warp()
    tma.release(c.empty + slot)


def _bring(source: cute.Pointer, into: cute.Pointer, size: int, full: cute.Pointer) -> None:
    """Starts a copy of ``size`` bytes to shared memory, counted by the mbarrier ``full``."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[into.toint(), source.toint(), Int32(size), full.toint()],
    )


def _add(sums: cute.Pointer, values: list) -> None:
    """Four neighbours in global memory grow by ``values``."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[sums.toint(), *values],
    )
