"""Attention in Pallas: for Hopper GPUs in Mosaic GPU, by the older Triton lowering, and for TPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, ClassVar

from impls.contract import Device, Implementation, Program
from impls.pallas import tiling, vmem
from impls.support.h200 import MULTIPROCESSORS
from impls.workloads.attention import Attention
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype


class MosaicGpu(Implementation):
    """Forward and backward pass after FlashAttention-3; of one query, by shares of the keys."""

    name: ClassVar[str] = "pallas.mosaic_gpu"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    simulated_on: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "Mosaic GPU: fused, warp-specialised, TMA and wgmma; on a CPU interpreted"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Dtypes of more than 16 bits, head sizes that are no multiple of 64; backward, wide heads."""
        assert isinstance(case, Attention)
        if device.kind == "cuda" and not device.arch.startswith("sm_90"):
            return f"The kernel is written for sm_90's wgmma; this device is {device.arch}."
        if case.dtype not in ("f16", "bf16"):
            return "The kernel multiplies operands of 16 bits."
        if case.d % 64 or case.d > 256:
            return "The kernel's tiles are 64, 128, 192 or 256 wide; the head size is none of these."
        if case.direction != "fwd" and case.d > 128:
            return "The backward kernel holds dK and dV in registers: heads of up to 128."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and tensors that are copied where their lengths are no multiples of 8.

        Backward, dQ is set to zero, added to and read in f32 besides.
        """
        assert isinstance(case, Attention)
        sums = 0 if case.direction == "fwd" else 3 * case.input_specs()["Q"].nbytes // dtype(case.dtype).bytes * 4
        return case.compulsory_bytes() + 2 * _copied_bytes(case) + sums

    def workspace_bytes(self, case: Case) -> int:
        """Those copies; for one query, what every share of the keys leaves; backward, residuals and dQ in f32."""
        assert isinstance(case, Attention)
        if case.direction != "fwd":
            return _copied_bytes(case) + 4 * case.input_specs()["Q"].nbytes
        return _copied_bytes(case) + (_shares_bytes(case) if tiling.decodes(case) else 0)

    def prepare(self, case: Case, device: Device) -> Program:
        """Lowers and compiles the case."""
        assert isinstance(case, Attention)
        choose = (
            tiling.backward if case.direction != "fwd" else tiling.decode if tiling.decodes(case) else tiling.attention
        )
        chosen, source = choose(case, device.name)
        program = self.build(case, device, chosen)
        program.config |= tiling.record(chosen, source)
        return program

    def space(self, case: Case) -> list[Any]:
        """Tilings worth a look."""
        return tiling.space(case)

    def build(self, case: Case, device: Device, choice: Any) -> Program:
        """The case by a tiling; a backward pass by the forward pass's own."""
        assert isinstance(case, Attention)
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from impls.pallas.kernels import mosaic_attention, mosaic_backward, mosaic_decode
        from impls.pallas.kernels.program import Compiled, multiprocessors

        interpret = plgpu.InterpretGPUParams() if device.kind == "cpu" else None
        if case.direction == "fwd":
            if tiling.decodes(case):
                function = mosaic_decode.function(case, choice, multiprocessors(), interpret)
            else:
                function = mosaic_attention.function(case, choice, interpret)
            return Compiled(case, device, function, {})
        forward, source = tiling.attention(replace(case, direction="fwd"), device.name, residuals=True)
        config = {"forward": tiling.record(forward, source)}
        attend = mosaic_attention.function(case, forward, interpret, residuals=True)
        differentiate = mosaic_backward.function(case, choice, interpret)
        if case.direction == "fwdbwd":
            return Compiled(case, device, _both(attend, differentiate), config)
        return Compiled(case, device, differentiate, config, before=_residuals(attend))

    def compile_ahead(self, case: Case, choice: Any, arch: str) -> None:
        """Nothing: a kernel is compiled with its program, in a second, and JAX keeps none for another process."""


