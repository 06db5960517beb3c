"""GEMM by tile programs of our own: pointer loads or TMA, persistent or not, warp-specialised, split along K, grouped.

Owns what each variant can do. How tiles are chosen is in ``choices``, the kernels are in ``kernels/gemm_*``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from impls.contract import Device, Implementation, Program
from impls.triton.choices import Tile, aligned, choose, transposed_bytes
from impls.triton.space import space
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

if TYPE_CHECKING:
    from impls.triton.kernels.program import Tensors, Work


def capability(device: Device) -> int:
    """Compute capability times ten (``sm_90`` -> 90); a large number where the device is simulated."""
    return int(device.arch.removeprefix("sm_")) if device.kind == "cuda" else 1000


class Tiled(Implementation):
    """One program per tile. What the other variants share is here."""

    name: ClassVar[str] = "triton.tiled"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    simulated_on: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "Triton, a program per tile, pointer loads pipelined by cp.async, epilogue fused"

    @property
    def variant(self) -> str:
        """The part of the name after the point."""
        return self.name.partition(".")[2]

    def refuses(self, case: Case, device: Device) -> str | None:
        """Groups, and f8 before Ada."""
        assert isinstance(case, Gemm)
        if case.groups is not None:
            return "Groups are multiplied by triton.grouped."
        return self._refuses_dtype(case, device)

    def _refuses_dtype(self, case: Gemm, device: Device) -> str | None:
        if case.dtype == "f8e4m3" and capability(device) < 89:
            return "Tensor cores multiply f8e4m3 from compute capability 8.9 on."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Compile the kernel with the chosen tile."""
        assert isinstance(case, Gemm)
        from triton.runtime.errors import OutOfResources

        from impls.triton.kernels.program import LaunchedProgram

        tile, origin = choose(self.name, case, device.name)
        # C that waits is packed by assembly, which the interpreter does not run, and saves Hopper's registers.
        tile = replace(tile, tma=tile.tma and capability(device) >= 90, defer=tile.defer and device.arch == "sm_90")
        while True:
            try:
                return LaunchedProgram(case, device, self._bind(case, tile), {"tile": tile.config(), "choice": origin})
            except OutOfResources:
                # Tuned for a neighbour with smaller elements of C, or an epilogue that takes less shared memory.
                if tile.stages == 2:
                    raise
                tile = replace(tile, stages=tile.stages - 1)

    def build(self, case: Gemm, device: Device, tile: Tile) -> Program:
        """The case with the given tile, to be tuned."""
        from impls.triton.kernels.program import LaunchedProgram

        return LaunchedProgram(case, device, self._bind(case, tile), {"tile": tile.config()}, describe=False)

    def space(self, case: Gemm) -> list[Tile]:
        """What tuning tries."""
        return space(self.variant, case)

    def compile_ahead(self, case: Gemm, tile: Tile, arch: str) -> list[Any]:
        """Triton's compiled kernels of a call, for a device that need not be there."""
        from impls.triton.kernels import ahead
        from impls.triton.kernels.program import LaunchedProgram

        ahead.use(arch)
        return LaunchedProgram.compile_ahead(case, self._bind(case, tile))

    def _bind(self, case: Gemm, tile: Tile) -> Callable[[Tensors], Work]:
        from impls.triton.kernels import gemm_launch

        return lambda tensors: gemm_launch.work(self.variant, case, tile, tensors)


class Persistent(Tiled):
    """A few programs per multiprocessor."""

    name: ClassVar[str] = "triton.persistent"
    summary: ClassVar[str] = "Triton, persistent programs, pointer loads pipelined by cp.async, epilogue fused"


class SplitK(Tiled):
    """Several programs per tile, for shapes whose tiles do not fill the device."""

    name: ClassVar[str] = "triton.split_k"
    summary: ClassVar[str] = "Triton, K of a tile split among programs, the last to arrive adds up in fixed order"

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and the parts' sums written and read."""
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """The parts' sums, with the tile that was chosen on the H200."""
        assert isinstance(case, Gemm)
        tile, _ = choose(self.name, case, "")
        if tile.split == 1:
            return 0
        tiles = case.batch * math.ceil(case.m / tile.bm) * math.ceil(case.n / tile.bn)
        return tiles * tile.split * tile.bm * tile.bn * dtype(case.acc if case.acc in ("f16", "i32") else "f32").bytes


class PersistentTma(Tiled):
    """Tensor descriptors made by the host."""

    name: ClassVar[str] = "triton.persistent_tma"
    summary: ClassVar[str] = "Triton, persistent programs, operands and C by TMA, epilogue fused"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Rows that do not begin at multiples of 16 bytes; what has no TMA."""
        assert isinstance(case, Gemm)
        if capability(device) < 90:
            return "There is TMA from compute capability 9.0 on."
        if not aligned(case):
            return "TMA wants rows of A, B and C at multiples of 16 bytes: triton.persistent does without."
        if case.dtype == "tf32" and case.k % 4:
            return "TMA wants rows along K at multiples of 16 bytes, to which tf32 is transposed."
        return super().refuses(case, device)

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and operands that are transposed written and read besides."""
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Operands that are transposed."""
        assert isinstance(case, Gemm)
        return transposed_bytes(case)


class PersistentTmaWs(PersistentTma):
    """The compiler's own warp specialisation."""

    name: ClassVar[str] = "triton.persistent_tma_ws"
    summary: ClassVar[str] = "Triton, persistent, TMA, one group of warps loads for two that multiply"

    def refuses(self, case: Case, device: Device) -> str | None:
        """What the compiler's pass cannot do, too."""
        assert isinstance(case, Gemm)
        reason = super().refuses(case, device)
        if reason is None and device.kind == "cuda" and capability(device) != 90:
            reason = "Triton 3.6 specialises the warps of this kernel for compute capability 9.0 only."
        if reason is None and case.dtype == "f32":
            reason = "Triton 3.6 specialises warps around tensor cores only, which do not multiply f32."
        if reason is None and dtype(case.dtype).bytes != 2 and case.layout != "nt":
            reason = (
                f"Triton 3.6 specialises warps for {case.dtype} where both operands are K-major: ask for layout nt."
            )
        if reason is None and case.batch > 1:
            tile, _ = choose(self.name, case, device.name)
            if case.m % tile.bm or case.k % tile.bk:
                reason = (
                    "Triton 3.6 specialises warps for descriptors of two axes only, so that M and K of a batch must be "
                    f"multiples of {tile.bm} and {tile.bk}."
                )
        return reason


class Grouped(Tiled):
    """Groups of rows with a B each."""

    name: ClassVar[str] = "triton.grouped"
    summary: ClassVar[str] = "Triton, persistent over the tiles of all groups, whose sizes the device reads, TMA"

    def refuses(self, case: Case, device: Device) -> str | None:
        """What has no groups."""
        assert isinstance(case, Gemm)
        if case.groups is None:
            return "It multiplies groups only; triton.persistent_tma takes single products."
        return self._refuses_dtype(case, device)
