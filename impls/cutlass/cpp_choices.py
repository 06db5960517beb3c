"""What a CUTLASS C++ GEMM can be varied in, what a case allows of it, and what tuning chose.

Owns the description of a kernel (what is compiled), of a choice (a kernel's tile and schedule, and how its blocks walk
over C, which is decided when it is launched), the space that tuning tries and the choice for a case. Nothing here needs
CUTLASS, a compiler or a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from impls.support import tuned
from impls.support.h200 import MULTIPROCESSORS
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

_STACK = Path(__file__).parent
#: Whose choices the file has: the variants follow them.
NAME = "cutlass.cpp"
# Doublings of sizes, in all, beyond which a tuned case says nothing of another.
_FAR = 6.0
# Operand types as the instruction names them (PTX ISA, wgmma.mma_async).
_INSTRUCTION_DTYPE = {"tf32": "tf32", "f16": "f16", "bf16": "bf16", "f8e4m3": "e4m3", "i8": "s8"}
# Accumulators of a consumer thread, at most: of the registers that CUTLASS deals out (setmaxnreg 240 with two consumer
# warpgroups, 232 with groups; by cp.async all threads have 168) addresses and the epilogue take the rest. Beyond, ptxas
# serializes the wgmma: C7511 of 128x256 ping-pong (256) and of 256x192 by cp.async, C7512 of 256x208 with groups, of
# 256x192 and, by cp.async, of 128x256 where A comes through registers.
_ACCUMULATORS, _WITH_GROUPS, _BY_CP_ASYNC, _A_IN_REGISTERS = 208, 192, 128, 64


@dataclass(frozen=True)
class Choice:
    """How a case is cut. Sizes are those of the C++ product, which is the case's transposed where ``swapped``.

    Attributes:
        m, n, k: the tile that a block computes, and its step along K.
        cluster_m, cluster_n: blocks of a cluster, which load shared operands once (TMA multicast).
        schedule: ``cooperative`` (two consumer warpgroups on a tile), ``pingpong`` (on a tile each, one in its epilogue
            while the other multiplies) or ``cp_async`` (cooperative, loaded by cp.async).
        stream_k: K of the last wave's tiles is shared out evenly among all multiprocessors.
        swapped: C is computed transposed, so that few rows of the case lie along the instruction's N.
        raster: the axis of C that blocks walk along: ``m``, ``n`` or ``heuristic``.
        swizzle: blocks walked together across that axis, at most.
        splits: parts of K where the split is even; 0 with ``stream_k`` lets the scheduler decide.
    """

    m: int
    n: int
    k: int
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: str = "cooperative"
    stream_k: bool = False
    swapped: bool = False
    raster: str = "heuristic"
    swizzle: int = 1
    splits: int = 0

    def config(self) -> dict[str, Any]:
        """For the record and the tuned file."""
        return asdict(self)


@dataclass(frozen=True)
class Kernel:
    """What is compiled: a choice's part that the compiler must know, and the case's types, layout and epilogue.

    Attributes:
        dtype, acc, out: as in a case.
        a_k_major, b_k_major: whether the C++ product's operands are stored with K contiguous.
        epilogue: as in a case.
        grouped: a B for each group of A's rows, whose sizes the device reads.
        m, n, k, cluster_m, cluster_n, schedule, stream_k, swapped: as in a choice.
    """

    dtype: str
    acc: str
    out: str
    a_k_major: bool
    b_k_major: bool
    epilogue: str
    m: int
    n: int
    k: int
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: str = "cooperative"
    stream_k: bool = False
    swapped: bool = False
    grouped: bool = False

    @property
    def name(self) -> str:
        """A file's name: all that tells it from others."""
        parts = [
            self.dtype,
            self.acc,
            self.out,
            ("k" if self.a_k_major else "m") + ("k" if self.b_k_major else "n"),
            self.epilogue.replace("+", "_"),
            f"{self.m}x{self.n}x{self.k}",
            f"{self.cluster_m}x{self.cluster_n}",
            self.schedule,
            *(["stream_k"] if self.stream_k else []),
            *(["swapped"] if self.swapped else []),
            *(["grouped"] if self.grouped else []),
        ]
        return "-".join(parts)


def kernel(case: Gemm, choice: Choice) -> Kernel:
    """What must be compiled for a case that is cut so."""
    a_k_major, b_k_major = case.layout[0] == "n", case.layout[1] == "t"
    if choice.swapped:
        a_k_major, b_k_major = b_k_major, a_k_major
    shared = {f.name for f in fields(Choice)} & {f.name for f in fields(Kernel)}
    return Kernel(
        dtype=case.dtype,
        acc=case.acc,
        out=case.out,
        a_k_major=a_k_major,
        b_k_major=b_k_major,
        epilogue=case.epilogue,
        grouped=case.groups is not None,
        **{name: getattr(choice, name) for name in shared},
    )


