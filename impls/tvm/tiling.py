"""Block sizes of the packed product, from the vector unit, the caches and the shape. Imports no TVM.

The product is blocked as in Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (ACM TOMS 34,
2008), with the operand that stays in L2 exchanged: a task packs a block of B into its L2 cache and streams all panels
of A past it, so that each element of B is packed once and by the core that uses it. Sizes follow from the machine
instead of a search, as in Low et al., "Analytical modeling is enough for high-performance BLIS" (ACM TOMS 43, 2016).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# A packed block of B may take this share of a core's L2; the rest is for A's panels and the sums in flight.
_L2_SHARE = 0.5
# Latency of a fused multiply-add in cycles (Zen 4, Golden Cove: 4; uops.info): a tile with fewer sums has to wait.
_FMA_LATENCY = 4
# Bytes per cycle that L2 gives L1 (Zen 4, Golden Cove: 32 at most), and the share of that time that is not hidden.
_L2_RATE = 24
_L2_EXPOSED = 0.15
# Cycles that a tile costs beside its sums: loop entry, sums to memory and on to C. Measured as the intercept over K
# on a Zen 4 (14 x 32 tile).
_TILE_OVERHEAD = 60
# Cycles in which a vector of B is packed: a load, a store, a share of a cache miss.
_PACK_CYCLES = 3
# Words in a block of K at the least, where K is cut at all.
_LEAST_KC = 256
# Panels of A that are reckoned with where M is not known.
_SOME_PANELS = 32
# A parallel region costs about 7 us (two threads of a Zen 4 that sleep between regions): below this many cycles of
# work a second thread does not pay.
_SERIAL_CYCLES = 40_000
# Elements of A below which one thread packs it.
_SERIAL_PACK = 1 << 15


@dataclass(frozen=True)
class VectorUnit:
    """What the micro-kernel has to work with.

    Attributes:
        lanes: 32-bit lanes of a vector register.
        registers: vector registers.
        temporaries: of those, what LLVM needs beside the sums and a row of B: elements of A (x86 repeats them straight
            from memory, one at a time; for aarch64 LLVM loads several ahead), products that are not added at once.
    """

    lanes: int
    registers: int
    temporaries: int = 1


@dataclass(frozen=True)
class Tiling:
    """Block sizes of one product, in elements unless said otherwise; K in packed words.

    Attributes:
        mr: rows of the register tile.
        nv: vectors per row of the register tile.
        lanes: lanes of a vector.
        kc: words of K in one block.
        k_blocks: blocks of K.
        unroll: words of K per iteration of the innermost loop; divides kc.
        row_chunks: tasks that share a block of B's columns, each with its own panels of A.
        panels: panels of A in a chunk; None where M is symbolic.
        column_blocks: blocks of B's columns.
        block_panels: panels of B in a block.
        tasks_over: ``batch`` where a task is a whole product, else ``blocks``.
        parallel: whether tasks run on several threads.
        parallel_pack: whether A is packed by several threads.
    """

    mr: int
    nv: int
    lanes: int
    kc: int
    k_blocks: int
    unroll: int
    row_chunks: int
    panels: int | None
    column_blocks: int
    block_panels: int
    tasks_over: str
    parallel: bool
    parallel_pack: bool

    @property
    def nr(self) -> int:
        """Columns of the register tile."""
        return self.nv * self.lanes


def register_tiles(unit: VectorUnit) -> list[tuple[int, int]]:
    """(rows, vectors per row) whose sums and one row of B fit the registers."""
    return [
        (mr, nv)
        for nv in range(1, 9)
        # Tensor intrinsics with an axis of length one do not match the loops they describe, so two rows at least.
        for mr in range(2, unit.registers)
        if mr * nv + nv + unit.temporaries <= unit.registers
    ]


def choose(
    m: int | None, n: int, words: int, *, batch: int, threads: int, unit: VectorUnit, l2_bytes: int, whole_k: bool
) -> Tiling:
    """The tiling with the least estimated time of the busiest thread.

    Args:
        m: rows of C; None where they are known only at run time.
        n: columns of C.
        words: packed words along K.
        batch: products of this shape.
        threads: threads that the product may use.
        unit: the vector unit.
        l2_bytes: L2 cache of a core.
        whole_k: K must be one block.
    """
    # Tensor intrinsics with an axis of length one do not match the loops they describe.
    words = max(words, 2)
    over_batch = batch >= threads > 1
    best: tuple[float, int, Tiling] | None = None
    for mr, nv in register_tiles(unit):
        column_panels = _ceil(n, nv * unit.lanes)
        too_tall = m is not None and mr > max(m, 2)
        too_wide = nv > 1 and column_panels * nv * unit.lanes - n >= (nv - 1) * unit.lanes
        if too_tall or too_wide:
            continue
        row_panels = None if m is None else _ceil(m, mr)
        unroll = max(1, min(8, 24 // (mr * nv)))
        for k_blocks in range(1, 2 if whole_k else 2 + words // _LEAST_KC):
            kc = _ceil(_ceil(words, k_blocks), unroll) * unroll
            fitting = int(l2_bytes * _L2_SHARE) // (4 * nv * unit.lanes * kc)
            for column_blocks in _block_counts(column_panels, max(1, fitting), threads):
                tasks = batch * column_blocks
                for row_chunks in [1] if over_batch else _chunk_counts(row_panels, tasks, threads):
                    panels = None if row_panels is None else _ceil(row_panels, row_chunks)
                    blocks = (column_blocks, _ceil(column_panels, column_blocks))
                    over = "batch" if over_batch else "blocks"
                    tiling = Tiling(
                        mr, nv, unit.lanes, kc, k_blocks, unroll, row_chunks, panels, *blocks, over, False, False
                    )
                    cycles, parallel = _estimate(tiling, batch, threads)
                    # Of an unknown M what counts is the time per row.
                    key = (cycles / (mr if m is None else 1), -mr * nv)
                    if best is None or key < best[:2]:
                        pack = parallel and (m is None or batch * m * words > _SERIAL_PACK)
                        best = (*key, replace(tiling, parallel=parallel, parallel_pack=pack))
    assert best is not None
    return best[2]


def _estimate(t: Tiling, batch: int, threads: int) -> tuple[float, bool]:
    """Cycles until the last thread is done, and whether it takes more than one."""
    from_l2 = 4 * (t.mr + t.nr) / _L2_RATE
    word = max(t.mr * t.nv, t.mr + t.nv, _FMA_LATENCY, from_l2) + _L2_EXPOSED * from_l2
    tile = t.k_blocks * (t.kc * word + _TILE_OVERHEAD)
    packing = t.block_panels * t.nv * t.kc * t.k_blocks * _PACK_CYCLES
    block = (_SOME_PANELS if t.panels is None else t.panels) * t.block_panels * tile + packing
    if t.tasks_over == "batch":
        tasks, task = batch, block * t.column_blocks
    else:
        tasks, task = batch * t.row_chunks * t.column_blocks, block
    parallel = threads > 1 and tasks > 1 and tasks * task > _SERIAL_CYCLES
    return (_ceil(tasks, threads) if parallel else tasks) * task, parallel


def _block_counts(panels: int, fitting: int, threads: int) -> list[int]:
    """Numbers of column blocks worth a look: as few as the cache allows, and more so that threads share evenly."""
    fewest = _ceil(panels, fitting)
    counts = {fewest, *(count for count in (threads, 2 * threads, 4 * threads) if fewest <= count <= panels)}
    return sorted({_ceil(panels, _ceil(panels, count)) for count in counts})


def _chunk_counts(row_panels: int | None, tasks: int, threads: int) -> list[int]:
    """Numbers of row chunks worth a look: more than one only where the column blocks leave threads idle."""
    most = threads if row_panels is None else row_panels
    return sorted({1, *(count for count in (_ceil(threads, tasks), _ceil(2 * threads, tasks)) if 1 < count <= most)})


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
