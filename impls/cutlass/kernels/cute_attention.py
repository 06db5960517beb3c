"""Attention forward on Hopper in the CuTe DSL: one warp that loads, two or three warpgroups that each own 64 queries.

The algorithm is FlashAttention-3's (Shah et al. 2024, sections 3.1 and 3.2). A warp of the first warpgroup loads the
queries once and walks over their blocks of keys from right to left, through rings of K and of V in shared memory whose
slots are handed over by mbarriers. Every consumer warpgroup multiplies its queries with a block (wgmma), exponentiates,
and multiplies the probabilities, which stay in registers, with the block's values. Two overlaps can be switched:
``overlap`` starts the scores of the next block beside the product with V of the last one, so that a warpgroup's
exponentials run while its own product does; ``ping_pong`` makes warpgroups start their products in turns, so that one
exponentiates while another's products run. Exponentials are powers of two with the scale folded in; rows are rescaled
as their maximum grows and divided by their sum once, at the end.

Owns the kernel and the host function that launches it. Sizes are arguments: one build serves every shape of its head
size, mask and dtype. Annotations are read when the DSL traces, so they are not postponed. It imports the DSL.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from impls.cutlass.cute_attention import ROWS, ForwardTiles, key_blocks
from impls.cutlass.kernels import cute_attention_operands as operands
from impls.cutlass.kernels import cute_attention_softmax as row_wise
from impls.cutlass.kernels import cute_tma as tma
from impls.cutlass.kernels.cute_tma import WARP, WARPGROUP

# Registers of a thread by the number of consumers: (of the warpgroup that loads, of those that multiply). Of 65,536, in
# steps of 8, for (consumers + 1) * 128 threads.
_REGISTERS = {1: (56, 256 - 16), 2: (24, 240), 3: (32, 160)}
# Places for announced tiles.
_TILES = 2
# Named barriers: 0 is the CTA's, then each consumer's turn, then each consumer's own.
_TURN = 1
_OWN = 4


class Forward:
    """The kernel for one dtype, padded head size, mask and choice of tiles."""

    def __init__(self, tiles: ForwardTiles):
        self.tiles = tiles
        self.dtype = tma.DTYPES[tiles.dtype]
        self.causal = tiles.mask != "full"
        self.windowed = tiles.mask == "window"
        self.rows = tiles.rows

    def examples(self):
        """Arguments to trace with, but for the stream."""
        kinds = [self.dtype] * 4 + [Int32, Float32]
        return [*tma.pointers(kinds), *[Int32(1)] * 9, Float32(1.0)]

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        taken: cute.Pointer,
        lse: cute.Pointer,
        batch: Int32,
        sq: Int32,
        sk: Int32,
        hq: Int32,
        hkv: Int32,
        d: Int32,
        window: Int32,
        section: Int32,
        programs: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launches O = softmax(Q K^T / sqrt(d)) V on ``stream``; all tensors are (batch, rows, heads, d), contiguous.

        Args:
            window: keys a query sees at most; not read by other masks.
            section: heads whose tiles are taken up together, those with most keys first.
            lse: where ``residuals``, the logarithms in base 2 of the rows' sums of exponentials go here, (batch, hq, sq
                padded to 64).
            taken: where ``persistent``, a counter that is 0, and is 0 again afterwards; else not read.
            programs: where ``persistent``, CTAs, at most as many as tiles; else not read.
            scale: log2(e) / sqrt(d).
        """
        t = self.tiles
        d8 = cute.assume(d, divby=8)
        queries, keys = operands.by_heads(sq, hq, d8, batch), operands.by_heads(sk, hkv, d8, batch)
        mq, mo = cute.make_tensor(q, queries), cute.make_tensor(o, queries)
        mk, mv = cute.make_tensor(k, keys), cute.make_tensor(v, operands.turned(keys))

        mma_qk, mma_pv, q_layout, k_layout, v_layout = operands.products(self.dtype, t, t.consumers)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_q, mq = cpasync.make_tiled_tma_atom(load, mq, q_layout, (ROWS, t.head))
        load_k, mk = cpasync.make_tiled_tma_atom(load, mk, k_layout, (t.keys, t.head))
        load_v, mv = cpasync.make_tiled_tma_atom(load, mv, v_layout, (t.head, t.keys))
        store_o, mo = cpasync.make_tiled_tma_atom(store, mo, q_layout, (ROWS, t.head))

        padded = cute.ceil_div(sq, ROWS) * ROWS
        mlse = cute.make_tensor(lse, cute.make_layout((sq, hq, batch), stride=(1, padded, padded * hq)))
        row_tiles = cute.ceil_div(sq, self.rows)
        tiles = row_tiles * hq * batch
        if cutlass.const_expr(not t.persistent):
            programs = tiles
        self.kernel(
            load_q, mq, load_k, mk, load_v, mv, store_o, mo, taken, mlse,
            sq, sk, hq, hq // hkv, row_tiles, window, section, batch * hq, tiles, programs, scale,
            q_layout, k_layout, v_layout, mma_qk, mma_pv,
        ).launch(
            grid=[programs, 1, 1],
            block=[(t.consumers + 1) * WARPGROUP, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom, mq: cute.Tensor,
        load_k: cute.CopyAtom, mk: cute.Tensor,
        load_v: cute.CopyAtom, mv: cute.Tensor,
        store_o: cute.CopyAtom, mo: cute.Tensor, taken: cute.Pointer, mlse: cute.Tensor,
        sq: Int32, sk: Int32, hq: Int32, group: Int32, row_tiles: Int32,
        window: Int32, section: Int32, heads: Int32, tiles: Int32, programs: Int32, scale: Float32,
        q_layout: cute.ComposedLayout, k_layout: cute.ComposedLayout, v_layout: cute.ComposedLayout,
        mma_qk: cute.TiledMma, mma_pv: cute.TiledMma,
    ):  # fmt: skip
        """A tile of queries of one head; where ``persistent``, one after the other until all are taken."""
        t = self.tiles
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        q_size, k_size, v_size = (cute.cosize(x) for x in (q_layout, k_layout, v_layout))

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[cutlass.Int64, t.consumers]
            q_empty: cute.struct.MemRange[cutlass.Int64, t.consumers]
            tile_full: cute.struct.MemRange[cutlass.Int64, _TILES]
            tile_empty: cute.struct.MemRange[cutlass.Int64, _TILES]
            tile: cute.struct.MemRange[Int32, _TILES]
            k_full: cute.struct.MemRange[cutlass.Int64, t.stages]
            v_full: cute.struct.MemRange[cutlass.Int64, t.stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, t.stages]
            v_empty: cute.struct.MemRange[cutlass.Int64, t.stages]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, q_size], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, k_size], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, v_size], 1024]
            o: cute.struct.Align[cute.struct.MemRange[self.dtype, q_size if t.own_output else 0], 1024]

        shared = SmemAllocator().allocate(Shared)
        sq_ = tma.swizzled(shared.q, q_layout)
        sk_ = tma.swizzled(shared.k, k_layout)
        sv_ = tma.swizzled(shared.v, v_layout)
        so_ = tma.swizzled(shared.o, q_layout) if t.own_output else sq_
        q_full, k_full, v_full = shared.q_full.data_ptr(), shared.k_full.data_ptr(), shared.v_full.data_ptr()
        q_empty, k_empty, v_empty = shared.q_empty.data_ptr(), shared.k_empty.data_ptr(), shared.v_empty.data_ptr()

        tile_full, tile_empty = shared.tile_full.data_ptr(), shared.tile_empty.data_ptr()
        tile_at = shared.tile.get_tensor(cute.make_layout(_TILES))
        if warp_index == 0:
            warps = t.consumers * 4  # each of which says that it is done with a slot
            tma.prepare(
                (load_q, load_k, load_v, store_o),
                (t.consumers, (q_full, 1), (q_empty, 4)),
                (_TILES, (tile_full, 1), (tile_empty, warps)),
                (t.stages, (k_full, 1), (v_full, 1), (k_empty, warps), (v_empty, warps)),
            )
        cute.arch.sync_threads()

        z = SimpleNamespace(sq=sq, sk=sk, hq=hq, group=group, row_tiles=row_tiles, window=window)
        z.section, z.heads, z.tiles, z.programs = section, heads, tiles, programs
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(_REGISTERS[t.consumers][0])
            if warp_index == 0:
                self.load(
                    (load_q, mq, sq_, q_full, q_empty), (load_k, mk, sk_, k_full, k_empty),
                    (load_v, mv, sv_, v_full, v_empty), (taken, tile_at, tile_full, tile_empty), z,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(_REGISTERS[t.consumers][1])
            self.attend(
                (sq_, q_full, q_empty), (sk_, k_full, k_empty), (sv_, v_full, v_empty), (store_o, mo, so_, mlse),
                (tile_at, tile_full, tile_empty), mma_qk, mma_pv, z, scale,
            )  # fmt: skip

    def place(self, index, z):
        """Batch entry, head, tile of rows and blocks of keys of a tile by its number in the order they are taken up.

        Sections of heads come one after the other; in each, under a mask, tiles with the most keys first.
        """
        first = index // (z.section * z.row_tiles) * z.section
        rest = index - first * z.row_tiles
        width = cutlass.min(z.section, z.heads - first)
        row_tile = rest // width
        head = first + rest - row_tile * width
        if self.causal:
            row_tile = z.row_tiles - 1 - row_tile
        spans = key_blocks(
            row_tile * self.rows,
            self.rows,
            z.sq,
            z.sk,
            z.window,
            self.tiles.keys,
            self.tiles.mask,
            cutlass.min,
            cutlass.max,
        )
        return head // z.hq, head % z.hq, row_tile, spans

    @cute.jit
    def load(self, of_q, of_k, of_v, of_tiles, z):
        """One warp: of every tile Q, then K of every block and V of the block before it, from right to left."""
        t = self.tiles
        load_q, mq, sq_, q_full, q_empty = of_q
        load_k, mk, sk_, k_full, k_empty = of_k
        load_v, mv, sv_, v_full, v_empty = of_v
        taken, tile_at, tile_full, tile_empty = of_tiles
        row_bytes = t.head * self.dtype.width // 8
        index, turn, done = cute.arch.block_idx()[0], Int32(0), Int32(0)
        while index < z.tiles:
            if cutlass.const_expr(t.persistent):
                _announce(tile_at, tile_full, tile_empty, turn, index)
            batch, head, row_tile, spans = self.place(index, z)
            begin, _, _, end = spans
            blocks = end - begin
            key_head = head // z.group
            gq = cute.local_tile(mq[None, None, head, batch], (ROWS, t.head), (None, 0))
            gk = cute.local_tile(mk[None, None, key_head, batch], (t.keys, t.head), (None, 0))
            gv = cute.local_tile(mv[None, None, key_head, batch], (t.head, t.keys), (0, None))
            to_q, from_q = tma.partition(load_q, sq_, gq)
            to_k, from_k = tma.partition(load_k, sk_, gk)
            to_v, from_v = tma.partition(load_v, sv_, gv)
            for i in cutlass.range_constexpr(t.consumers):
                if cutlass.const_expr(t.persistent):
                    cute.arch.mbarrier_wait(q_empty + i, turn % 2 ^ 1)
                tma.expect(q_full + i, ROWS * row_bytes)
                cute.copy(load_q, from_q[None, row_tile * t.consumers + i], to_q[None, i], tma_bar_ptr=q_full + i)
            for j in cutlass.range(blocks + 1, unroll=1):
                if j < blocks:
                    slot, round_ = (done + j) % t.stages, (done + j) // t.stages
                    cute.arch.mbarrier_wait(k_empty + slot, round_ % 2 ^ 1)
                    tma.expect(k_full + slot, t.keys * row_bytes)
                    cute.copy(load_k, from_k[None, end - 1 - j], to_k[None, slot], tma_bar_ptr=k_full + slot)
                if j > 0:
                    slot, round_ = (done + j - 1) % t.stages, (done + j - 1) // t.stages
                    cute.arch.mbarrier_wait(v_empty + slot, round_ % 2 ^ 1)
                    tma.expect(v_full + slot, t.keys * row_bytes)
                    cute.copy(load_v, from_v[None, end - j], to_v[None, slot], tma_bar_ptr=v_full + slot)
            done += blocks
            turn += 1
            index = _next(taken, z.tiles, z.programs) if t.persistent else z.tiles
        if cutlass.const_expr(t.persistent):
            _announce(tile_at, tile_full, tile_empty, turn, z.tiles)

    @cute.jit
    def attend(self, of_q, of_k, of_v, of_o, of_tiles, mma_qk: cute.TiledMma, mma_pv: cute.TiledMma, z, scale: Float32):
        """A consumer warpgroup: the attention of its 64 queries of every tile."""
        t = self.tiles
        sq_, q_full, q_empty = of_q
        sk_, k_full, k_empty = of_k
        sv_, v_full, v_empty = of_v
        store_o, mo, so_, mlse = of_o
        tile_at, tile_full, tile_empty = of_tiles
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        who = warp_index // 4 - 1
        thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
        q = thr_qk.make_fragment_A(thr_qk.partition_A(sq_))[None, None, None, who]
        k = thr_qk.make_fragment_B(thr_qk.partition_B(sk_))
        v = thr_pv.make_fragment_B(thr_pv.partition_B(sv_))
        o = thr_pv.make_fragment_C(thr_pv.partition_shape_C((ROWS, t.head)))
        p = thr_pv.make_fragment_A(thr_pv.partition_shape_A((ROWS, t.keys)))
        most, sums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        if cutlass.const_expr(t.ping_pong):  # noqa: SIM102 (the inner condition is traced)
            if who == 0:  # the first has the first turn
                cute.arch.barrier_arrive(barrier_id=_TURN, number_of_threads=2 * WARPGROUP)

        turn, done = Int32(0), Int32(0)
        index = _announced(tile_at, tile_full, tile_empty, turn) if t.persistent else cute.arch.block_idx()[0]
        while index < z.tiles:
            batch, head, row_tile, spans = self.place(index, z)
            begin, whole, partial, end = spans
            blocks = end - begin
            # Keys that this thread's two rows see, as far as its columns go: after ``since``, up to ``last``.
            at = row_tile * self.rows + who * ROWS + thread // WARP * 16 + thread % WARP // 4 + (z.sk - z.sq)
            column = thread % 4 * 2
            c = SimpleNamespace()
            if cutlass.const_expr(self.causal):
                c.last = [cutlass.min(i, z.sk - 1) - column for i in (at, at + 8)]
            else:
                c.last = [z.sk - 1 - column] * 2
            c.since = [i - z.window - column for i in (at, at + 8)]
            c.tiles, c.windowed, c.turns = t, self.windowed, (_TURN + who, _TURN + (who + 1) % t.consumers)
            c.mma_qk, c.thr_qk, c.mma_pv = mma_qk, thr_qk, mma_pv
            c.q, c.k, c.v, c.o, c.p, c.most, c.sums, c.scale = q, k, v, o, p, most, sums, scale
            c.k_full, c.k_empty, c.v_full, c.v_empty = k_full, k_empty, v_full, v_empty
            c.end, c.done = end, done

            o.fill(0.0)
            cute.arch.mbarrier_wait(q_full + who, turn % 2)
            _start(c)
            masked = cutlass.max(cutlass.min(end - partial, blocks), 1)
            plain = cutlass.max(cutlass.min(end - whole, blocks), masked)
            for j in cutlass.range(1, masked, unroll=1):
                _step(c, j, True)
            for j in cutlass.range(masked, plain, unroll=1):
                _step(c, j, False)
            if cutlass.const_expr(self.windowed):
                for j in cutlass.range(plain, blocks, unroll=1):
                    _step(c, j, True)
            if cutlass.const_expr(t.persistent and t.own_output):
                tma.release(q_empty + who)
            if cutlass.const_expr(t.overlap):
                _weigh(c, blocks - 1)
                warpgroup.wait_group(0)
                tma.release(v_empty + (done + blocks - 1) % t.stages)
            done += blocks

            totals = row_wise.finish(sums)
            if cutlass.const_expr(t.residuals):
                for r in cutlass.range_constexpr(2):
                    row = at + 8 * r - (z.sk - z.sq)
                    if column == 0 and row < z.sq:
                        mlse[row, head, batch] = most[r] * scale + cute.math.log2(totals[r], fastmath=True)
            row_wise.rescale(o, [cute.arch.rcp_approx(total) for total in totals])
            narrow = cute.make_rmem_tensor_like(o, self.dtype)
            row_wise.narrow(o, narrow)
            # O takes the place of these 64 queries, which nobody reads any more, or has one of its own.
            so = so_[None, None, who]
            copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_pv)
            mine = copy.get_slice(thread)
            if cutlass.const_expr(t.persistent and t.own_output):
                if warp_index % 4 == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=_OWN + who, number_of_threads=WARPGROUP)
            cute.copy(copy, mine.retile(narrow), mine.partition_D(so))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=_OWN + who, number_of_threads=WARPGROUP)
            if warp_index % 4 == 0:
                go = cute.local_tile(mo[None, None, head, batch], (ROWS, t.head), (None, 0))
                from_s, to_g = tma.partition(store_o, so, go)
                cute.copy(store_o, from_s, to_g[None, row_tile * t.consumers + who])
                cute.arch.cp_async_bulk_commit_group()
                if cutlass.const_expr(not t.own_output):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            if cutlass.const_expr(t.persistent and not t.own_output):
                cute.arch.barrier(barrier_id=_OWN + who, number_of_threads=WARPGROUP)
                tma.release(q_empty + who)
            turn += 1
            index = _announced(tile_at, tile_full, tile_empty, turn) if t.persistent else z.tiles
        if warp_index % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _next(taken: cute.Pointer, tiles: Int32, programs: Int32):
    """The next tile that nobody has taken. Every tile that was taken asks once, so that the counter wraps to 0."""
    index = Int32(0)
    if cute.arch.lane_idx() == 0:
        index = programs + cute.arch.inline_ptx(
            "atom.global.relaxed.gpu.inc.u32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Int32],
            read_only_args=[taken.toint(), tiles - 1],
        )
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(index, 0))


