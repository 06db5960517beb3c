"""What a build of the CuTe DSL's GEMM kernel is specialised for, and the order of tiles. Imports no stack library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from impls.workloads.dtypes import dtype

# Rows of a warpgroup's wgmma.
ROWS = 64
# Shared memory of a CTA (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0).
SHARED_BYTES = 227 * 1024
# Registers of a thread for the sums of one slot, which promotion adds to the others.
_FRESH = 64
# Barriers, and what aligning A, B and the output to 1024 bytes may take.
_SPARE_BYTES = 2048


@dataclass(frozen=True)
class GemmTiles:
    """One build.

    Attributes:
        dtype, out: of A and B; of D, bias and residual.
        a_major, b_major: ``k`` where neighbours along K are neighbours in memory; else ``m``, ``n``.
        d_major: ``n`` where D is stored by rows, ``m`` by columns.
        epilogue: as a case's.
        grouped: rows of A and D are cut into groups with a B each.
        promoted: f8 alone: sums of 128 products are added to an f32 sum.
        bm, bn: a tile of D.
        stages: slots of the ring, each of 128 bytes along K.
        consumers: warpgroups that multiply.
        ping_pong: each has a tile of its own; otherwise they share one by rows.
        cluster_m, cluster_n: CTAs of a cluster along either axis.
    """

    #: What a library's name depends on, beside the tiles.
    sources: ClassVar[tuple[str, ...]] = ("cute_gemm_tiles.py", "kernels/cute_gemm.py", "kernels/cute_tma.py")

    dtype: str
    out: str
    a_major: str
    b_major: str
    d_major: str
    epilogue: str
    grouped: bool
    promoted: bool
    bm: int
    bn: int
    stages: int
    consumers: int
    ping_pong: bool
    cluster_m: int
    cluster_n: int

    @property
    def bk(self) -> int:
        """Elements of a slot along K: 128 bytes, a swizzled row."""
        return 128 // dtype(self.dtype).bytes

    @property
    def slabs(self) -> int:
        """Times 64 rows that a warpgroup has of a tile."""
        return self.bm // ROWS // (1 if self.ping_pong else self.consumers)

    @property
    def tiles_under_way(self) -> int:
        """Tiles that a CTA's warpgroups multiply side by side."""
        return self.consumers if self.ping_pong else 1

    @property
    def instruction_n(self) -> int:
        """N of a wgmma: the tile's, or with promotion such a part of it that the fresh sums' registers suffice."""
        return self.bn // self.parts

    @property
    def parts(self) -> int:
        """Parts of N that are multiplied one after the other."""
        if not self.promoted:
            return 1
        few = self.slabs * self.bn / 2 / _FRESH
        return next(parts for parts in range(1, self.bn + 1) if parts >= few and self.bn % (8 * parts) == 0)

    @property
    def panel(self) -> int:
        """Columns of D that a store takes out of shared memory: 128 bytes of a row at most."""
        return math.gcd(self.instruction_n, 128 // dtype(self.out).bytes if self.d_major == "n" else 64)

    @property
    def panels(self) -> int:
        """Panels of a slab that pass through shared memory together: of up to 8 KiB."""
        return max(1, min(self.bn // self.panel, 8192 // self.panel_bytes))

    @property
    def panel_bytes(self) -> int:
        """Of a panel in shared memory."""
        return ROWS * self.panel * dtype(self.out).bytes

    @property
    def out_slots(self) -> int:
        """Panels of a warpgroup that shared memory holds: twice those that pass through together."""
        return 2 * self.panels

    @property
    def shared_bytes(self) -> int:
        """A and B of every slot, and panels of D."""
        return (
            self.stages * 128 * (self.bm + self.bn) + self.consumers * self.out_slots * self.panel_bytes + _SPARE_BYTES
        )

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the warpgroup that loads, and of those that multiply.

        Of 65,536, in steps of 8, for (consumers + 1) * 128 threads.
        """
        if self.consumers == 2 and self.accumulators > 192:
            return 24, 240
        return {1: (56, 240), 2: (40, 232), 3: (32, 160)}[self.consumers]

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold sums."""
        return self.slabs * (self.bn + (self.instruction_n if self.promoted else 0)) // 2


def place(index: Any, rows: Any, columns: Any, raster: Any, band: Any, least: Any) -> tuple[Any, Any]:
    """Row and column of the tile that is number ``index`` in the order tiles of ``rows`` by ``columns`` are taken up.

    Bands of ``band`` tiles along one axis (rows, or columns where ``raster`` is 1) are gone over one after the other;
    in a band, along that axis first. What is taken up at the same time then shares rows and columns, which stay in L2.
    Traced with the DSL's integers and its ``least``, as well as run with Python's.
    """
    across = rows + raster * (columns - rows)  # tiles along the banded axis
    along = rows + columns - across
    first = index // (band * along) * band
    rest = index - first * along
    width = least(band, across - first)
    j = rest // width
    i = first + rest - j * width
    return i + raster * (j - i), j + raster * (i - j)
