"""GEMM and attention in Gluon, Triton's lower layer: TMA, wgmma, mbarriers and warp specialisation written out.

Owns which cases the Hopper kernels take and what a case is tiled by. Gluon has no interpreter: on a CPU the kernels are
compiled ahead of time by the tests, and not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from impls.contract import Device, Implementation, Program
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


class GluonGemm(Implementation):
    """Persistent, warp specialised; see ``kernels/gluon_gemm.py``."""

    name: ClassVar[str] = "triton.gluon"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
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
        if case.dtype in ("f8e4m3", "tf32") and case.layout != "nt":
            return f"wgmma takes {case.dtype} operands K-major only: ask for layout nt."
        for name, spec in (*case.input_specs().items(), *case.output_specs().items()):
            if name in ("A", "B", "C") and spec.shape[-1] * dtype(spec.dtype).bytes % 16:
                return f"TMA wants rows of a multiple of 16 bytes, and those of {name} have {spec.shape[-1]} elements."
        if case.batch * max(case.m, case.n, case.k) >= 2**31:
            return "This kernel counts the rows of a whole batch in 32 bits."
        if case.batch != 1 and (case.m % 128 or case.k * dtype(case.dtype).bytes % 128):
            return "With a batch this kernel wants M in multiples of 128 and rows along K in multiples of 128 bytes."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Compiled for the case's layouts, dtypes and epilogue."""
        assert isinstance(case, Gemm)
        from impls.triton.kernels import gluon_gemm
        from impls.triton.kernels.program import LaunchedProgram, Work

        tiling = gemm_tiling(case)

        def bind(tensors: Tensors) -> Work:
            return Work([gluon_gemm.launch(case, tensors, gluon_gemm.Tiling(**tiling))])

        return LaunchedProgram(case, device, bind, {"tiling": tiling})


def gemm_tiling(case: Gemm) -> dict[str, int]:
    """The tile of a case: as wide as it can be while there are tiles for every second SM.

    Groups of 16 tile rows, and a first consumer that leads by nearly the whole ring, were the best of 8 to 32 and of 0
    to 3 on the H200 in burst: 0.998 of cuBLAS' best at 4096^3 and 0.978 at 8192^3 bf16, up to 1.5 % ahead of the rest.
    """
    bk = 128 // dtype(case.dtype).bytes
    wide = case.n > 128 and case.batch * -(-case.m // 128) * -(-case.n // 256) >= 66
    stages = (4 if wide else 6) - (case.out == "f32")  # staging of 32-bit outputs takes twice the room
    return {"bn": 256 if wide else 128, "bk": bk, "stages": stages, "group": 16, "lead": min(3, stages - 1)}


class GluonAttention(Implementation):
    """Persistent, warp specialised; see ``kernels/gluon_attention.py``."""

    name: ClassVar[str] = "triton.gluon"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
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
        from impls.triton.kernels import gluon_attention
        from impls.triton.kernels.program import LaunchedProgram, Work

        blocking = attention_blocking(case)

        def bind(tensors: Tensors) -> Work:
            return Work([gluon_attention.launch(case, tensors, gluon_attention.Blocking(**blocking))])

        return LaunchedProgram(case, device, bind, {"blocking": blocking})


def attention_blocking(case: Attention) -> dict[str, int]:
    """The blocks of a case: as many keys as registers and shared memory hold beside the head.

    Tiles are walked in sections of heads whose K and V take 8 MiB of L2: on the H200, two heads of 8192 keys at head
    size 128 were ahead of eight by up to 1.6 %.
    """
    heads = max(1, 8 * 2**20 * case.group // (4 * case.sk * case.d))
    return {"block": 64 if case.d > 128 else 128, "stages": 2, "section": heads, "ping_pong": True}
