"""GEMM and attention in Gluon, Triton's lower layer: TMA, wgmma, mbarriers and warp specialisation written out.

Owns which cases the Hopper kernels take; what a case is tiled by is in ``gluon_tiles``. Gluon has no interpreter: on a
CPU the kernels are compiled ahead of time by the tests, and not run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from impls.contract import Device, Implementation, Program
from impls.triton.choices import transposed_bytes
from impls.triton.gluon_tiles import (
    ROWS,
    Blocking,
    Tiling,
    attention_space,
    choose_blocking,
    choose_tiling,
    gemm_space,
)
from impls.workloads.attention import Attention
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

if TYPE_CHECKING:
    from impls.triton.kernels.program import Tensors, Work

_HOPPER = "sm_90"


def _not_hopper(device: Device) -> str | None:
    if device.arch == _HOPPER:
        return None
    return f"This Gluon kernel is written for Hopper's wgmma (sm_90), and this device is {device.arch}."


class _Gluon(Implementation):
    """What both workloads have in common."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def build(self, case: Case, device: Device, choice: Tiling | Blocking) -> Program:
        """The case with the given choice, to be tuned."""
        from impls.triton.kernels.program import LaunchedProgram

        return LaunchedProgram(case, device, self._bind(case, choice), choice.config(), describe=False)

    def compile_ahead(self, case: Case, choice: Tiling | Blocking, arch: str) -> list[Any]:
        """Triton's compiled kernel, for a device that need not be there."""
        from impls.triton.kernels import ahead
        from impls.triton.kernels.program import LaunchedProgram

        ahead.use(arch)
        return LaunchedProgram.compile_ahead(case, self._bind(case, choice))

    def _prepared(self, case: Case, device: Device, choice: Tiling | Blocking, origin: str) -> Program:
        """The case with what was chosen for it, and where that comes from."""
        from impls.triton.kernels.program import LaunchedProgram

        return LaunchedProgram(case, device, self._bind(case, choice), {"tile": choice.config(), "choice": origin})

    @abstractmethod
    def _bind(self, case: Case, choice: Any) -> Callable[[Tensors], Work]:
        """From tensors to the launches of a call."""


class GluonGemm(_Gluon):
    """Persistent, warp specialised; see ``kernels/gluon_gemm.py``."""

    name: ClassVar[str] = "triton.gluon"
    workload: ClassVar[str] = "gemm"
    summary: ClassVar[str] = "Gluon on Hopper: persistent, warp specialised, TMA and wgmma written out"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other devices than Hopper, and what TMA or wgmma cannot."""
        assert isinstance(case, Gemm)
        if (reason := _not_hopper(device)) is not None:
            return reason
        if case.groups is not None:
            return "This kernel has no groups: triton.grouped has."
        if case.dtype not in ("bf16", "f16", "f8e4m3", "tf32"):
            return f"This kernel multiplies bf16, f16, f8 and tf32, not {case.dtype}."
        if case.acc == "f16":
            return "This kernel accumulates in f32 only."
        if case.dtype == "f8e4m3" and case.layout != "nt":
            return "wgmma takes f8 operands K-major only: ask for layout nt."
        for name, spec in (*case.input_specs().items(), *case.output_specs().items()):
            if name in ("A", "B", "C") and spec.shape[-1] * dtype(spec.dtype).bytes % 16:
                return f"TMA wants rows of a multiple of 16 bytes, and those of {name} have {spec.shape[-1]} elements."
        if case.dtype == "tf32" and case.k % 4:
            return f"TMA wants rows of a multiple of 16 bytes, and along K there are {case.k} elements."
        if case.batch * max(case.m, case.n, case.k) >= 2**31:
            return "This kernel counts the rows of a whole batch in 32 bits."
        line = case.k * dtype(case.dtype).bytes
        if case.batch != 1 and (case.m % ROWS or line % 128 or line < 256):
            return "With a batch this kernel wants M in multiples of 128, K in multiples of 128 bytes and 256 at least."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Compiled for the case's layouts, dtypes and epilogue."""
        assert isinstance(case, Gemm)
        tiling, origin = choose_tiling(case, device)
        return self._prepared(case, device, tiling, origin)

    def space(self, case: Gemm) -> list[Tiling]:
        """What tuning tries."""
        return gemm_space(case)

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and operands that are transposed written and read besides."""
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Operands that are transposed."""
        assert isinstance(case, Gemm)
        return transposed_bytes(case)

    def _bind(self, case: Case, choice: Any) -> Callable[[Tensors], Work]:
        assert isinstance(case, Gemm)
        from impls.triton.kernels import gluon_gemm
        from impls.triton.kernels.gemm_transpose import k_major
        from impls.triton.kernels.program import Work

        def bind(tensors: Tensors) -> Work:
            along_k, operands, before = k_major(case, tensors)
            return Work([*before, gluon_gemm.launch(along_k, operands, choice)])

        return bind


class GluonAttention(_Gluon):
    """Persistent, warp specialised; see ``kernels/gluon_attention.py``."""

    name: ClassVar[str] = "triton.gluon"
    workload: ClassVar[str] = "attention"
    summary: ClassVar[str] = "Gluon on Hopper: FlashAttention-3's scheme, TMA and wgmma written out"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other devices than Hopper, and what TMA or the kernel cannot."""
        assert isinstance(case, Attention)
        if (reason := _not_hopper(device)) is not None:
            return reason
        if case.direction != "fwd":
            return "This kernel has no backward pass: triton.flash has."
        if case.dtype not in ("bf16", "f16"):
            return f"This kernel multiplies bf16 and f16, not {case.dtype}."
        if case.d % 8 or case.d > 256:
            return f"This kernel takes head sizes in multiples of 8 up to 256, not {case.d}."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Compiled for the case's dtype, head size and mask."""
        assert isinstance(case, Attention)
        blocking, origin = choose_blocking(case, device)
        return self._prepared(case, device, blocking, origin)

    def space(self, case: Attention) -> list[Blocking]:
        """What tuning tries."""
        return attention_space(case)

    def _bind(self, case: Case, choice: Any) -> Callable[[Tensors], Work]:
        assert isinstance(case, Attention)
        from impls.triton.kernels import gluon_attention
        from impls.triton.kernels.program import Work

        return lambda tensors: Work([gluon_attention.launch(case, tensors, choice)])
