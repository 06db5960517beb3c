"""GEMM by QuACK, the CuTe DSL kernels that outrun cuBLAS on Hopper; recorded beforehand.

Owns which cases it takes and which of its configurations tuning may choose from: QuACK's own list for sm_90 and, for
few rows, narrow tiles and splits of K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from impls.contract import Device, Implementation, Program, Unsupported
from impls.incumbents.kernels import recording
from impls.support import tuned
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

Configuration = dict[str, Any]


def _configuration(tile: tuple[int, int], cluster: tuple[int, int], pingpong: bool, **more: Any) -> Configuration:
    sizes = {"tile_m": tile[0], "tile_n": tile[1], "cluster_m": cluster[0], "cluster_n": cluster[1]}
    return {**sizes, "pingpong": pingpong, "swap_ab": False, "split_k": 1, **more}


#: QuACK's own choice on sm_90 where nothing was tuned (quack.gemm_config.default_config, 0.6.5).
DEFAULT = _configuration((128, 192), (2, 1), True)
# Its candidates for tuning on sm_90 (quack.gemm_config, 0.6.5): two consumer warpgroups on one tile, or taking turns.
_COOPERATIVE = ((256, 128), (256, 160), (256, 192), (256, 208), (128, 224), (128, 256))
_PINGPONG = ((128, 128), (128, 160), (128, 192), (128, 208), (192, 128))
_CLUSTERS = ((1, 2), (2, 1))
# Of these, promotion's second accumulator fits the registers beside the first; all of its own candidates spill.
_TWO_ACCUMULATORS = [((128, n), False) for n in (128, 160, 192)] + [((64, n), True) for n in (128, 160, 192)]
#: Rows that fill no more than one tile.
_FEW = 128


def configurations(case: Gemm) -> list[Configuration]:
    """What is compiled and tried for a case: QuACK's own candidates, and what a user would pin where they serve poorly:
    smaller tiles for promoted f8, and others for few rows.

    With few rows C^T is computed (``swap_ab``): the weight's rows fill the tile's, and its columns need be no more than
    the rows there are. Tiles of 64 rows, or K split in two, give every multiprocessor some of a weight of 8192 rows.
    """
    if case.m <= _FEW and case.groups is None:
        found = [
            _configuration((rows, _columns(case)), cluster, pingpong, swap_ab=True, split_k=split, tile_k=depth)
            for rows in (64, 128)
            for cluster in ((1, 1), (2, 1))
            for pingpong in (True, False)
            for split in (1, 2)
            for depth in (64, 128)
        ]
    else:
        tiles = [(t, False) for t in _COOPERATIVE] + [(t, True) for t in _PINGPONG]
        if case.dtype == "f8e4m3" and case.acc == "f32":
            tiles += _TWO_ACCUMULATORS
        found = [_configuration(tile, cluster, pingpong) for tile, pingpong in tiles for cluster in _CLUSTERS]
    return [DEFAULT, *(c for c in found if c != DEFAULT)]


def _columns(case: Gemm) -> int:
    """The narrowest tile that holds few rows."""
    return next(columns for columns in (16, 32, 64, _FEW) if columns >= case.m)


def choose(case: Gemm, device_name: str) -> tuple[Configuration, str]:
    """The configuration for a case, and where it comes from.

    It is that of the nearest shape tuned on the device whose tiles see the same problem (width of the dtype,
    accumulation, layout, epilogue, batch, groups, rows for less than a tile or not), or QuACK's default.
    """

    def kind(one: Gemm) -> tuple[Any, ...]:
        width = dtype(one.dtype).bits
        return width, one.acc, one.layout, one.epilogue, one.batch > 1, one.groups is None, one.m <= _FEW

    def distance(one: Gemm) -> float:
        pairs = ((one.m, case.m), (one.n, case.n), (one.k, case.k), (one.batch, case.batch))
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    kept = tuned.file(Path(__file__).parent, device_name)
    tried = tuned.around(kept, Quack.name, case)
    alike = [(c, choice) for c, choice in tried if isinstance(c, Gemm) and kind(c) == kind(case)]
    if not alike:
        return DEFAULT, "QuACK's default"
    nearest, choice = min(alike, key=lambda found: distance(found[0]))
    if choice["swap_ab"]:
        choice = choice | {"tile_n": _columns(case)}
    return choice, tuned.origin(kept, Quack.name, nearest.id)


@dataclass(frozen=True)
class Choice:
    """One of QuACK's configurations, as tuning handles it."""

    items: tuple[tuple[str, Any], ...]

    def config(self) -> Configuration:
        """As QuACK names it."""
        return dict(self.items)


class Quack(Implementation):
    """QuACK's GEMM with what tuning chose, else with its own default."""

    name: ClassVar[str] = "incumbents.quack"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "QuACK (CuTe DSL), tuned among its own configurations, compiled beforehand for sm_90a"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other dtypes than f16, bf16 and f8; f8 in other layouts than nt; rows that TMA cannot address."""
        assert isinstance(case, Gemm)
        if device.arch != recording.ARCH:
            return f"Its kernels are compiled beforehand, for {recording.ARCH}, not for {device.arch}."
        if case.dtype not in ("f16", "bf16", "f8e4m3"):
            return f"QuACK multiplies f16, bf16 and f8 on Hopper, not {case.dtype}."
        if case.acc == "f16":
            return "QuACK accumulates in f32, not acc=f16."
        if case.acc == "fast" and case.epilogue not in ("none", "bias", "residual"):
            return "QuACK's products with an activation always promote f8's sums."
        if case.dtype == "f8e4m3" and case.layout != "nt":
            return "QuACK multiplies f8 with both operands K-major only: ask for layout nt."
        # TMA: a row's length is a multiple of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled).
        for name, spec in (case.input_specs() | case.output_specs()).items():
            if len(spec.shape) > 1 and spec.shape[-1] * dtype(spec.dtype).bytes % 16:
                return f"QuACK moves rows of multiples of 16 bytes: {name} has {spec.shape[-1]} of {spec.dtype}."
        return None

    def workspace_bytes(self, case: Case) -> int:
        """The most scratch that any recorded configuration takes: partial sums where K is split."""
        return recording.scratch_bytes(self.name, case)

    def prepare(self, case: Case, device: Device) -> Program:
        """The configuration that was chosen on this device for the case or one near it, else QuACK's default.

        Raises:
            Unsupported: this case was not recorded, or not with what was chosen, or for another device.
        """
        assert isinstance(case, Gemm)
        return self._program(case, *choose(case, device.name))

    def space(self, case: Gemm) -> list[Choice]:
        """What tuning tries: what was recorded."""
        try:
            return [Choice(tuple((r.choice or {}).items())) for r in recording.recorded(self.name, case).recordings]
        except Unsupported:
            return []

    def build(self, case: Gemm, device: Device, choice: Choice) -> Program:
        """The case by this choice."""
        return self._program(case, choice.config(), "tuning", describe=False)

    def compile_ahead(self, case: Gemm, choice: Choice, arch: str) -> None:
        """Nothing: it has been."""

    def _program(self, case: Gemm, configuration: Configuration, by: str, describe: bool = True) -> Program:
        from impls.incumbents.kernels.replay import Replayed

        found = recording.recorded(self.name, case)
        for one in found.recordings:
            if one.choice == configuration:
                return Replayed(case, found, one, {"chosen_by": by}, describe)
        raise Unsupported(f"It was not recorded with {configuration}: record it, see docs/environments.md.")