def aligned(case: Gemm) -> bool:
    """Whether rows of A, B and C begin at multiples of 16 bytes, as TMA wants them (CUDA driver API,
    cuTensorMapEncodeTiled: globalStrides)."""
    width = dtype(case.dtype).bytes
    a = case.k if case.layout[0] == "n" else case.m
    b = case.n if case.layout[1] == "n" else case.k
    return all(size % 16 == 0 for size in (a * width, b * width, case.n * dtype(case.out).bytes))


def fits(case: Gemm, choice: Choice) -> bool:
    """Whether the accumulators of a consumer thread leave it registers."""
    warpgroups = 2 if choice.schedule in ("cooperative", "cp_async") else 1
    accumulators = choice.m * choice.n // (128 * warpgroups)
    if (case.dtype, case.acc) == ("f8e4m3", "f32"):
        accumulators *= 2  # the sums of the last 128 products, and all before them
    most = _BY_CP_ASYNC if choice.schedule == "cp_async" else _WITH_GROUPS if case.groups else _ACCUMULATORS
    return accumulators <= (most - _A_IN_REGISTERS if case.dtype == "tf32" and case.layout != "nt" else most)


def choose(case: Gemm, device_name: str) -> tuple[Choice, str]:
    """The choice for a case, and where it comes from: ``tuned for <case id> in <seconds> s`` or ``rule``."""
    kept = tuned.nearest(_STACK, device_name)
    best, found = _FAR, None
    for other, choice in tuned.around(kept, NAME, case):
        assert isinstance(other, Gemm)
        chosen = Choice(**choice)
        if other.m > 64 or other.groups:
            if (swapped := _transposed(case, chosen.n)) is None:
                continue
            chosen = replace(chosen, swapped=swapped)
        if _alike(other) == _alike(case):
            sizes = zip(_sizes(case), _sizes(other), strict=True)
            distance = sum(abs(math.log2(x / y)) for x, y in sizes)
            if distance < best:
                best, found = distance, (chosen, tuned.origin(kept, NAME, other.id))
    return found or (rule(case), "rule")


def without(technique: str, case: Gemm, choice: Choice) -> Choice | None:
    """The choice with a technique switched off, all else as it is; None where it does not use it.

    Args:
        technique: ``cluster``, ``ping-pong`` or ``TMA``. Without TMA a tile that leaves too few registers is narrower.
        case: the case.
        choice: the choice.
    """
    if technique == "cluster":
        return replace(choice, cluster_m=1, cluster_n=1) if choice.cluster_m * choice.cluster_n > 1 else None
    if technique == "ping-pong":
        # Cooperative warpgroups take 64 rows of a tile each, at least.
        whole = replace(choice, schedule="cooperative", m=max(128, choice.m))
        return whole if choice.schedule == "pingpong" else None
    loaded = replace(choice, schedule="cp_async", m=max(128, choice.m), cluster_m=1, cluster_n=1)
    while not fits(case, loaded):
        loaded = replace(loaded, n=loaded.n - 16)
    return loaded


def _alike(case: Gemm) -> tuple[Any, ...]:
    # f16 and bf16 take the same instructions and bytes.
    kind = case.dtype if case.dtype not in ("f16", "bf16") else "16 bits"
    return kind, case.acc, case.groups is None, _must_swap(case)


def _sizes(case: Gemm) -> tuple[float, ...]:
    # Another layout counts as much as one size that is twice as large, an epilogue as half of that.
    layout = tuple(2.0 if stored == "t" else 1.0 for stored in case.layout)
    groups = len(case.groups) if case.groups else 1
    return (*layout, 1.0 if case.epilogue == "none" else math.sqrt(2), case.batch, groups, case.m, case.n, case.k)


def _must_swap(case: Gemm) -> bool:
    """Whether only the transposed product exists: tf32's B must be K-major, its A may come through registers."""
    return case.dtype == "tf32" and case.layout[1] == "n" and case.layout[0] == "n"


def _transposed(case: Gemm, columns: int) -> bool | None:
    """Whether a tile of so many columns computes C transposed; None where it suits the case in neither way.

    What is stored along N lies in shared memory in pieces of 128 bytes or, where the width is no multiple of that, in
    small ones that wgmma reads slowly: such a width wants a B whose K is contiguous. Heights are always a multiple.
    """
    if _must_swap(case):
        return True
    if columns * dtype(case.dtype).bytes % 128 == 0 or case.layout[1] == "t":
        return False
    return True if case.layout[0] == "n" and case.groups is None else None


