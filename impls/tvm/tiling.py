"""Block sizes of the packed product, from the vector unit, the caches and the shape. Imports no TVM.

The product is blocked as in Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (ACM TOMS 34,
2008), with the operand that stays in L2 exchanged: a task packs a block of B into its L2 cache and streams all panels of
A past it, so that each element of B is packed once and by the core that uses it. Sizes follow from the machine instead
of a search, as in Low et al., "Analytical modeling is enough for high-performance BLIS" (ACM TOMS 43, 2016).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    lanes: int
    registers: int


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
    """(rows, vectors per row) whose sums, one row of B and one element of A fit the registers."""
    return [
        (mr, nv)
        for nv in range(1, 9)
        # Tensor intrinsics with an axis of length one do not match the loops they describe, so two rows at least.
        for mr in range(2, unit.registers)
        if mr * nv + nv + 1 <= unit.registers
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
    best: tuple[float, int, Tiling] | None = None
    over_batch = batch >= threads > 1
    words = max(words, 2)  # see register_tiles
    for mr, nv in register_tiles(unit):
        if m is not None and mr > max(m, 2):
            continue
        nr = nv * unit.lanes
        column_panels = -(-n // nr)
        if nv > 1 and column_panels * nr - n >= nr - unit.lanes:
            continue  # one vector less would do
        from_l2 = 4 * (mr + nr) / _L2_RATE
        cycles_per_word = max(mr * nv, mr + nv, _FMA_LATENCY, from_l2) + _L2_EXPOSED * from_l2
        # Without knowing M, a full tile is as likely as any.
        row_panels = None if m is None else -(-m // mr)
        most_blocks = 1 if whole_k else 1 + words // 256
        for k_blocks in range(1, 1 + most_blocks):
            unroll = max(1, min(8, 24 // (mr * nv)))
            kc = -(-(-(-words // k_blocks)) // unroll) * unroll
            fits = int(l2_bytes * _L2_SHARE) // (4 * nr * kc)
            if not fits and k_blocks < most_blocks:
                continue
            for column_blocks in _block_counts(column_panels, max(1, fits), threads):
                block_panels = -(-column_panels // column_blocks)
                for row_chunks in (1,) if over_batch else _chunk_counts(row_panels, column_blocks * batch, threads):
                    chunk = None if row_panels is None else -(-row_panels // row_chunks)
                    tasks = batch if over_batch else batch * row_chunks * column_blocks
                    tiles_per_task = (32 if chunk is None else chunk) * block_panels
                    if over_batch:
                        tiles_per_task *= column_blocks
                    tile = kc * k_blocks * cycles_per_word + k_blocks * _TILE_OVERHEAD
                    # Packing B: about three cycles per vector (load, store, the load's share of a miss).
                    pack = block_panels * nv * kc * k_blocks * 3 * (column_blocks if over_batch else 1)
                    per_task = tiles_per_task * tile + pack
                    total = -(-tasks // threads) * per_task
                    # Useful work is what counts: an unknown M is charged per row.
                    cost = total / (mr if chunk is None else 1)
                    parallel = threads > 1 and tasks > 1 and tasks * per_task > _SERIAL_CYCLES
                    if not parallel:
                        cost *= min(tasks, threads)
                    key = (cost, -mr * nv)
                    if best is None or key < best[:2]:
                        tiling = Tiling(
                            mr, nv, unit.lanes, kc, k_blocks, unroll, row_chunks, chunk, column_blocks, block_panels,
                            "batch" if over_batch else "blocks", parallel,
                            parallel and (m is None or batch * m * words > _SERIAL_PACK),
                        )  # fmt: skip
                        best = (*key, tiling)
    assert best is not None
    return best[2]


def _block_counts(panels: int, fits: int, threads: int) -> list[int]:
    """Numbers of column blocks worth a look: as few as the cache allows, and more so that threads share evenly."""
    fewest = -(-panels // fits)
    counts = {fewest, *(count for count in (threads, 2 * threads, 4 * threads) if fewest <= count <= panels)}
    return sorted({-(-panels // -(-panels // count)) for count in counts})


def _chunk_counts(row_panels: int | None, tasks: int, threads: int) -> list[int]:
    """Numbers of row chunks worth a look: more than one only where the column blocks leave threads idle."""
    most = threads if row_panels is None else row_panels
    return sorted({1, *(count for count in (-(-threads // tasks), -(-2 * threads // tasks)) if 1 < count <= most)})
