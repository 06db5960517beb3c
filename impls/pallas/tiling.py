"""Which tiles a case takes: what tuning chose for this device, else what suits a case of its kind.

Owns the tilings, their limits and the choice. It imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from impls.support import tuned
from impls.support.h200 import MULTIPROCESSORS
from impls.workloads.attention import Attention
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

_STACK = Path(__file__).parent
# Whose choices the file has.
_NAME, _OLDER = "pallas.mosaic_gpu", "pallas.triton"
#: Shared memory a block of an H100 or H200 may have: 227 KiB (CUDA C++ programming guide, compute capability 9.0).
SHARED_BYTES = 227 * 1024
#: Rows of C that are few: they fill no tile, and time goes into reading B.
FEW = 64
# Barriers, and what alignment costs: 2.6 KiB of attention's, as Mosaic GPU of JAX 0.11 lays them out.
_SMALL_BYTES = 3072
# Of a thread that multiplies: for scores, probabilities and O. 224 are fine (64 queries, 256 keys, D = 64).
_ATTENTION_REGISTERS = 232


class _Choice:
    """What every tiling has in common."""

    def config(self) -> dict[str, Any]:
        """As the tuned file and a record keep it."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class GemmTiling(_Choice):
    """Tiles of a GEMM.

    Attributes:
        rows, cols: of C that a multiplying warpgroup holds; of its transpose where ``swapped``.
        depth: of K in one step.
        stages: steps that are loaded ahead.
        consumers: warpgroups that multiply.
        along: whether they lie side by side along ``m`` or ``n``.
        cluster: blocks that share a tile of one operand.
        shares: which: ``a`` (neighbours along N) or ``b`` (along M).
        minor, width: the order of tiles: strips of ``width`` tiles along axis ``minor`` (0: M, 1: N), gone through
            along the other axis, there and back.
        store_bytes: bytes of a row of C that are stored at a time.
        swapped: the transpose of C is computed: wgmma takes 64 rows at least, but 8 columns will do. For few rows of C;
            consumers then lie along ``n``, and C is stored whole.
        splits: pieces that K is cut into, each for a block of its own; XLA adds them up. Only where ``swapped``.
    """

    rows: int = 128
    cols: int = 128
    depth: int = 64
    stages: int = 4
    consumers: int = 2
    along: str = "m"
    cluster: int = 1
    shares: str = "a"
    minor: int = 1
    width: int = 8
    store_bytes: int = 64
    swapped: bool = False
    splits: int = 1

    @property
    def part_m(self) -> int:
        """Rows of C of a multiplying warpgroup."""
        return self.cols if self.swapped else self.rows

    @property
    def part_n(self) -> int:
        """Columns of C of a multiplying warpgroup."""
        return self.rows if self.swapped else self.cols

    @property
    def block_m(self) -> int:
        """Rows of C of a block."""
        return self.part_m * (self.consumers if self.along == "m" else 1)

    @property
    def block_n(self) -> int:
        """Columns of C of a block."""
        return self.part_n * (self.consumers if self.along == "n" else 1)

    def chunk(self, case: Gemm) -> int:
        """Columns of C that are stored at a time."""
        return self.part_n if self.swapped else min(self.cols, self.store_bytes // dtype(case.out).bytes)

    def shared_bytes(self, case: Gemm) -> int:
        """Shared memory of a block."""
        loaded = self.stages * self.depth * (self.block_m + self.block_n) * dtype(case.dtype).bytes
        kept = 4 if self.splits > 1 else dtype(case.out).bytes
        stored = self.consumers * 2 * self.part_m * self.chunk(case) * kept
        return loaded + stored + _SMALL_BYTES


@dataclass(frozen=True)
class AttentionTiling(_Choice):
    """Tiles of a forward pass.

    Attributes:
        rows: queries of a multiplying warpgroup; a block has two of them.
        keys: keys of one step.
        stages: steps that are loaded ahead.
        turns: whether the two warpgroups take turns: one multiplies while the other computes exponentials.
    """

    rows: int = 64
    keys: int = 128
    stages: int = 2
    turns: bool = True

    def shared_bytes(self, case: Attention, residuals: bool = False) -> int:
        """Shared memory of a block; with ``residuals``, of one that also leaves the logarithms of its rows' sums."""
        elements = case.d * (2 * self.rows + 2 * self.stages * self.keys)
        sums = 2 * self.rows * 4 if residuals else 0
        return elements * dtype(case.dtype).bytes + sums + _SMALL_BYTES


@dataclass(frozen=True)
class TritonGemmTiling(_Choice):
    """Tiles of a GEMM by the older lowering: rows and columns of C, of K a step; rows of tiles in a group."""

    rows: int = 128
    cols: int = 128
    depth: int = 32
    group: int = 8
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class TritonAttentionTiling(_Choice):
    """Tiles of a forward pass by the older lowering: queries of a program, keys of a step."""

    rows: int = 128
    keys: int = 64
    warps: int = 4
    stages: int = 3


def triton_gemm(case: Gemm, device_name: str) -> tuple[TritonGemmTiling, str]:
    """The tiling of a GEMM by the older lowering and where it comes from.

    Untuned, tiles no larger than the case, 128 x 128 where it is large. Triton multiplies 16 at least.
    """
    kept = _kept(device_name, TritonGemmTiling)
    near = case if case in kept else _nearest(case, kept)
    if near is not None and case.m >= kept[near].rows and case.n >= kept[near].cols:
        return kept[near], _source(device_name, near, _OLDER)
    depth = 64 // dtype(case.dtype).bytes
    return TritonGemmTiling(_power(case.m), _power(case.n), min(depth, _power(case.k, 32))), "untuned"


def triton_attention(case: Attention, device_name: str) -> tuple[TritonAttentionTiling, str]:
    """The tiling of a forward pass by the older lowering and where it comes from.

    Untuned, 128 queries and 64 keys; fewer keys where heads are wide, fewer queries where there are few.
    """
    for other, tiling in _kept(device_name, TritonAttentionTiling).items():
        alike = (other.d, other.mask, dtype(other.dtype).bytes) == (case.d, case.mask, dtype(case.dtype).bytes)
        if alike and case.sq >= tiling.rows:
            return tiling, _source(device_name, other, _OLDER)
    wide = case.d > 128
    rows = _power(case.sq)
    return TritonAttentionTiling(rows, 32 if wide else 64, 8 if wide else 4, 2 if wide else 3), "untuned"


def triton_space(case: Case) -> list[Any]:
    """Tilings of the older lowering that are worth a look on Hopper."""
    if isinstance(case, Attention):
        shapes = ((128, 64), (128, 128), (64, 64), (128, 32)) if case.d <= 128 else ((128, 32), (64, 32), (64, 64))
        return [TritonAttentionTiling(r, k, warps, n) for r, k in shapes for warps in (4, 8) for n in (2, 3)]
    assert isinstance(case, Gemm)
    size = dtype(case.dtype).bytes
    shapes = ((128, 128), (128, 256), (256, 128), (64, 256))
    return [
        TritonGemmTiling(rows, cols, depth // size, 8, warps, stages)
        for rows, cols in shapes
        for depth in (64, 128)
        for warps in (4, 8)
        for stages in (3, 4)
        if stages * (rows + cols) * depth <= SHARED_BYTES
    ]


def _power(size: int, least: int = 16, most: int = 128) -> int:
    """The least power of two that holds ``size``, within bounds."""
    return min(most, max(least, 1 << (size - 1).bit_length()))


def whole_tiles(case: Gemm) -> tuple[int, int, int]:
    """M, N and K as the operands must have them: rows of whole swizzled segments of 128 bytes, and whole groups of 8.

    What does not is copied into larger arrays first.
    """
    segment = 128 // dtype(case.dtype).bytes
    rows = _up(case.m, segment) if case.layout[0] == "t" else whole_rows(case.m)
    return rows, _up(case.n, segment), _up(case.k, segment)


def whole_rows(size: int) -> int:
    """Rows of an operand, or of C, as they must be: a few, up to 8, may stay as they are."""
    return size if size < 8 else _up(size, 8)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True)
class DecodeTiling(_Choice):
    """Tiles of a forward pass of one query.

    Attributes:
        keys: keys of one step.
        stages: steps that are loaded ahead.
        shares: pieces that the keys of a head are cut into.
        stored: columns of O that are stored at a time.
    """

    keys: int = 64
    stages: int = 4
    shares: int = 1
    stored: int = 128

    def queries(self, case: Attention) -> int:
        """Buffers of 64 rows of Q: two, where there is room."""
        return 2 if case.d <= 128 else 1

    def shared_bytes(self, case: Attention) -> int:
        """Shared memory of a block: K and V, rows of Q, 64 rows of O in f32."""
        loaded = case.d * dtype(case.dtype).bytes * (2 * self.stages * self.keys + 64 * self.queries(case))
        return loaded + 64 * min(case.d, self.stored) * 4 + 2 * _SMALL_BYTES


@dataclass(frozen=True)
class BackwardTiling(_Choice):
    """Tiles of a backward pass: queries of one step, steps that are loaded ahead. A block has 128 keys.

    Heads of 64 need 128 queries, of which each of two warpgroups takes half for dQ.
    """

    queries: int = 64
    stages: int = 2

    def shared_bytes(self, case: Attention) -> int:
        """Shared memory of a block: Q and dO, K and V, the scores' gradients twice, dQ in f32."""
        loaded = case.d * dtype(case.dtype).bytes * 2 * (self.stages * self.queries + 128)
        return loaded + 2 * 128 * self.queries * dtype(case.dtype).bytes + self.queries * case.d * 4 + 2 * _SMALL_BYTES


def decodes(case: Attention) -> bool:
    """Whether the kernel of one query takes the case: the query heads of a key head are rows of one product."""
    return case.sq == 1 and case.hq // case.hkv <= 64


def backward(case: Attention, device_name: str) -> tuple[BackwardTiling, str]:
    """The tiling of a backward pass and where it comes from."""
    for other, tiling in _kept(device_name, BackwardTiling).items():
        if (other.d, other.mask) == (case.d, case.mask):
            return tiling, _source(device_name, other)
    return BackwardTiling(queries=128 if case.d < 128 else 64), "untuned"


def decode(case: Attention, device_name: str) -> tuple[DecodeTiling, str]:
    """The tiling of a case of one query and where it comes from."""
    kept = _kept(device_name, DecodeTiling)
    if case in kept:
        return kept[case], _source(device_name, case)
    stages = max(s for s in range(2, 7) if DecodeTiling(stages=s).shared_bytes(case) <= SHARED_BYTES or s == 2)
    # Some four pieces of work for each of a large GPU's multiprocessors, of at least four steps.
    shares = max(1, min(-(-4 * MULTIPROCESSORS // (case.batch * case.hkv)), case.sk // (4 * 64)))
    return DecodeTiling(stages=stages, shares=shares), "untuned"


def gemm(case: Gemm, device_name: str) -> tuple[GemmTiling, str]:
    """The tiling of a case and where it comes from: ``tuned for <case> in <seconds> s`` or ``untuned``."""
    kept = _kept(device_name, GemmTiling)
    if case in kept:
        return kept[case], _source(device_name, case)
    near = None if case.m <= FEW else _nearest(case, kept)
    if near is not None and kept[near].shared_bytes(case) <= SHARED_BYTES:
        return kept[near], _source(device_name, near)
    return _untuned_gemm(case), "untuned"


def attention(case: Attention, device_name: str, residuals: bool = False) -> tuple[AttentionTiling, str]:
    """The tiling of a forward pass and where it comes from; with ``residuals``, of one for a backward pass."""
    for other, tiling in _kept(device_name, AttentionTiling).items():
        fits = tiling.shared_bytes(case, residuals) <= SHARED_BYTES
        if fits and (other.d, other.mask) == (case.d, case.mask):
            return tiling, _source(device_name, other)
    return AttentionTiling(keys=64 if case.d > 128 else 128), "untuned"


def _source(device_name: str, other: Case, name: str = _NAME) -> str:
    return tuned.origin(tuned.file(_STACK, device_name), name, other.id)


def record(tiling: _Choice, source: str) -> dict[str, Any]:
    """For a program's ``config``."""
    return {**tiling.config(), "tiling": source}


@cache
def _kept(device_name: str, kind: Any) -> dict[Any, Any]:
    """Tuned case -> tiling, of one kind of tilings."""
    older = kind in (TritonGemmTiling, TritonAttentionTiling)
    chosen = tuned.choices(tuned.file(_STACK, device_name), _OLDER if older else _NAME)
    return {case: kind(**choice) for case, choice in chosen if (_older_kind if older else _kind)(case) is kind}


def _older_kind(case: Case) -> Any:
    return TritonGemmTiling if isinstance(case, Gemm) else TritonAttentionTiling


def _kind(case: Case) -> Any:
    """The tilings of a case's kernel."""
    if isinstance(case, Gemm):
        return GemmTiling
    assert isinstance(case, Attention)
    if case.direction != "fwd":
        return BackwardTiling
    return DecodeTiling if decodes(case) else AttentionTiling


def space(case: Case) -> list[Any]:
    """Tilings worth a look on Hopper: what fits, of the shapes that were not far from the best."""
    return [tiling for tiling in _space(case) if tiling.shared_bytes(case) <= SHARED_BYTES]


def _space(case: Case) -> Iterator[Any]:
    if isinstance(case, Gemm):
        yield from _gemm_space(case)
        return
    assert isinstance(case, Attention)
    kind = _kind(case)
    if kind is BackwardTiling:
        yield from (kind(queries, stages) for queries in (64, 128) for stages in (1, 2, 3))
    elif kind is DecodeTiling:
        # Shares that leave between one and some nine pieces of work to each of an H200's multiprocessors.
        shares = {max(1, round(n * MULTIPROCESSORS / (case.batch * case.hkv))) for n in (1, 2, 4, 6, 8, 9)}
        yield from (kind(keys, stages, n) for keys in (64, 128) for stages in (2, 3, 4, 6) for n in sorted(shares))
    else:
        rows = (64, 128) if case.d == 64 else (64,)
        for r, keys, stages in product(rows, (64, 128, 192, 256), (1, 2, 3)):
            # Scores and O in f32, probabilities in 16 bits: with more ptxas spills.
            if r * (keys + keys // 2 + case.d) // 128 <= _ATTENTION_REGISTERS:
                yield kind(r, keys, stages)


def _gemm_space(case: Gemm) -> Iterator[GemmTiling]:
    depth = 128 // dtype(case.dtype).bytes
    if case.m <= FEW:
        few = _untuned_gemm(case)
        for steps, stages in ((1, 8), (1, 12), (2, 4), (2, 6), (2, 8), (4, 3), (4, 4)):
            yield replace(few, depth=steps * depth, stages=stages)
        yield replace(few, consumers=2, stages=4)
        yield replace(few, cluster=2)
        for splits in sorted({1, few.splits // 2, 2 * few.splits} - {0, few.splits}):
            yield replace(few, splits=splits)
        return
    # Sums kept apart need registers for two accumulators.
    apart = case.dtype == "f8e4m3" and case.acc == "f32"
    shapes = ((64, 128), (64, 192), (64, 256)) if apart else ((64, 256), (128, 128))
    for rows, cols in shapes:
        for along in ("m", "n"):
            for cluster, shares in ((1, "a"), (2, "a"), (2, "b")):
                for minor, width in ((1, 8), (1, 4), (1, 16), (0, 8)):
                    for stages in (3, 4):
                        yield GemmTiling(rows, cols, depth, stages, 2, along, cluster, shares, minor, width)


def _nearest(case: Gemm, kept: Iterable[Gemm]) -> Gemm | None:
    """The tuned case of as wide operands, summed alike, that is nearest in the logarithms of its sizes.

    Another layout or another epilogue puts a case one step further away, as a size twice as large does.
    """

    def alike(one: Gemm) -> tuple[int, str, bool]:
        return dtype(one.dtype).bytes, one.acc, one.out == "f32"

    def apart(other: Gemm) -> float:
        pairs = ((other.m, case.m), (other.n, case.n), (other.k, case.k))
        unlike = (other.layout != case.layout) + (other.epilogue != case.epilogue)
        return unlike + sum(abs(math.log2(x / y)) for x, y in pairs)

    return min((other for other in kept if alike(other) == alike(case) and other.m > FEW), key=apart, default=None)


def _untuned_gemm(case: Gemm) -> GemmTiling:
    depth = 128 // dtype(case.dtype).bytes
    splits = _fill(case, 64, 2 * depth)
    if case.m <= FEW and (splits > 1 or (case.epilogue != "residual" and dtype(case.out).bytes == 2)):
        # Few rows: as wgmma's columns. Where they lie along K, one row of shared memory holds 64 of them.
        few = 64 if case.layout[0] == "t" else next(size for size in (8, 16, 32, 64) if case.m <= size)
        one = GemmTiling(rows=64, cols=few, depth=2 * depth, stages=6, consumers=1, along="n", swapped=True)
        return replace(one, splits=splits)
    if case.m <= FEW:
        return GemmTiling(rows=64, cols=64, depth=2 * depth, stages=6, consumers=1)
    if case.dtype == "f8e4m3" and case.acc == "f32":
        return GemmTiling(rows=64, cols=128, depth=depth, stages=4)
    if case.m * case.n * case.batch < MULTIPROCESSORS * 256 * 128:
        return GemmTiling(rows=64, cols=128, depth=depth, stages=4)
    return GemmTiling(depth=depth)


def _fill(case: Gemm, cols: int, depth: int) -> int:
    """Pieces of K, of at least four steps each, that make a case's tiles one for each multiprocessor of an H200."""
    return max(1, min(MULTIPROCESSORS // (case.batch * -(-case.n // cols)), case.k // (4 * depth)))


def split_bytes(case: Gemm) -> int:
    """Bytes of the sums that blocks leave which share a tile; none where none do."""
    chosen = _untuned_gemm(case)
    return 0 if chosen.splits == 1 else case.batch * chosen.splits * case.n * chosen.block_m * 4