def rule(case: Gemm) -> Choice:
    """A choice that fits sm_90, for what was not tuned."""
    line = 128 // dtype(case.dtype).bytes
    if case.m <= 64 < case.n and case.groups is None and case.epilogue != "residual":
        columns = 16 if case.m <= 16 else 32 if case.m <= 32 else 64
        return Choice(64, columns, 2 * line, schedule="pingpong", swapped=True)
    swapped = _must_swap(case)
    large = Choice(128, 256, line, 2, 1, swapped=swapped, swizzle=4)
    if case.groups is None and case.dtype != "tf32" and fits(case, large) and tiles(case, large) >= MULTIPROCESSORS:
        return large
    small = Choice(128, 128, line, schedule="pingpong", swapped=swapped)
    # An epilogue of its own length is worth hiding.
    if case.epilogue == "none" or not fits(case, small):
        small = replace(small, schedule="cooperative")
    cluster = 2 if case.groups is None and sizes(case, small)[0] > 128 else 1
    return replace(small, cluster_m=cluster)


def space(case: Gemm) -> list[Choice]:
    """Every choice worth compiling and timing for a case."""
    line = 128 // dtype(case.dtype).bytes
    if case.m <= 64 and case.groups is None:
        columns = 16 if case.m <= 16 else 32 if case.m <= 32 else 64
        # Blocks of a cluster take the few rows, their B, from one load.
        whole = [
            Choice(m, columns, k * line, cluster, schedule="pingpong", swapped=True)
            for m, k, cluster in product((64, 128), (1, 2, 4), (1, 2, 4))
        ]
        split = [
            Choice(128, columns, k * line, stream_k=True, swapped=True, splits=splits)
            for k, splits in product((1, 2), (0, 2))
        ]
        return [*whole, *split]
    # Widths beside the powers of two: the last wave of tiles should leave few multiprocessors idle. The more a tile
    # computes of what it loads, the less power goes into loading, and where that is what limits the clock, it counts.
    shapes = (
        *((128, n, "cooperative", stream_k) for n in (256, 224, 192, 128) for stream_k in (False, True)),
        *((256, n, "cooperative", False) for n in (208, 192, 176, 160, 128)),
        *((128, n, "pingpong", False) for n in (208, 192, 128)),
        (64, 256, "pingpong", False),
    )
    clusters, walks = ((1, 1), (2, 1), (1, 2)), tuple(product(("m", "n"), (1, 2, 4, 8)))
    found = [
        Choice(m, n, line, *cluster, schedule, stream_k, swapped, raster, swizzle)
        for (m, n, schedule, stream_k), cluster, (raster, swizzle) in product(shapes, clusters, walks)
        if not (stream_k and case.groups) and (swapped := _transposed(case, n)) is not None
    ]
    return [choice for choice in found if fits(case, choice)]


def sizes(case: Gemm, choice: Choice) -> tuple[int, int, int]:
    """M, N and K of the C++ product."""
    return (case.n, case.m, case.k) if choice.swapped else (case.m, case.n, case.k)


def tiles(case: Gemm, choice: Choice) -> int:
    """Tiles of C, in whole clusters."""
    m, n, _ = sizes(case, choice)
    down = math.ceil(m / (choice.m * choice.cluster_m)) * choice.cluster_m
    across = math.ceil(n / (choice.n * choice.cluster_n)) * choice.cluster_n
    return case.batch * down * across


def partial_bytes(case: Gemm, choice: Choice) -> int:
    """Sums of parts of K that wait in memory, at most: a tile for each of C where all are split, else for each block of
    the two waves that stream-K shares out."""
    if not choice.stream_k:
        return 0
    waiting = tiles(case, choice)
    return (waiting if choice.splits else min(waiting, 2 * MULTIPROCESSORS)) * choice.m * choice.n * 4


def described(case: Gemm, choice: Choice, facts: Mapping[str, Any]) -> dict[str, Any]:
    """How the three levels and the primitives appear in a configuration, for the record.

    Args:
        case: the case.
        choice: how it is cut.
        facts: of the compiled kernel.
    """
    by_tma = choice.schedule != "cp_async"
    clustered = choice.cluster_m * choice.cluster_n > 1
    m, n, k = facts["instruction"]
    who = {
        "cooperative": f"one producer warp; {facts['consumer_warpgroups']} warpgroups multiply a tile together",
        "pingpong": "one producer warp; two warpgroups take turns: one multiplies while the other writes its tile",
        "cp_async": f"one producer warpgroup; {facts['consumer_warpgroups']} warpgroups multiply a tile together",
    }[choice.schedule]
    walk = "stream-K" if choice.stream_k else "persistent"
    primitives = ["wgmma", "mbarrier", "TMA store", "TMA load" if by_tma else "cp.async"]
    primitives += ["cluster", "TMA multicast"] if clustered else []
    return {
        "levels": {
            "tile": f"{choice.m}x{choice.n}x{choice.k}, {facts['stages']} stages, "
            f"clusters of {choice.cluster_m}x{choice.cluster_n}, {walk}",
            "warp": who,
            "instruction": f"wgmma m{m}n{n}k{k} {_INSTRUCTION_DTYPE[case.dtype]}",
        },
        "primitives": primitives,
        "built": dict(facts),
    }
