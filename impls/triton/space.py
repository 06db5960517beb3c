"""The tiles that tuning tries for a GEMM kernel, pruned by what a multiprocessor of sm_90 holds.

Owns the space and nothing else: ``choices`` has what a tile is and what was chosen.
"""

from __future__ import annotations

from itertools import product

from impls.triton.choices import SHARED_BYTES, Tile, aligned, fitted
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

# Registers of a multiprocessor (CUDA C++ programming guide, compute capability 9.0).
REGISTERS = 65536
# Registers of a thread beyond its accumulators: addresses, loop state, the epilogue's temporaries.
_OTHER_REGISTERS = 32


def space(variant: str, case: Gemm) -> list[Tile]:
    """Every tile worth compiling for ``variant`` and ``case``."""
    found: dict[Tile, None] = {}
    for tile in _all(variant, case):
        one = fitted(variant, tile, case)
        if _shared(variant, one, case) * one.per_sm <= SHARED_BYTES and _registers(variant, one, case):
            found[one] = None
    return list(found)


def _all(variant: str, case: Gemm) -> list[Tile]:
    line = 128 // dtype(case.dtype).bytes
    promoted = (case.dtype, case.acc) == ("f8e4m3", "f32")
    if case.dtype == "f32":
        return [
            Tile(bm, bn, bk, warps=warps, stages=stages, per_sm=per_sm)
            for (bm, bn), bk, warps, stages, per_sm in product(
                ((64, 64), (128, 64), (128, 128)), (16, 32), (4, 8), (2, 3), (1, 2)
            )
        ]
    if variant == "split_k":
        rows = 16 if case.m <= 16 else 32 if case.m <= 32 else 64
        depths = (line,) if promoted else (line, 2 * line, 4 * line)
        return [
            Tile(bm, bn, bk, warps=warps, stages=stages, split=split, tma=tma)
            for bm, bn, bk, warps, stages, split, tma in product(
                {rows, min(128, 2 * rows)} if case.m > rows else {rows},
                (32, 64, 128),
                depths,
                (4, 8),
                (3, 4, 6, 8),
                (1, 2, 4, 8),
                (False, True) if aligned(case) and case.batch == 1 else (False,),
            )
            # What a multiprocessor must have on its way to keep up with memory (Little's law: 4.5 TB/s for 0.8 us are
            # 27 KiB on each of 132).
            if (stages - 1) * bk * bn * dtype(case.dtype).bytes >= 27 * 1024
        ]
    shapes = ((128, 128), (128, 256), (256, 128), (64, 256))
    if variant == "persistent_tma_ws":
        return [
            Tile(bm, bn, line, group=group, warps=4, stages=stages)
            for (bm, bn), group, stages in product(shapes[:3], (4, 8, 16), (2, 3, 4))
        ]
    if variant == "persistent_tma":
        plain = [
            Tile(
                bm,
                bn,
                line,
                group=group,
                warps=warps,
                stages=stages,
                per_sm=per_sm,
                halves=halves,
                flatten=flatten,
            )
            for (bm, bn), group, warps, stages, (per_sm, halves), flatten in product(
                shapes,
                (4, 8, 16),
                (4, 8),
                (3, 4),
                ((1, False), (1, True), (2, False), (2, True)),
                (False, True),
            )
            if not flatten or group == 8
        ]
        if promoted:
            return plain + [
                Tile(bm, 128, line, group=group, warps=warps, stages=3, per_sm=per_sm, flatten=flatten, pair=True)
                for (bm, warps, per_sm), group, flatten in product(
                    ((128, 4, 2), (256, 8, 1)), (4, 8, 16), (False, True)
                )
            ]
        return plain + [
            Tile(128, 256, line, group=group, stages=stages, halves=True, flatten=True, defer=True)
            for group, stages in product((4, 8, 16), (3, 4))
        ]
    if variant == "grouped":
        return [
            Tile(bm, bn, line, group=group, warps=8, stages=stages, flatten=flatten, tma=aligned(case))
            for (bm, bn), group, stages, flatten in product(shapes[:3], (4, 8), (3, 4), (False, True))
        ]
    return [
        Tile(bm, bn, bk, group=group, warps=warps, stages=stages, per_sm=per_sm, flatten=flatten)
        for (bm, bn), bk, group, warps, stages, (per_sm, flatten) in product(
            shapes,
            (line // 2, line),
            (4, 8),
            (4, 8),
            (3, 4),
            ((1, False), (1, True), (2, False)) if variant == "persistent" else ((1, False),),
        )
        if not promoted or bk == line
    ]


def _shared(variant: str, tile: Tile, case: Gemm) -> int:
    """Bytes of the pipeline's buffers, and of C on its way out by TMA."""
    buffers = tile.stages * tile.bk * (tile.bm + tile.bn) * dtype(case.dtype).bytes
    leaves = variant.startswith("persistent_tma")
    return buffers + leaves * tile.bm * tile.bn // (1 + (tile.halves or tile.pair)) * dtype(case.out).bytes


def _registers(variant: str, tile: Tile, case: Gemm) -> bool:
    """Whether accumulators fit a thread's 255 registers, and all threads the multiprocessor.

    Warp specialisation runs two groups of four warps that share a tile.
    """
    warps = 8 if variant == "persistent_tma_ws" else tile.warps
    accumulators = tile.bm * tile.bn // (32 * warps)
    if (case.dtype, case.acc) == ("f8e4m3", "f32"):
        accumulators += accumulators // (1 + tile.pair)  # the step's own sums
    if tile.defer:
        accumulators += accumulators // 2
    each = accumulators + _OTHER_REGISTERS
    return each <= 240 and each * warps * 32 * tile.per_sm <= REGISTERS