class Triton(Implementation):
    """Pallas' older GPU lowering: what a user gets who does not ask for Mosaic GPU."""

    name: ClassVar[str] = "pallas.triton"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    simulated_on: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "the older lowering by Triton: fused forward pass, pointers, no TMA; on a CPU interpreted"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, backward passes, and heads too wide for a multiprocessor."""
        assert isinstance(case, Attention)
        if case.dtype == "tf32":
            return "The kernel multiplies what it is given."
        if case.direction != "fwd":
            return "Only the forward pass is written."
        if case.d > 256:
            return "A head of more than 256 does not fit a multiprocessor's registers."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Lowers and compiles the case."""
        assert isinstance(case, Attention)
        chosen, source = tiling.triton_attention(case, device.name)
        program = self.build(case, device, chosen)
        program.config |= tiling.record(chosen, source)
        return program

    def space(self, case: Case) -> list[Any]:
        """Tilings worth a look."""
        return tiling.triton_space(case)

    def build(self, case: Case, device: Device, choice: Any) -> Program:
        """The case by a tiling."""
        assert isinstance(case, Attention)
        from impls.pallas.kernels import triton_attention
        from impls.pallas.kernels.program import Compiled

        return Compiled(case, device, triton_attention.function(case, choice, interpret=device.kind == "cpu"), {})

    def compile_ahead(self, case: Case, choice: Any, arch: str) -> None:
        """Nothing: a kernel is compiled with its program, and JAX keeps none for another process."""


class Tpu(Implementation):
    """For TPUs: interpreted here, exported, and compiled for every generation; never run on one."""

    name: ClassVar[str] = "pallas.tpu"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    simulated_on: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "TPU kernel: fused, copies of its own from HBM; interpreted, and compiled for absent TPUs"

    def refuses(self, case: Case, device: Device) -> str | None:
        """What a TPU's matrix unit does not multiply, and backward passes."""
        assert isinstance(case, Attention)
        if case.dtype in ("f16", "tf32"):
            return f"A TPU's matrix unit does not multiply {case.dtype}; bf16 is its 16-bit format."
        if case.direction != "fwd":
            return "Only the forward pass is written."
        blocks = vmem.attention(case)
        return vmem.refusal(blocks, blocks.bytes(case))

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and every tensor once more: they are sorted by head first."""
        assert isinstance(case, Attention)
        return 3 * case.compulsory_bytes()

    def workspace_bytes(self, case: Case) -> int:
        """The sorted tensors."""
        assert isinstance(case, Attention)
        return case.total_bytes()

    def prepare(self, case: Case, device: Device) -> Program:
        """Compiles the interpreter's version, and the real one for TPUs that are not here."""
        assert isinstance(case, Attention)
        from impls.pallas.kernels import tpu_attention
        from impls.pallas.kernels.tpu_program import simulated

        blocks = vmem.attention(case)
        config = {**asdict(blocks), "vmem_bytes": blocks.bytes(case)}
        return simulated(case, device, lambda interpret: tpu_attention.function(case, blocks, interpret), config)


def _copied_bytes(case: Attention) -> int:
    specs = {**case.input_specs(), **case.output_specs()}
    return sum(spec.nbytes for spec in specs.values() if spec.shape[1] >= 8 and spec.shape[1] % 8)


def _residuals(attend: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """What a backward pass takes of the forward one: O, and the logarithms of the rows' sums."""

    def residuals(Q: Any, K: Any, V: Any, dO: Any) -> dict[str, Any]:
        return dict(zip(("O", "lse"), attend(Q, K, V), strict=True))

    return residuals


def _both(attend: Callable[..., Any], differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """O, dQ, dK and dV."""

    def both(Q: Any, K: Any, V: Any, dO: Any) -> tuple[Any, ...]:
        o, lse = attend(Q, K, V)
        return (o, *differentiate(Q, K, V, dO, o, lse))

    return both


def _shares_bytes(case: Attention) -> int:
    """O in f32 and a logarithm for each of at most some four shares per multiprocessor; small beside K and V."""
    return 4 * MULTIPROCESSORS * 64 * (case.d + 1) * 4