def _announce(tile_at, tile_full, tile_empty, turn, index):
    """Tells the consumers which tile comes next."""
    slot = turn % _TILES
    cute.arch.mbarrier_wait(tile_empty + slot, turn // _TILES % 2 ^ 1)
    with cute.arch.elect_one():
        tile_at[slot] = index
        cute.arch.mbarrier_arrive(tile_full + slot)


def _announced(tile_at, tile_full, tile_empty, turn):
    """The tile that comes next."""
    slot = turn % _TILES
    cute.arch.mbarrier_wait(tile_full + slot, turn // _TILES % 2)
    index = cute.arch.make_warp_uniform(tile_at[slot])
    cute.arch.sync_warp()
    tma.release(tile_empty + slot)
    return index


def _scores(c, j):
    """Starts the scores of step ``j`` when it is this warpgroup's turn."""
    slot, phase = _slot(c, j)
    s = c.thr_qk.make_fragment_C(c.thr_qk.partition_shape_C((ROWS, c.tiles.keys)))
    cute.arch.mbarrier_wait(c.k_full + slot, phase)
    if c.tiles.ping_pong:
        cute.arch.barrier(barrier_id=c.turns[0], number_of_threads=2 * WARPGROUP)
    row_wise.multiply(c.mma_qk, s, c.q, c.k[None, None, None, slot], True)
    return s


def _weigh(c, j):
    """Starts the product of the probabilities with V of step ``j``."""
    slot, phase = _slot(c, j)
    cute.arch.mbarrier_wait(c.v_full + slot, phase)
    row_wise.multiply(c.mma_pv, c.o, c.p, c.v[None, None, None, slot], False)


def _pass_turn(c):
    """Lets the next warpgroup start its products."""
    if c.tiles.ping_pong:
        cute.arch.barrier_arrive(barrier_id=c.turns[1], number_of_threads=2 * WARPGROUP)


def _slot(c, j):
    """Slot of the rings, and phase of its mbarriers, of step ``j`` of the tile."""
    return (c.done + j) % c.tiles.stages, (c.done + j) // c.tiles.stages % 2


def _exponentials(c, j, s, first, masked):
    """Scores of step ``j`` become probabilities; what O is to be multiplied by is returned."""
    if masked:
        key = (c.end - 1 - j) * c.tiles.keys
        row_wise.hide(s, [i - key for i in c.last], [i - key for i in c.since], c.windowed)
    return row_wise.softmax(s, c.most, c.sums, c.scale, first, masked, c.tiles.lazy)


def _rescale(c, fades):
    """O times what ``_exponentials`` returned."""
    factors, grown = fades
    if grown is None:
        row_wise.rescale(c.o, factors)
    else:
        row_wise.rescale_where(c.o, grown, *factors)


def _start(c):
    """Step 0."""
    s = _scores(c, Int32(0))
    _pass_turn(c)
    warpgroup.wait_group(0)
    tma.release(c.k_empty + _slot(c, Int32(0))[0])
    _exponentials(c, Int32(0), s, True, True)
    row_wise.narrow(s, c.p)
    if not c.tiles.overlap:
        _weigh(c, Int32(0))
        warpgroup.wait_group(0)
        tma.release(c.v_empty + _slot(c, Int32(0))[0])


def _step(c, j, masked):
    """One block of keys; with ``overlap``, its scores and the product with V of the block before."""
    s = _scores(c, j)
    if c.tiles.overlap:
        _weigh(c, j - 1)
        _pass_turn(c)
        warpgroup.wait_group(1)
        tma.release(c.k_empty + _slot(c, j)[0])
        fades = _exponentials(c, j, s, False, masked)
        warpgroup.wait_group(0)
        tma.release(c.v_empty + _slot(c, j - 1)[0])
        row_wise.narrow(s, c.p)
        _rescale(c, fades)
    else:
        _pass_turn(c)
        warpgroup.wait_group(0)
        tma.release(c.k_empty + _slot(c, j)[0])
        fades = _exponentials(c, j, s, False, masked)
        row_wise.narrow(s, c.p)
        _rescale(c, fades)
        _weigh(c, j)
        warpgroup.wait_group(0)
        tma.release(c.v_empty + _slot(c, j)[0])
