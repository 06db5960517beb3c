"""GEMM in the CuTe DSL: which cases the Hopper kernel takes, how their tiles are chosen, and what tuning tries.

Owns the decisions; what a build is specialised for is in ``cute_gemm_tiles``, the kernel in ``kernels/cute_gemm.py``.
Imports no stack library.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from impls.contract import Device, Implementation, Program
from impls.cutlass.cute_gemm_tiles import ROWS, SHARED_BYTES, GemmTiles
from impls.support import tuned
from impls.support.h200 import MULTIPROCESSORS
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

_STACK = Path(__file__).parent
# Registers of a thread that sums may take, of 240; the rest hold addresses and the epilogue.
_MOST_ACCUMULATORS = 208
# What a multiprocessor of an H200 multiplies in a clock in 16 bits (docs/h200.md), and the bytes that reach its shared
# memory: 9.5 TB/s at 1.58 GHz, more than which no kernel was seen to load (docs/triton.md).
_PRODUCTS, _BYTES = 2048, 45
# How much more than the least time, by this reckoning, a tile may take and still be tried; and taken from a neighbour.
_SLACK, _NEIGHBOUR_SLACK = 1.15, 1.05
# The kernel counts rows, columns and tiles in 32 bits, and TMA addresses dimensions of 32 bits.
_MOST_ELEMENTS = 2**31


@dataclass(frozen=True)
class Choice:
    """How a case is cut.

    Attributes:
        bm, bn, consumers, ping_pong, cluster_m, cluster_n: as ``GemmTiles``, of the product as it is computed.
        raster: ``m`` where tiles are taken up along M first, else ``n``.
        band: clusters along that axis before the other one advances.
        swapped: C is computed transposed, so that N takes the place of M: for less rows than a wgmma has.
    """

    bm: int
    bn: int
    consumers: int = 2
    ping_pong: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    raster: str = "m"
    band: int = 8
    swapped: bool = False

    def config(self) -> dict[str, Any]:
        """For the record and the tuned file."""
        return asdict(self)


def tiles(case: Gemm, choice: Choice) -> GemmTiles:
    """What is built for a case: as many slots as shared memory holds."""
    a, b = case.layout
    a_major, b_major = "k" if a == "n" else "m", "k" if b == "t" else "n"
    if choice.swapped:
        a_major, b_major = "k" if b == "t" else "m", "k" if a == "n" else "n"
    one = GemmTiles(
        dtype=case.dtype,
        out=case.out,
        a_major=a_major,
        b_major=b_major,
        d_major="m" if choice.swapped else "n",
        epilogue=case.epilogue,
        grouped=case.groups is not None,
        promoted=case.dtype == "f8e4m3" and case.acc == "f32",
        bm=choice.bm,
        bn=choice.bn,
        stages=0,
        consumers=choice.consumers,
        ping_pong=choice.ping_pong,
        cluster_m=choice.cluster_m,
        cluster_n=choice.cluster_n,
    )
    return replace(
        one,
        stages=min(24, (SHARED_BYTES - one.shared_bytes) // (128 * (one.bm + one.bn))),
    )


def sizes(case: Gemm, choice: Choice) -> tuple[int, int]:
    """Rows and columns of the product as it is computed."""
    return (case.n, case.m) if choice.swapped else (case.m, case.n)


def clusters(case: Gemm, choice: Choice, multiprocessors: int) -> int:
    """Clusters of the grid: as many as the device holds, or as there are tiles for."""
    m, n = sizes(case, choice)
    groups = case.groups or (m,) * case.batch
    there = sum(math.ceil(rows / (choice.bm * choice.cluster_m)) for rows in groups)
    there *= math.ceil(n / (choice.bn * choice.cluster_n))
    return min(there, max(1, multiprocessors // (choice.cluster_m * choice.cluster_n)))


def fits(case: Gemm, choice: Choice) -> bool:
    """Whether sums fit the registers, at least three slots shared memory, and what a CTA loads the swizzle."""
    if choice.swapped and case.groups is not None:
        return False  # groups are of rows
    built = tiles(case, choice)
    # A load's share of a tile, and where M or N neighbours lie together 128 bytes of these.
    down, across = (8 if major == "k" else ROWS for major in (built.a_major, built.b_major))
    across = min(across, built.bn) if built.cluster_m == 1 and built.bn < ROWS else across
    return (
        built.bm % (down * built.cluster_n) == 0
        and built.bn % (across * built.cluster_m) == 0
        and built.accumulators <= _MOST_ACCUMULATORS
        and built.stages >= 3
    )


def rule(case: Gemm) -> Choice:
    """A choice for what was not tuned: of the tiles that should be about the fastest, that which loads least."""
    if _skinny(case):
        width = max(16, 1 << (case.m - 1).bit_length())
        return Choice(ROWS, width, consumers=1, raster="n", band=1, swapped=True)
    return min(_promising(case), key=lambda choice: 1 / choice.bm + 1 / choice.bn)


def choose(case: Gemm, device_name: str) -> tuple[Choice, str]:
    """The choice for a case, and where it comes from: that of the nearest tuned case of its kind, else the rule's.

    A tile that suits a neighbour may leave many multiprocessors idle in the last wave of another shape: then the rule.
    """
    kept = tuned.nearest(_STACK, device_name)
    most = math.inf if _skinny(case) else _NEIGHBOUR_SLACK * min(_clocks(case, one) for one in _shapes(case))
    best, found = 4.0, None
    for other, choice in tuned.around(kept, Cute.name, case):
        if not isinstance(other, Gemm) or _kind(other) != _kind(case):
            continue
        near = zip(
            (case.m, case.n, case.k, case.batch),
            (other.m, other.n, other.k, other.batch),
            strict=True,
        )
        far = sum(abs(math.log2(x / y)) for x, y in near) + (other.epilogue != case.epilogue) / 2
        far += sum(x != y for x, y in zip(case.layout, other.layout, strict=True))
        one = Choice(**choice)
        suits = other == case or _clocks(case, one) <= most
        if far < best and suits and fits(case, one):
            best, found = far, (one, tuned.origin(kept, Cute.name, other.id))
    return found or (rule(case), "rule")


def _kind(case: Gemm) -> tuple[Any, ...]:
    """What a tuned case must have in common with another: f16 and bf16 take the same instructions and bytes."""
    return (
        dtype(case.dtype).bytes,
        dtype(case.out).bytes,
        case.acc,
        _skinny(case),
        case.groups is None,
    )


def _skinny(case: Gemm) -> bool:
    """Fewer rows than a wgmma has."""
    return case.m <= ROWS and case.groups is None


class Cute(Implementation):
    """A warp-specialised persistent GEMM in the CuTe DSL."""

    name: ClassVar[str] = "cutlass.cute"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "CuTe DSL on Hopper: persistent, warp-specialised, TMA multicast in clusters, wgmma"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other devices than Hopper, other dtypes than f16, bf16 and f8, rows that TMA cannot step over."""
        assert isinstance(case, Gemm)
        if device.arch != "sm_90":
            return f"The kernel is written for sm_90's wgmma, and this device is {device.arch}."
        if case.dtype not in ("f16", "bf16", "f8e4m3"):
            return "The kernel multiplies f16, bf16 and f8e4m3."
        if case.acc == "f16":
            return "The kernel keeps sums in f32."
        if case.dtype == "f8e4m3" and case.layout != "nt":
            return "wgmma multiplies f8 with both operands K-major only: ask for layout nt."
        for name, spec in (case.input_specs() | case.output_specs()).items():
            if len(spec.shape) < 2:
                continue
            row = spec.shape[-1] * dtype(spec.dtype).bytes
            if row % 16:
                said = f"{spec.shape[-1]} {spec.dtype} of {name}"
                return f"TMA steps over rows by multiples of 16 bytes, which {said} are not."
            if math.prod(spec.shape) >= _MOST_ELEMENTS:
                return f"The kernel counts the elements of a matrix in 32 bits, and {name} has more."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Loads what was compiled beforehand, or compiles it where the DSL is installed."""
        assert isinstance(case, Gemm)
        choice, origin = choose(case, device.name)
        return self._program(case, self.variant(choice), origin)

    def variant(self, choice: Choice) -> Choice:
        """What becomes of a choice: itself."""
        return choice

    def space(self, case: Gemm) -> list[Choice]:
        """What tuning tries; nothing where a technique is switched off, which takes what was tuned with it."""
        return space(case) if type(self) is Cute else []

    def build(self, case: Gemm, device: Device, choice: Choice) -> Program:
        """The case by this choice."""
        return self._program(case, choice, "tuning", describe=False)

    def compile_ahead(self, case: Gemm, choice: Choice, arch: str) -> Path:
        """The library of a choice, which exists afterwards."""
        return library(case, choice)

    def _program(self, case: Gemm, choice: Choice, origin: str, describe: bool = True) -> Program:
        from impls.cutlass.kernels.cute_gemm_program import GemmProgram

        return GemmProgram(case, choice, library(case, choice), origin, describe=describe)


class CuteNoCluster(Cute):
    """The same kernel, with one technique switched off: what it is worth on this device."""

    name: ClassVar[str] = "cutlass.cute_no_cluster"
    summary: ClassVar[str] = "cutlass.cute without clusters: every CTA loads all of its A and B itself"

    def variant(self, choice: Choice) -> Choice:
        """The choice without clusters; its order of tiles is kept."""
        band = choice.band * (choice.cluster_m if choice.raster == "m" else choice.cluster_n)
        return replace(choice, cluster_m=1, cluster_n=1, band=band)


def library(case: Gemm, choice: Choice) -> Path:
    """What was compiled for a choice, or is now."""
    from impls.cutlass.kernels import cute_host

    built = tiles(case, choice)

    def kernel() -> Any:
        from impls.cutlass.kernels.cute_gemm import Gemm as Kernel

        return Kernel(built)

    return cute_host.found(built, kernel)


def space(case: Gemm) -> list[Choice]:
    """What tuning tries: tiles, schedules, clusters and orders that fit, and that keep the multiprocessors busy."""
    if _skinny(case):
        width = max(8, 1 << (case.m - 1).bit_length())
        # Every CTA reads all of A: with 64 rows as much as of the weight, unless those of a cluster share it.
        shapes = ((64, 1, 1), (64, 1, 2), (64, 1, 4), (128, 2, 1))
        few = [Choice(bm, width, many, False, cluster, 1, "n", 1, swapped=True) for bm, many, cluster in shapes]
        return [choice for choice in few if fits(case, choice)]
    return [
        replace(choice, raster=raster, band=band)
        for choice in _promising(case)
        for raster, band in itertools.product("mn", (4, 8))
    ]


# Rows and columns of a tile, consumers, turns, cluster: those that QuACK and CUTLASS C++ reach most with on an H200.
_SHAPES = (
    (256, 208, 2, False, 1, 2),
    (256, 208, 2, False, 2, 1),
    (256, 192, 2, False, 2, 1),
    (256, 176, 2, False, 2, 1),
    (256, 160, 2, False, 1, 2),
    (128, 256, 2, False, 2, 1),
    (128, 256, 2, False, 1, 2),
    (256, 128, 2, False, 1, 2),
    (256, 128, 2, False, 2, 1),
    (128, 208, 2, True, 2, 1),
    (128, 192, 2, True, 2, 1),
    (128, 160, 2, True, 2, 1),
    (128, 128, 2, True, 1, 2),
    (128, 128, 2, True, 2, 1),
    (64, 256, 2, True, 2, 1),
    (128, 256, 2, False, 1, 1),
)
# For what has less than a wave of large tiles.
_SMALL_SHAPES = (
    (128, 128, 2, False, 2, 1),
    (128, 128, 2, False, 1, 1),
    (128, 64, 2, False, 1, 1),
    (64, 128, 1, False, 1, 1),
    (64, 64, 1, False, 1, 1),
)
# With a second set of sums; warpgroups add while the other one multiplies, so that both share a tile.
_PROMOTED = (
    (128, 256, 2, False, 2, 1),
    (128, 256, 2, False, 1, 2),
    (128, 192, 2, False, 2, 1),
    (128, 192, 2, False, 1, 2),
    (128, 224, 2, False, 2, 1),
    (128, 256, 2, False, 1, 1),
)


def _shapes(case: Gemm) -> list[Choice]:
    """The tiles that a case of many rows may take."""
    found = []
    shapes = _PROMOTED if case.dtype == "f8e4m3" and case.acc == "f32" else _SHAPES
    if case.m * case.n * case.batch <= 128 * 256 * MULTIPROCESSORS:
        shapes += _SMALL_SHAPES
    for shape in shapes:
        one = Choice(*shape)
        # B by rows is swizzled in whole 128 bytes of N: other widths are for the transposed product, where it is A.
        kinds = [one] if fits(case, one) else [replace(one, swapped=True)]
        found += [choice for choice in kinds if fits(case, choice)]
    return found


def _promising(case: Gemm) -> list[Choice]:
    """Those of a case's tiles that should be about the fastest."""
    clocks = {choice: _clocks(case, choice) for choice in _shapes(case)}
    return [choice for choice, each in clocks.items() if each <= _SLACK * min(clocks.values())]


def _clocks(case: Gemm, choice: Choice) -> float:
    """Clocks of an H200 for 128 bytes along K, over all waves of tiles: those of the products or of what is loaded."""
    there = clusters(case, choice, 2**31)
    waves = math.ceil(there / (MULTIPROCESSORS // (choice.cluster_m * choice.cluster_n)))
    # A step has twice as many elements of 8 bits, of which twice as many are multiplied in a clock.
    multiplied = choice.bm * choice.bn * 64 / _PRODUCTS
    loaded = 128 * (choice.bm + choice.bn) / _BYTES  # multicast spares L2, not this
    return waves * max(multiplied, loaded)
