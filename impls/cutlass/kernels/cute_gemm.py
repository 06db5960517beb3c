"""GEMM on Hopper in the CuTe DSL: a warp that loads, one to three warpgroups that multiply, tiles one after the other.

As many clusters as the device holds take up tiles of C, in an order that keeps neighbours close. In each CTA one warp
fills a ring of slots in shared memory by TMA; where CTAs of a cluster read the same part of A or B, each loads a share
of it and TMA writes that to all of them. Slots are handed over by mbarriers. Consumer warpgroups multiply by wgmma
either one tile together, each some of its rows (cooperative), or a tile each, in turns, so that one multiplies while
the other finishes its tile (ping-pong). The epilogue adds bias or residual in registers, passes panels through
shared memory and stores them by TMA; neither loads nor the other warpgroup wait for it.

f8 in f32: a slot holds 128 products of each sum, which are summed on their own and then added to the f32 sum
(promotion); N is cut in parts for it, so that two sets of sums fit the registers.

Owns the kernel and the host function that launches it. Sizes are arguments: one build serves every shape of its dtypes,
storage orders and tiles. Annotations are read when the DSL traces, so they are not postponed. It imports the DSL.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from impls.cutlass.cute_gemm_tiles import ROWS, GemmTiles, place
from impls.cutlass.kernels import cute_tma as tma
from impls.cutlass.kernels.cute_tma import WARP, WARPGROUP

# Named barriers: 0 is the CTA's, then each consumer's turn, then each consumer's own.
_TURN = 1
_OWN = 4
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


class Gemm:
    """The kernel for one choice of dtypes, storage orders, epilogue and tiles."""

    def __init__(self, tiles: GemmTiles):
        self.tiles = tiles
        self.dtype, self.out = tma.DTYPES[tiles.dtype], tma.DTYPES[tiles.out]

    def examples(self):
        """Arguments to trace with, but for the stream."""
        kinds = (
            self.dtype,
            self.dtype,
            Int32 if self.tiles.grouped else self.out,
            self.out,
        )
        return [*tma.pointers(kinds), *[Int32(1)] * 7]

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        addend: cute.Pointer,
        d: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        raster: Int32,
        band: Int32,
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        """Launches D = epilogue(A B) on ``stream``; every matrix is contiguous, and so are batches.

        Args:
            a, b: (m, k) and (k, n), stored as the tiles say.
            batch: products; where grouped, groups: of a product's rows, with a B each.
            addend: bias of n (of m, where D is stored by columns), residual as D, or the groups' rows, in 32 bits; not
                read without.
            raster: 0 where tiles are taken up along m first, 1 along n.
            band: clusters along that axis before the other one advances.
            clusters: of the grid, at most as many as there are tiles for.
        """
        t = self.tiles
        a_by_k, b_by_k, d_by_n = t.a_major == "k", t.b_major == "k", t.d_major == "n"
        vector = 128 // self.dtype.width
        m_a, n_b, k_ab = m, n, k
        if cutlass.const_expr(a_by_k or b_by_k):
            k_ab = cute.assume(k, divby=vector)
        if cutlass.const_expr(not a_by_k):
            m_a = cute.assume(m, divby=vector)
        if cutlass.const_expr(not b_by_k):
            n_b = cute.assume(n, divby=vector)
        out_vector = 128 // self.out.width
        a_strides = (k_ab, 1) if a_by_k else (1, m_a)
        b_strides = (k_ab, 1) if b_by_k else (1, n_b)
        one = 1 if t.grouped else batch
        ma = cute.make_tensor(a, cute.make_layout((m, k, one), stride=(*a_strides, m_a * k_ab)))
        mb = cute.make_tensor(b, cute.make_layout((n, k, batch), stride=(*b_strides, n_b * k_ab)))
        m_d, n_d = (m, cute.assume(n, divby=out_vector)) if d_by_n else (cute.assume(m, divby=out_vector), n)
        d_layout = cute.make_layout((m, n, one), stride=(*((n_d, 1) if d_by_n else (1, m_d)), m_d * n_d))
        md = plain = cute.make_tensor(d, d_layout)
        if cutlass.const_expr(t.epilogue == "residual"):
            added = cute.make_tensor(addend, d_layout)
        elif cutlass.const_expr(t.grouped):
            added = cute.make_tensor(addend, cute.make_layout(batch))
        else:
            added = cute.make_tensor(addend, cute.make_layout(n if d_by_n else m))

        tile = (t.bm, t.bn, t.bk)
        by_k, by_mn = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        majors = (by_k if a_by_k else by_mn, by_k if b_by_k else by_mn)
        mma, panel_mma = (
            hopper.make_trivial_tiled_mma(self.dtype, self.dtype, *majors, Float32, (1, 1, 1), (ROWS, width))
            for width in (t.instruction_n, t.panel)
        )
        row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        a_layout = hopper.make_smem_layout_a(row if a_by_k else column, tile, self.dtype, t.stages)
        b_layout = hopper.make_smem_layout_b(column if not b_by_k else row, tile, self.dtype, t.stages)
        d_smem = hopper.make_smem_layout_epi(
            self.out, row if d_by_n else column, (ROWS, t.panel), t.consumers * t.out_slots
        )
        load_a, ma = self.loading(ma, a_layout, (t.bm, t.bk), t.cluster_n)
        load_b, mb = self.loading(mb, b_layout, (t.bn, t.bk), t.cluster_m)
        store, md = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), md, d_smem, (ROWS, t.panel))
        self.kernel(
            load_a, ma, load_b, mb, store, md, plain, added, m, n, k, batch, raster, band,
            a_layout, b_layout, d_smem, mma, panel_mma,
        ).launch(
            grid=[clusters * t.cluster_m * t.cluster_n, 1, 1],
            block=[(t.consumers + 1) * WARPGROUP, 1, 1],
            cluster=[t.cluster_m * t.cluster_n, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def loading(self, matrix, layout, box, sharers):
        """A load by TMA of boxes of a matrix, which as many CTAs of a cluster share, and the matrix as it sees it."""
        kind = cpasync.CopyBulkTensorTileG2SMulticastOp if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp
        return cpasync.make_tiled_tma_atom(kind(), matrix, layout, box, num_multicast=sharers)

    @cute.kernel
    def kernel(
        self,
        load_a: cute.CopyAtom, ma: cute.Tensor,
        load_b: cute.CopyAtom, mb: cute.Tensor,
        store: cute.CopyAtom, md: cute.Tensor, plain: cute.Tensor, added: cute.Tensor,
        m: Int32, n: Int32, k: Int32, batch: Int32, raster: Int32, band: Int32,
        a_layout: cute.ComposedLayout, b_layout: cute.ComposedLayout, d_layout: cute.ComposedLayout,
        mma: cute.TiledMma, panel_mma: cute.TiledMma,
    ):  # fmt: skip
        """All tiles of a CTA, one after the other."""
        t = self.tiles
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        a_size, b_size, d_size = (cute.cosize(x) for x in (a_layout, b_layout, d_layout))

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[cutlass.Int64, t.stages]
            empty: cute.struct.MemRange[cutlass.Int64, t.stages]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, a_size], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, b_size], 1024]
            d: cute.struct.Align[cute.struct.MemRange[self.out, d_size], 1024]

        shared = SmemAllocator().allocate(Shared)
        sa = tma.swizzled(shared.a, a_layout)
        sb = tma.swizzled(shared.b, b_layout)
        sd = tma.swizzled(shared.d, d_layout)
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        ctas = t.cluster_m * t.cluster_n
        if warp_index == 0:
            # Every warp that multiplies, of every CTA that this one's shares go to or that shares with it.
            warps = t.consumers // t.tiles_under_way * 4 * (t.cluster_m + t.cluster_n - 1)
            tma.prepare((load_a, load_b, store), (t.stages, (full, 1), (empty, warps)))
        if cutlass.const_expr(ctas > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(t.registers[0])
            if warp_index == 0:
                self.load(
                    load_a,
                    ma,
                    sa,
                    load_b,
                    mb,
                    sb,
                    full,
                    empty,
                    added,
                    m,
                    n,
                    k,
                    batch,
                    raster,
                    band,
                )
        else:
            cute.arch.setmaxregister_increase(t.registers[1])
            self.multiply(
                sa, sb, sd, full, empty, store, md, plain, added, mma, panel_mma, m, n, k, batch, raster, band
            )  # fmt: skip
        if cutlass.const_expr(ctas > 1):
            # Nobody leaves while others may still write into its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def count(self, added: cute.Tensor, m: Int32, n: Int32, batch: Int32):
        """A cluster's tiles of all products, or of all groups."""
        rows = cute.ceil_div(m, self.tiles.bm * self.tiles.cluster_m) * batch
        if cutlass.const_expr(self.tiles.grouped):
            rows = Int32(0)
            for g in cutlass.range(batch, unroll=1):
                rows += cute.ceil_div(added[g], self.tiles.bm * self.tiles.cluster_m)
        return rows * cute.ceil_div(n, self.tiles.bn * self.tiles.cluster_n)

    @cute.jit
    def advance(
        self,
        added: cute.Tensor,
        index: Int32,
        entry: Int32,
        before: Int32,
        first: Int32,
        m: Int32,
        n: Int32,
    ):
        """The product or group of a tile by its number, which no earlier call's was above.

        Args:
            entry, before, first: as the last call returned them; 0 at first.

        Returns:
            The product or group, tiles before it, its first row, and its rows.
        """
        columns = cute.ceil_div(n, self.tiles.bn * self.tiles.cluster_n)
        rows = m
        if cutlass.const_expr(self.tiles.grouped):
            rows = added[entry]
            there = cute.ceil_div(rows, self.tiles.bm * self.tiles.cluster_m) * columns
            while index >= before + there:
                before += there
                first += rows
                entry += 1
                rows = added[entry]
                there = cute.ceil_div(rows, self.tiles.bm * self.tiles.cluster_m) * columns
        else:
            there = cute.ceil_div(rows, self.tiles.bm * self.tiles.cluster_m) * columns
            entry = index // there
            before = entry * there
        return entry, before, first, rows

    def place(self, index, m, n, raster, band):
        """Coordinates, in clusters, of a cluster's tile by its number within its product."""
        rows = cute.ceil_div(m, self.tiles.bm * self.tiles.cluster_m)
        columns = cute.ceil_div(n, self.tiles.bn * self.tiles.cluster_n)
        return place(index, rows, columns, raster, band, cutlass.min)

    @cute.jit
    def load(
        self, load_a: cute.CopyAtom, ma: cute.Tensor, sa: cute.Tensor, load_b: cute.CopyAtom, mb: cute.Tensor,
        sb: cute.Tensor, full: cute.Pointer, empty: cute.Pointer, added: cute.Tensor, m: Int32, n: Int32, k: Int32,
        batch: Int32, raster: Int32, band: Int32,
    ):  # fmt: skip
        """One warp: A and B of every tile, slot after slot."""
        t = self.tiles
        cm, cn = t.cluster_m, t.cluster_n
        rank = cute.arch.block_idx()[0] % (cm * cn)
        at_m, at_n = rank % cm, rank // cm
        # Bit r: the CTA of rank r gets a copy.
        mask_a = cutlass.Int16(Int32(sum(1 << (cm * j) for j in range(cn))) << at_m)
        mask_b = cutlass.Int16(Int32((1 << cm) - 1) << (at_n * cm))
        slot_bytes = (t.bm + t.bn) * t.bk * self.dtype.width // 8
        blocks = cute.ceil_div(k, t.bk)
        tiles = self.count(added, m, n, batch)
        entry, before, first = Int32(0), Int32(0), Int32(0)
        index = cute.arch.block_idx()[0] // (cm * cn)
        step = cute.arch.grid_dim()[0] // (cm * cn)
        slot, phase = Int32(0), Int32(1)
        while index < tiles:
            entry, before, first, rows = self.advance(added, index, entry, before, first, m, n)
            i, j = self.place(index - before, rows, n, raster, band)
            in_a = cute.domain_offset((first, 0), ma[None, None, 0]) if t.grouped else ma[None, None, entry]
            ga = cute.local_tile(in_a, (t.bm, t.bk), (i * cm + at_m, None))
            gb = cute.local_tile(mb[None, None, entry], (t.bn, t.bk), (j * cn + at_n, None))
            to_a, from_a = tma.partition(load_a, sa, ga, at_n, cn)
            to_b, from_b = tma.partition(load_b, sb, gb, at_m, cm)
            for block in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(empty + slot, phase)
                tma.expect(full + slot, slot_bytes)
                # Masks are read where a load goes to several CTAs.
                cute.copy(load_a, from_a[None, block], to_a[None, slot], tma_bar_ptr=full + slot, mcast_mask=mask_a)
                cute.copy(load_b, from_b[None, block], to_b[None, slot], tma_bar_ptr=full + slot, mcast_mask=mask_b)
                slot += 1
                if slot == t.stages:
                    slot = Int32(0)
                    phase ^= 1
            index += step

    @cute.jit
    def multiply(
        self, sa: cute.Tensor, sb: cute.Tensor, sd: cute.Tensor, full: cute.Pointer, empty: cute.Pointer,
        store: cute.CopyAtom, md: cute.Tensor, plain: cute.Tensor, added: cute.Tensor, mma: cute.TiledMma,
        panel_mma: cute.TiledMma, m: Int32, n: Int32, k: Int32, batch: Int32, raster: Int32, band: Int32,
    ):  # fmt: skip
        """A consumer warpgroup: its rows of every tile, or with ping-pong every second tile."""
        t = self.tiles
        cm, cn = t.cluster_m, t.cluster_n
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        who = warp_index // 4 - 1
        rank = cute.arch.block_idx()[0] % (cm * cn)
        at_m, at_n = rank % cm, rank // cm
        lane = cute.arch.lane_idx()
        # Lane r tells the CTA of rank r that this warp is done with a slot, if that CTA loads into this one.
        tells = lane < cm * cn and (lane % cm == at_m or lane // cm == at_n)

        thr = mma.get_slice(thread)
        slabs = t.slabs  # of 64 rows, of this warpgroup
        first_slab = Int32(0) if t.ping_pong else who * slabs
        # This warpgroup's rows of A; B, and the sums, by parts of N.
        mine_a = cute.local_tile(sa, (ROWS * slabs, t.bk, t.stages), (Int32(0) if t.ping_pong else who, 0, 0))
        fa = thr.make_fragment_A(thr.partition_A(mine_a))
        parts = [cute.local_tile(sb, (t.instruction_n, t.bk, t.stages), (i, 0, 0)) for i in range(t.parts)]
        fb = [thr.make_fragment_B(thr.partition_B(part)) for part in parts]
        shape = thr.partition_shape_C((ROWS * slabs, t.instruction_n))
        acc = [thr.make_fragment_C(shape) for _ in parts]
        fresh = thr.make_fragment_C(shape) if t.promoted else acc[0]
        atom = cute.make_mma_atom(mma.op)

        copy = cute.make_tiled_copy_C(cute.make_copy_atom(self.store_op(), self.out), panel_mma)
        mine = copy.get_slice(thread)
        panel = panel_mma.get_slice(thread).make_fragment_C(
            panel_mma.get_slice(thread).partition_shape_C((ROWS, t.panel))
        )
        narrow = cute.make_rmem_tensor_like(panel, self.out)

        blocks = cute.ceil_div(k, t.bk)
        tiles = self.count(added, m, n, batch)
        entry, before, first = Int32(0), Int32(0), Int32(0)
        index = cute.arch.block_idx()[0] // (cm * cn)
        step = cute.arch.grid_dim()[0] // (cm * cn)
        done = Int32(0)
        if cutlass.const_expr(t.ping_pong):
            index += who * step
            done = who * blocks
            if who == 0:  # the first has the first turn
                cute.arch.barrier_arrive(barrier_id=_TURN, number_of_threads=2 * WARPGROUP)
        while index < tiles:
            entry, before, first, rows = self.advance(added, index, entry, before, first, m, n)
            i, j = self.place(index - before, rows, n, raster, band)
            slot, phase = done % t.stages, done // t.stages % 2
            if cutlass.const_expr(t.ping_pong):
                cute.arch.barrier(barrier_id=_TURN + who, number_of_threads=2 * WARPGROUP)
            if cutlass.const_expr(t.promoted):
                for c in cutlass.range_constexpr(t.parts):
                    acc[c].fill(0.0)
                for _ in cutlass.range(blocks, unroll=1):
                    cute.arch.mbarrier_wait(full + slot, phase)
                    for c in cutlass.range_constexpr(t.parts):
                        self.block(atom, fresh, fa, fb[c], slot, True)
                        warpgroup.wait_group(0)
                        acc[c].store(acc[c].load() + fresh.load())
                    if tells:
                        self.tell(empty + slot, lane)
                    slot += 1
                    if slot == t.stages:
                        slot = Int32(0)
                        phase ^= 1
                if cutlass.const_expr(t.ping_pong):
                    cute.arch.barrier_arrive(barrier_id=_TURN + 1 - who, number_of_threads=2 * WARPGROUP)
            else:
                last = slot
                cute.arch.mbarrier_wait(full + slot, phase)
                self.block(atom, acc[0], fa, fb[0], slot, True)
                slot += 1
                if slot == t.stages:
                    slot = Int32(0)
                    phase ^= 1
                for _ in cutlass.range(1, blocks, unroll=1):
                    cute.arch.mbarrier_wait(full + slot, phase)
                    self.block(atom, acc[0], fa, fb[0], slot, False)
                    warpgroup.wait_group(1)
                    if tells:
                        self.tell(empty + last, lane)
                    last = slot
                    slot += 1
                    if slot == t.stages:
                        slot = Int32(0)
                        phase ^= 1
                if cutlass.const_expr(t.ping_pong):
                    cute.arch.barrier_arrive(barrier_id=_TURN + 1 - who, number_of_threads=2 * WARPGROUP)
                warpgroup.wait_group(0)
                if tells:
                    self.tell(empty + last, lane)
            done += blocks * t.tiles_under_way

            # Epilogue: panels of 64 rows, some at a time, through slots that the last ones but one have left.
            in_d = cute.domain_offset((first, 0), md[None, None, 0]) if t.grouped else md[None, None, entry]
            gd = cute.local_tile(in_d, (ROWS, t.panel), (None, None))
            from_d, to_d = tma.partition(store, sd, gd)
            tile_row, tile_column = i * cm + at_m, j * cn + at_n
            across = t.bn // t.panel
            starts = list(range(0, across, t.panels))
            for s in cutlass.range_constexpr(slabs):
                slab = tile_row * (t.bm // ROWS) + first_slab + s
                row = slab * ROWS + thread // WARP * 16 + thread % WARP // 4
                whole = not t.grouped or slab * ROWS + ROWS <= rows
                for turn in cutlass.range_constexpr(len(starts)):
                    there = range(starts[turn], min(starts[turn] + t.panels, across))
                    into = who * t.out_slots + (s * len(starts) + turn) % 2 * t.panels
                    if whole:
                        if warp_index % 4 == 0:
                            # Their number may be odd, so that a tile's first may follow another in the same slots.
                            cute.arch.cp_async_bulk_wait_group(min(s + turn, 1), read=True)
                        cute.arch.barrier(barrier_id=_OWN + who, number_of_threads=WARPGROUP)
                    for p in cutlass.range_constexpr(there.start, there.stop):
                        column = (tile_column * across + p) * t.panel + thread % 4 * 2
                        sums = acc[p * t.panel // t.instruction_n]
                        self.finish(sums, narrow, s, p, added, entry, row, column, m, n)
                        if whole:
                            cute.copy(
                                copy,
                                mine.retile(narrow),
                                mine.partition_D(sd[None, None, into + p - there.start]),
                            )
                        elif slab * ROWS < rows:  # the next rows are another group's
                            self.scatter(narrow, plain, first, row, column, rows, n)
                    if whole:
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.barrier(barrier_id=_OWN + who, number_of_threads=WARPGROUP)
                        if warp_index % 4 == 0:
                            for p in cutlass.range_constexpr(there.start, there.stop):
                                cute.copy(
                                    store,
                                    from_d[None, into + p - there.start],
                                    to_d[None, slab, tile_column * across + p],
                                )
                            cute.arch.cp_async_bulk_commit_group()
            index += step * t.tiles_under_way
        if warp_index % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def scatter(
        self,
        narrow: cute.Tensor,
        plain: cute.Tensor,
        first: Int32,
        row: Int32,
        column: Int32,
        rows: Int32,
        n: Int32,
    ):
        """A panel of D from registers, up to a group's last row."""
        flat = cute.make_tensor(narrow.iterator, cute.make_layout(self.tiles.panel // 2))
        for h in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.tiles.panel // 4):
                e = c // 2 * 8 + c % 2
                if row + 8 * h < rows and column + e < n:
                    plain[first + row + 8 * h, column + e, 0] = flat[c // 2 * 4 + 2 * h + c % 2]

    def store_op(self):
        """How registers go to shared memory: by stmatrix where elements have 16 bits."""
        if self.out.width == 16:
            return warp.StMatrix8x8x16bOp(self.tiles.d_major == "m", 4 if self.tiles.panel > 8 else 2)
        return cute.nvgpu.CopyUniversalOp()

    def tell(self, barrier, lane):
        """Gives a slot back to the warp that loads, here or in another CTA."""
        if self.tiles.cluster_m * self.tiles.cluster_n > 1:
            cute.arch.mbarrier_arrive(barrier, lane)
        else:
            cute.arch.mbarrier_arrive(barrier)

    def block(self, atom, acc, fa, fb, slot, fresh):
        """Starts the products of a slot as one group of wgmma."""
        warpgroup.fence()
        for kb in range(cute.size(fa, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, not (fresh and kb == 0))
            cute.gemm(atom, acc, fa[None, None, kb, slot], fb[None, None, kb, slot], acc)
        warpgroup.commit_group()

    @cute.jit
    def finish(
        self, acc: cute.Tensor, narrow: cute.Tensor, s: cutlass.Constexpr, p: cutlass.Constexpr, added: cute.Tensor,
        entry: Int32, row: Int32, column: Int32, m: Int32, n: Int32,
    ):  # fmt: skip
        """The sums of panel ``p`` of slab ``s``, with the epilogue, in the output's dtype.

        A thread holds of each 8 columns two neighbours in rows ``row`` and ``row + 8`` (PTX ISA, "wgmma: register
        fragments and shared memory matrix layouts").
        """
        t = self.tiles
        held = t.panel // 2
        # Sums of a slab lie one after the other, those of later columns behind those of earlier ones.
        begin = s * (ROWS * t.instruction_n // WARPGROUP) + p * t.panel % t.instruction_n // 2
        sums = cute.make_tensor(acc.iterator + begin, cute.make_layout(held))
        rows = (row, row + 8)
        if cutlass.const_expr(t.epilogue == "none"):
            narrow_flat = cute.make_tensor(narrow.iterator, cute.make_layout(held))
            narrow_flat.store(sums.load().to(self.out))
        else:
            flat = cute.make_tensor(narrow.iterator, cute.make_layout(held))
            addends = cute.make_rmem_tensor(held, self.out)
            if cutlass.const_expr(t.epilogue == "residual"):
                for h in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(t.panel // 4):
                        e = c // 2 * 8 + c % 2
                        v = c // 2 * 4 + 2 * h + c % 2
                        addends[v] = self.out(0)
                        if rows[h] < m and column + e < n:
                            addends[v] = added[rows[h], column + e, entry]
            elif cutlass.const_expr(t.d_major == "n"):
                for c in cutlass.range_constexpr(t.panel // 4):
                    e = c // 2 * 8 + c % 2
                    value = self.out(0)
                    if column + e < n:
                        value = added[column + e]
                    addends[c // 2 * 4 + c % 2] = value
                    addends[c // 2 * 4 + c % 2 + 2] = value
            else:
                for h in cutlass.range_constexpr(2):
                    value = self.out(0)
                    if rows[h] < m:
                        value = added[rows[h]]
                    for c in cutlass.range_constexpr(t.panel // 4):
                        addends[c // 2 * 4 + 2 * h + c % 2] = value
            for v in cutlass.range_constexpr(held):
                flat[v] = self.out(self.activation(sums[v] + Float32(addends[v])))

    def activation(self, z):
        """ReLU, or GELU in its tanh form, of one sum."""
        if self.tiles.epilogue == "bias+relu":
            return cutlass.max(z, Float32(0.0))
        if self.tiles.epilogue == "bias+gelu":
            # z / 2 (1 + tanh u) = z / (1 + exp(-2 u)), which needs no tanh: one exp2 and one reciprocal.
            u = z * (_SQRT_2_OVER_PI + _SQRT_2_OVER_PI * 0.044715 * z * z)
            return z * cute.arch.rcp_approx(1.0 + cute.math.exp2(u * (-2.0 * math.log2(math.e)), fastmath=True))
        return z
