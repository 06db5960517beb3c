"""GEMM by CUTLASS 3.x' collectives: TMA, wgmma, warp-specialised; and the same with one technique switched off.

Owns what each variant can do. How cases are cut is in ``cpp_choices``, what is compiled in ``kernels/cpp_source``, the
compiled libraries in ``build``.
"""

from __future__ import annotations

from typing import ClassVar

from impls.contract import Device, Implementation, Program
from impls.cutlass import build, cpp_choices
from impls.cutlass.cpp_choices import Choice, Kernel
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm


class _Collective(Implementation):
    """What all have in common."""

    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def choose(self, case: Gemm, device_name: str) -> tuple[Choice, str]:
        """How a case is cut, and where that comes from."""
        return cpp_choices.choose(case, device_name)

    def refuses(self, case: Case, device: Device) -> str | None:
        """What has no wgmma, operands that it does not take, and rows that TMA cannot address."""
        assert isinstance(case, Gemm)
        if device.arch != "sm_90":
            return f"These kernels are wgmma's, compiled for sm_90a alone, not for {device.arch}."
        if case.dtype == "f32":
            return "Tensor cores do not multiply f32: ask for tf32."
        if dtype(case.dtype).bytes == 1 and case.layout != "nt":
            return "wgmma multiplies 8-bit operands with K contiguous only: ask for layout nt."
        if case.groups is not None and case.dtype == "tf32" and case.layout != "nt":
            return "wgmma multiplies groups of tf32 with K contiguous only: ask for layout nt."
        if not cpp_choices.aligned(case):
            return "Rows of A, B and C must begin at multiples of 16 bytes."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and what stream-K leaves in memory and reads again."""
        assert isinstance(case, Gemm)
        choice, _ = self.choose(case, "")
        return case.compulsory_bytes() + 2 * cpp_choices.partial_bytes(case, choice)

    def workspace_bytes(self, case: Case) -> int:
        """Stream-K's partial sums, or the groups' sizes, addresses and tensor maps."""
        assert isinstance(case, Gemm)
        choice, _ = self.choose(case, "")
        return cpp_choices.partial_bytes(case, choice) + (2**20 if case.groups or choice.stream_k else 0)

    def prepare(self, case: Case, device: Device) -> Program:
        """Load the library; compile it where it is not there and a compiler is.

        Raises:
            Unsupported: there is neither, or the collectives refuse the sizes.
        """
        assert isinstance(case, Gemm)
        from impls.cutlass.kernels.cpp_program import Product

        choice, origin = self.choose(case, device.name)
        return Product(case, device, choice, origin)


class Collective(_Collective):
    """The fastest that was found."""

    name: ClassVar[str] = "cutlass.cpp"
    summary: ClassVar[str] = "CUTLASS C++ 3.x collectives: TMA multicast, wgmma, warp-specialised, epilogue fused"

    def space(self, case: Gemm) -> list[Choice]:
        """What tuning tries."""
        return cpp_choices.space(case)

    def build(self, case: Gemm, device: Device, choice: Choice) -> Program:
        """The case by the given choice, to be tuned."""
        from impls.cutlass.kernels.cpp_program import Product

        return Product(case, device, choice, describe=False)

    def compile_ahead(self, case: Gemm, choice: Choice, arch: str) -> None:
        """Its library, into the cache."""
        build.ensure(cpp_choices.kernel(case, choice))


class _SwitchedOff(_Collective):
    """cutlass.cpp's choice for a case with one technique switched off, all else as it is: what that one is worth."""

    technique: ClassVar[str]

    def choose(self, case: Gemm, device_name: str) -> tuple[Choice, str]:
        """cutlass.cpp's choice without the technique."""
        choice, origin = super().choose(case, device_name)
        return cpp_choices.without(self.technique, case, choice) or choice, origin

    def refuses(self, case: Case, device: Device) -> str | None:
        """Where cutlass.cpp does not use the technique, too."""
        assert isinstance(case, Gemm)
        if (reason := super().refuses(case, device)) is not None:
            return reason
        if self.technique == "TMA" and case.groups is not None:
            return "CUTLASS multiplies groups with operands loaded by TMA only."
        if self.technique == "TMA" and (case.dtype, case.acc) == ("f8e4m3", "f32"):
            return "CUTLASS promotes f8's sums with operands loaded by TMA only: ask for acc=fast."
        if cpp_choices.without(self.technique, case, super().choose(case, device.name)[0]) is None:
            return f"cutlass.cpp has no {self.technique} to switch off in this case."
        return None


class NoCluster(_SwitchedOff):
    """What sharing loads among blocks is worth."""

    name: ClassVar[str] = "cutlass.cpp_no_cluster"
    summary: ClassVar[str] = "as cutlass.cpp, but each block loads for itself: no clusters, no multicast"
    technique: ClassVar[str] = "cluster"


class NoPingPong(_SwitchedOff):
    """What overlapping one tile's epilogue with another's products is worth."""

    name: ClassVar[str] = "cutlass.cpp_no_pingpong"
    summary: ClassVar[str] = "as cutlass.cpp, but both consumer warpgroups share a tile, and its epilogue stands alone"
    technique: ClassVar[str] = "ping-pong"


class CpAsync(_SwitchedOff):
    """What TMA is worth."""

    name: ClassVar[str] = "cutlass.cpp_cp_async"
    summary: ClassVar[str] = "as cutlass.cpp, but operands by cp.async in place of TMA, and so no clusters"
    technique: ClassVar[str] = "TMA"


def variants() -> tuple[_Collective, ...]:
    """The implementations of this module."""
    return (Collective(), NoCluster(), NoPingPong(), CpAsync())


def kernels(case: Case, device: Device) -> list[Kernel]:
    """What must be compiled for all of them to run a case."""
    taking = [one for one in variants() if case.workload == one.workload and one.refuses(case, device) is None]
    return [cpp_choices.kernel(case, one.choose(case, device.name)[0]) for one in taking if isinstance(case, Gemm)]
