"""Which tile a GEMM kernel runs with: what tuning chose for the nearest shape, or a rule where nothing was tuned.

Owns the tile's parameters and the choice. A device that nothing was tuned on takes what was chosen on the H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from impls.support import tuned
from impls.support.h200 import MULTIPROCESSORS
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

_STACK = Path(__file__).parent
# Shared memory that a block may have, less what barriers and the like take (CUDA C++ programming guide, compute
# capability 9.0).
SHARED_BYTES = 227 * 1024 - 1024
# Doublings of sizes, in all, beyond which a tuned case says nothing of another.
FAR = 6.0


@dataclass(frozen=True)
class Tile:
    """How a GEMM kernel cuts its work.

    Attributes:
        bm, bn, bk: rows, columns and summed length of a program's step.
        group: rows of tiles that are walked together.
        warps, stages: warps of a program, steps of the software pipeline.
        split: programs that share one tile's K.
        per_sm: persistent programs per multiprocessor.
        halves: C leaves in two halves, for less shared memory.
        flatten: the loops over tiles and over K are pipelined as one.
        tma: operands come by descriptors, where a kernel has both ways.
        pair: the tile is two of half the rows, products of their own: promoted sums take half of the registers.
        defer: C, in halves, waits in registers until the next tile's first products run.
    """

    bm: int
    bn: int
    bk: int
    group: int = 8
    warps: int = 8
    stages: int = 3
    split: int = 1
    per_sm: int = 1
    halves: bool = False
    flatten: bool = False
    tma: bool = False
    pair: bool = False
    defer: bool = False

    def options(self) -> dict[str, int]:
        """For Triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def config(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


@dataclass(frozen=True)
class Tuned:
    """What tuning chose for a case, and in words where that comes from."""

    case_id: str
    choice: dict[str, Any]
    origin: str


def nearest(
    name: str,
    case: Case,
    device_name: str,
    alike: Callable[[Any], Any],
    sizes: Callable[[Any], Sequence[float]],
    far: float = math.inf,
) -> Tuned | None:
    """The tuned case that lies nearest to ``case``, and what was chosen for it.

    Args:
        name: the implementation, ``triton.tiled``.
        case: the case to be run.
        device_name: as the vendor writes it.
        alike: of a case, what must be the same.
        sizes: of a case, what may differ: the distance is the sum of the differences of base-2 logarithms.
        far: the distance at which a choice says nothing any more.

    Returns:
        None where nothing alike was tuned that near.
    """
    kept = tuned.nearest(_STACK, device_name)
    here = [math.log2(size) for size in sizes(case)]
    best, found = far, None
    for other, choice in tuned.around(kept, name, case):
        if type(other) is type(case) and alike(other) == alike(case):
            distance = sum(abs(x - math.log2(size)) for x, size in zip(here, sizes(other), strict=True))
            if distance < best:
                best, found = distance, Tuned(other.id, choice, tuned.origin(kept, name, other.id))
    return found


def choose(name: str, case: Gemm, device_name: str) -> tuple[Tile, str]:
    """The tile for a case, and where it comes from: ``tuned for <case id> in <seconds> s`` or ``rule``."""
    variant = name.partition(".")[2]
    found = nearest(name, case, device_name, gemm_kind, gemm_sizes, FAR)
    tile, origin = (Tile(**found.choice), found.origin) if found else (rule(variant, case), "rule")
    if variant == "split_k" and found is not None and found.case_id != case.id:
        tile = replace(tile, split=parts(tile, case))  # its tiles are more, or fewer
    return fitted(variant, tile, case), origin


def gemm_kind(case: Gemm) -> tuple[Any, ...]:
    """What a tuned case must have in common with the case to be run."""
    # f16 and bf16 take the same instructions and bytes.
    kind = case.dtype if case.dtype not in ("f16", "bf16") else "16 bits"
    return kind, case.acc, case.groups is None


def gemm_sizes(case: Gemm) -> tuple[float, ...]:
    """What it may differ in."""
    # Another layout counts as much as one size that is twice as large, an epilogue as half of that.
    layout = tuple(2.0 if stored == "t" else 1.0 for stored in case.layout)
    groups = len(case.groups) if case.groups else 1
    return (*layout, 1.0 if case.epilogue == "none" else math.sqrt(2), case.batch, groups, case.m, case.n, case.k)


def rule(variant: str, case: Gemm) -> Tile:
    """A tile that fits sm_90's shared memory and registers, for what was not tuned."""
    width = dtype(case.dtype).bytes
    bk = 128 // width
    if case.dtype == "f32":
        return Tile(64, 64, 16, warps=4, stages=3, per_sm=2)
    if variant == "split_k":
        bm = 16 if case.m <= 16 else 32 if case.m <= 32 else 64
        tile = Tile(bm, 64, 2 * bk if case.dtype != "f8e4m3" else bk, warps=4, stages=4)
        return replace(tile, split=parts(tile, case))
    if variant == "persistent_tma_ws":
        return Tile(128, 128, bk, warps=4, stages=3)
    # Promoted sums of f8 hold two accumulators.
    bm, bn = 128, 128 if (case.dtype, case.acc) == ("f8e4m3", "f32") else 256
    while bm * bn > 64 * 64 and case.batch * math.ceil(case.m / bm) * math.ceil(case.n / bn) < MULTIPROCESSORS:
        bm, bn = (bm, bn // 2) if bn >= bm else (bm // 2, bn)
    by_tma = variant == "persistent_tma"
    warps = 8 if bm * bn >= 128 * 128 else 4
    tma = variant == "grouped" and aligned(case)
    return Tile(bm, bn, bk, warps=warps, stages=3 if warps == 8 else 4, halves=by_tma, flatten=by_tma, tma=tma)


def parts(tile: Tile, case: Gemm) -> int:
    """Programs among which a tile's K is split.

    As many as have room at once take turns; the fewest programs within a fifth of the shortest sum of turns, since what
    they leave has to be added up. Each has steps enough to fill its pipeline.
    """
    tiles = case.batch * math.ceil(case.m / tile.bm) * math.ceil(case.n / tile.bn)
    buffers = tile.stages * tile.bk * (tile.bm + tile.bn) * dtype(case.dtype).bytes
    at_once = MULTIPROCESSORS * max(1, SHARED_BYTES // buffers)
    turns = {
        split: math.ceil(tiles * split / at_once) / split
        for split in (1, 2, 4, 8, 16)
        if split == 1 or case.k >= split * tile.bk * tile.stages
    }
    return next(split for split, taken in turns.items() if taken <= 1.2 * min(turns.values()))


def fitted(variant: str, tile: Tile, case: Gemm) -> Tile:
    """No larger than the case asks for, and by pointers where TMA cannot be had."""
    if tile.tma and (not aligned(case) or case.batch > 1):
        tile = replace(tile, tma=False)
    if variant == "persistent_tma_ws":
        return tile
    # Elements that must be loaded one by one take a register each on their way: 128 x 256 of them would spill.
    most = 256 if aligned(case) else 128
    bm = min(tile.bm, max(16, 1 << (case.m - 1).bit_length()), most)
    bn = min(tile.bn, max(32, 1 << (case.n - 1).bit_length()), most)
    # A part of K has two steps at least.
    split = min(tile.split, 1 << max(0, (case.k // (2 * tile.bk)).bit_length() - 1))
    halves = tile.halves and bn > 64
    defer = tile.defer and halves and dtype(case.out).bits == 16 and case.k > 2 * tile.bk
    return replace(tile, bm=bm, bn=bn, split=split, halves=halves, pair=tile.pair and bm >= 128, defer=defer)


def transposed_bytes(case: Gemm) -> int:
    """Bytes of operands that a kernel which takes them by TMA has to have K-major, and that are not: of tf32 only."""
    specs = case.input_specs()
    apart = [name for name, stored, wanted in zip("AB", case.layout, "nt", strict=True) if stored != wanted]
    return sum(specs[name].nbytes for name in apart) if case.dtype == "tf32" else 0


def aligned(case: Gemm) -> bool:
    """Whether the rows of A, B and C begin at multiples of 16 bytes, as TMA wants them (CUDA driver API,
    cuTensorMapEncodeTiled: globalStrides)."""
    width = dtype(case.dtype).bytes
    a = case.k if case.layout[0] == "n" else case.m
    b = case.n if case.layout[1] == "n" else case.k
    return all(size % 16 == 0 for size in (a * width, b * width, case.n * dtype(case.out).bytes))
