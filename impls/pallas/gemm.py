"""GEMM in Pallas: for Hopper GPUs in Mosaic GPU, by the older Triton lowering, and for TPUs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from impls.contract import Device, Implementation, Program
from impls.pallas import tiling, vmem
from impls.workloads.base import Case
from impls.workloads.gemm import Gemm


class MosaicGpu(Implementation):
    """Warp-specialised, persistent, by TMA and wgmma."""

    name: ClassVar[str] = "pallas.mosaic_gpu"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    simulated_on: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "Mosaic GPU: persistent, warp-specialised, epilogues fused; on a CPU interpreted"

    def refuses(self, case: Case, device: Device) -> str | None:
        """What wgmma does not multiply through Pallas, and groups."""
        assert isinstance(case, Gemm)
        if device.kind == "cuda" and not device.arch.startswith("sm_90"):
            return f"The kernel is written for sm_90's wgmma; this device is {device.arch}."
        if case.dtype in ("f32", "tf32"):
            return "wgmma has no f32, and in TF32 Pallas gives it no operands that are not K-major."
        if case.dtype == "i8":
            return "Pallas multiplies 8-bit integers on Blackwell only."
        if case.acc == "f16":
            return "The kernel accumulates f16 in f32."
        if case.groups is not None:
            return "The kernel has no groups: jax.lax.ragged_dot is xla.ragged_dot."
        if case.dtype == "f8e4m3" and case.layout != "nt":
            return "wgmma takes 8-bit operands K-major only: write layout nt."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, operands that are copied where they are not of whole tiles, and the sums of split K."""
        assert isinstance(case, Gemm)
        return case.compulsory_bytes() + 2 * _copied_bytes(case) + 2 * tiling.split_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Those copies and sums."""
        assert isinstance(case, Gemm)
        return _copied_bytes(case) + tiling.split_bytes(case)

    def prepare(self, case: Case, device: Device) -> Program:
        """Lowers and compiles the case."""
        assert isinstance(case, Gemm)
        chosen, source = tiling.gemm(case, device.name)
        program = self.build(case, device, chosen)
        program.config |= tiling.record(chosen, source)
        return program

    def space(self, case: Case) -> list[Any]:
        """Tilings worth a look."""
        return tiling.space(case)

    def build(self, case: Case, device: Device, choice: Any) -> Program:
        """The case by a tiling."""
        assert isinstance(case, Gemm)
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from impls.pallas.kernels import mosaic_gemm
        from impls.pallas.kernels.program import Compiled, multiprocessors

        interpret = plgpu.InterpretGPUParams() if device.kind == "cpu" else None
        return Compiled(case, device, mosaic_gemm.function(case, choice, multiprocessors(), interpret), {})

    def compile_ahead(self, case: Case, choice: Any, arch: str) -> None:
        """Nothing: a kernel is compiled with its program, in a second, and JAX keeps none for another process."""


class Triton(Implementation):
    """Pallas' older GPU lowering: what a user gets who does not ask for Mosaic GPU."""

    name: ClassVar[str] = "pallas.triton"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    simulated_on: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "the older lowering by Triton: pointers, no TMA; on a CPU interpreted"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Groups, and sums that it cannot ask for."""
        assert isinstance(case, Gemm)
        if case.groups is not None:
            return "The kernel has no groups."
        if case.acc in ("f16", "fast") or case.dtype == "tf32":
            return "The kernel accumulates in f32 and multiplies what it is given."
        if case.dtype == "f8e4m3":
            return "Pallas' Triton lowering promotes no sums of f8 products."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Lowers and compiles the case."""
        assert isinstance(case, Gemm)
        chosen, source = tiling.triton_gemm(case, device.name)
        program = self.build(case, device, chosen)
        program.config |= tiling.record(chosen, source)
        return program

    def space(self, case: Case) -> list[Any]:
        """Tilings worth a look."""
        return tiling.triton_space(case)

    def build(self, case: Case, device: Device, choice: Any) -> Program:
        """The case by a tiling."""
        assert isinstance(case, Gemm)
        from impls.pallas.kernels import triton_gemm
        from impls.pallas.kernels.program import Compiled

        return Compiled(case, device, triton_gemm.function(case, choice, interpret=device.kind == "cpu"), {})

    def compile_ahead(self, case: Case, choice: Any, arch: str) -> None:
        """Nothing: a kernel is compiled with its program, and JAX keeps none for another process."""


class Tpu(Implementation):
    """For TPUs: interpreted here, exported, and compiled for every generation; never run on one."""

    name: ClassVar[str] = "pallas.tpu"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    simulated_on: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "TPU kernel: blocks in VMEM, pipelined; interpreted, and compiled for absent TPUs"

    def refuses(self, case: Case, device: Device) -> str | None:
        """What a TPU's matrix unit does not multiply, and groups."""
        assert isinstance(case, Gemm)
        if case.dtype == "tf32" or "f16" in (case.dtype, case.out):
            return "A TPU's units know no f16 and no TF32; bf16 is its 16-bit format."
        if case.acc == "fast":
            return "A TPU accumulates in f32 and has no faster sums."
        if case.groups is not None:
            return "The kernel has no groups."
        blocks = vmem.gemm(case)
        return vmem.refusal(blocks, blocks.bytes(case))

    def prepare(self, case: Case, device: Device) -> Program:
        """Compiles the interpreter's version, and the real one for TPUs that are not here."""
        assert isinstance(case, Gemm)
        from impls.pallas.kernels import tpu_gemm
        from impls.pallas.kernels.tpu_program import simulated

        blocks = vmem.gemm(case)
        config = {**asdict(blocks), "vmem_bytes": blocks.bytes(case)}
        return simulated(case, device, lambda interpret: tpu_gemm.function(case, blocks, interpret), config)


def _copied_bytes(case: Gemm) -> int:
    """Bytes of A, B, residual and C where some are copied into arrays of whole tiles, or out of them."""
    m, n, k = tiling.whole_tiles(case)
    rows_n = tiling.whole_rows(case.n) if case.layout[1] == "t" else n
    sizes = {"A": (case.m, case.k, m, k), "B": (case.k, case.n, k, rows_n), "C": (case.m, case.n, m, n)}
    sizes["residual"] = sizes["C"]
    specs = {**case.input_specs(), **case.output_specs()}
    return sum(s.nbytes for name, s in specs.items() if name in sizes and sizes[name][:2] != sizes[name][2:])
