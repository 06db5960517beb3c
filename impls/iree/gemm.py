"""GEMM by IREE, from the StableHLO that xla.stablehlo compiles too.

Flags (raced with IREE 3.13 on two cores of an AMD Zen 4, AVX-512 with BF16 and VNNI):

- Data tiling packs A and B into tiles and unpacks C, in each call, and multiplies by hand-written microkernels: f32
  1024^3 takes 10.2 ms in place of 14.5, bf16 5.1 in place of 17.9. Without it bf16 and odd sizes are slow.
- Where B is multiplied with few rows, packing it costs more than the product: see ``_packs``.
- The operands of one workgroup should fill the caches and still leave work for every thread: see ``_tile_bytes``. At
  2048^3 in f32 4 MiB take 83 ms, the default of 256 KiB 105.
- Without effect or slower: other global optimisation levels, ``inner_tiled`` with and without its microkernels (bf16
  5.6 to 12 ms), microkernels off (bf16 22 ms), data tiling begun in other phases.
"""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path
from typing import ClassVar

from impls.contract import Device, Implementation, Program, Unsupported
from impls.iree import targets
from impls.iree.targets import Compiled, Target
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

_RAISED_BYTES = {"f16": 4, "f8e4m3": 2}


class _Product(Implementation):
    """What all have in common: the case's StableHLO, compiled for one target."""

    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    target: ClassVar[Target]

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, and accumulation that is not in f32 or i32."""
        assert isinstance(case, Gemm)
        if case.dtype == "tf32":
            return "TF32 is a format of GPU tensor cores; IREE on a CPU would compute in f32 instead."
        if case.acc not in ("f32", "i32"):
            return f"IREE on a CPU accumulates {case.dtype} in f32 and offers no acc={case.acc}."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and what is written and read again: raised and packed operands, the packed product."""
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Raised operands, and in data tiling packed operands and the packed product, in f32 or i32."""
        assert isinstance(case, Gemm)
        raised = _RAISED_BYTES.get(case.dtype)
        width = raised or dtype(case.dtype).bytes
        operands = sum(math.prod(case.input_specs()[name].shape) for name in ("A", "B")) * width
        copies = operands if raised else 0
        if self.packs(case):
            copies += operands + 4 * case.batch * case.m * case.n
        return copies

    def packs(self, case: Gemm) -> bool:
        """Whether operands are packed into tiles."""
        return False

    def flags(self, case: Gemm, device: Device) -> tuple[str, ...]:
        """Flags of iree-compile, beside the target's."""
        return ()

    def prepare(self, case: Case, device: Device) -> Program:
        """Exports and compiles the case."""
        assert isinstance(case, Gemm)
        from impls.iree.runtime import IreeProgram
        from impls.support import jax_cases, stablehlo

        artefact = stablehlo.export(jax_cases.computation(case))
        flags = self.flags(case, device)
        compiled = targets.compile_module(artefact.data, self.target, flags)
        program = IreeProgram(case, device, self.target, compiled)
        program.config |= {"flags": list(flags), **artefact.config()}
        program.artefacts["module.stablehlo"] = artefact.data
        return program


def _packs(case: Gemm) -> bool:
    """Whether data tiling pays: not where few rows meet a B whose rows and columns are whole vectors.

    Time with and without it, 2048 x 2048, ms: f32 nt with 1 row 1.91 and 0.37, 4 rows 1.94 and 0.27, 16 rows 1.98 and
    0.90, 64 rows 5.5 and 4.0, 128 rows 6.7 and 6.0; f32 nn with 4 rows 1.10 and 0.81, 16 rows 1.6 and 1.9; bf16 nn with
    4 rows 0.39 and 0.25; bf16 nt with 1 row 0.96 and 0.67, 2 rows 0.67 and 0.81. Rows that are no multiple of 16, from
    9 on, or an N or K that is no multiple of a vector, cost several times more without it.
    """
    if case.groups is not None or case.n % 16 or case.k % 16 or case.dtype not in ("f32", "f16", "bf16"):
        return True
    rows_of_b = case.layout[1] == "t"
    if case.dtype == "bf16":
        return case.m > (1 if rows_of_b else 4)
    return case.m > 8 and not (rows_of_b and case.m <= 64 and case.m % 16 == 0)


def _tile_bytes(case: Gemm, threads: int) -> int:
    """Bytes of operands per workgroup: a quarter of each thread's share, from IREE's own 256 KiB up to 4 MiB."""
    width = _RAISED_BYTES.get(case.dtype, dtype(case.dtype).bytes)
    share = case.batch * (case.m + case.n) * case.k * width // (4 * threads)
    return min(max(1 << 18, share), 1 << 22)


class LlvmCpu(_Product):
    """Native code for the host, by LLVM."""

    name: ClassVar[str] = "iree.llvm_cpu"
    summary: ClassVar[str] = "native code for this CPU, data tiling with microkernels where packing pays"
    target: ClassVar[Target] = targets.HOST

    def packs(self, case: Gemm) -> bool:
        """By the case's shape: see ``_packs``."""
        return _packs(case)

    def flags(self, case: Gemm, device: Device) -> tuple[str, ...]:
        """Data tiling, its microkernels and its tile size; without packing, one form for all products.

        In that form a single row is multiplied as well as four; else it is a dot per column, not vectorised: 4.1 ms
        in place of 0.37 for 2048 x 2048.
        """
        if not self.packs(case):
            return ("--iree-opt-generalize-matmul",)
        return (*DATA_TILING, f"--iree-llvmcpu-matmul-tile-bytes={_tile_bytes(case, device.threads)}")


DATA_TILING = ("--iree-opt-data-tiling", "--iree-llvmcpu-enable-ukernels=all")


class Symbolic(LlvmCpu):
    """One compilation for every M: cases that differ in M alone share a module."""

    name: ClassVar[str] = "iree.symbolic"
    summary: ClassVar[str] = "as llvm_cpu, M left open: one compilation serves every M"

    def refuses(self, case: Case, device: Device) -> str | None:
        """All whose rows are not one plain axis of A, and what iree-compile 3.13 does not take with an open size."""
        assert isinstance(case, Gemm)
        if case.groups is not None or case.batch != 1 or case.layout[0] == "t" or case.epilogue == "residual":
            return "Symbolic M is one open axis, the first of A: one product, A stored as rows, no residual."
        if case.dtype in _RAISED_BYTES:
            return f"{case.dtype} is raised behind a barrier, and iree-compile loses an open size there."
        if 1 in (case.n, case.k):
            return "With M open an N or K of one becomes a dynamic reshape, which iree-compile does not take."
        return super().refuses(case, device)

    def packs(self, case: Gemm) -> bool:
        """Always: M is not known when the module is made."""
        return True

    def flags(self, case: Gemm, device: Device) -> tuple[str, ...]:
        """Data tiling with the default tile size."""
        return DATA_TILING

    def prepare(self, case: Case, device: Device) -> Program:
        """Compiles the family of the case, where that has not been done in this process."""
        assert isinstance(case, Gemm)
        from impls.iree.runtime import IreeProgram

        served = _open_rows.cache_info().hits
        data, compiled, config = _open_rows(_any_rows(case), self.flags(case, device))
        program = IreeProgram(case, device, self.target, compiled)
        reused = _open_rows.cache_info().hits > served
        program.config |= {"flags": list(self.flags(case, device)), "compiled_for_another_m": reused, **config}
        program.artefacts["module.stablehlo"] = data
        return program


def _any_rows(case: Gemm) -> Gemm:
    """The case that stands for all that differ from this one in M: with an M that no specialisation could like."""
    fields = {name: getattr(case, name) for name in ("n", "k", "dtype", "acc", "out", "layout", "epilogue")}
    return Gemm(m=7919, **fields)


@cache
def _open_rows(family: Gemm, flags: tuple[str, ...]) -> tuple[bytes, Compiled, dict[str, str]]:
    """StableHLO and module of a family of cases, M open, and what the record says about the StableHLO."""
    from impls.support import jax_cases, stablehlo

    artefact = stablehlo.export(jax_cases.computation(family), symbolic_rows="A")
    return artefact.data, targets.compile_module(artefact.data, targets.HOST, flags), artefact.config()


class Vmvx(_Product):
    """IREE's virtual machine: bytecode that runs wherever its runtime does."""

    name: ClassVar[str] = "iree.vmvx"
    summary: ClassVar[str] = "portable bytecode: what is left where no native code can be made"
    target: ClassVar[Target] = targets.VMVX

    def refuses(self, case: Case, device: Device) -> str | None:
        """What an interpreter takes too long for."""
        return targets.too_long_for_vmvx(case.flops()) or super().refuses(case, device)


class Vulkan(_Product):
    """SPIR-V through Vulkan, on Mesa's lavapipe, which runs it on the CPU."""

    name: ClassVar[str] = "iree.vulkan"
    summary: ClassVar[str] = "SPIR-V compute shaders on the CPU, through Mesa's lavapipe"
    target: ClassVar[Target] = targets.VULKAN

    def refuses(self, case: Case, device: Device) -> str | None:
        """As the others, and int8."""
        assert isinstance(case, Gemm)
        if case.dtype == "i8":
            return "IREE 3.13's int8 products are wrong on lavapipe for some shapes, such as gemm:b7x64x16x32:i8."
        return super().refuses(case, device)

    def prepare(self, case: Case, device: Device) -> Program:
        """As the others, where Vulkan has a driver."""
        require_vulkan()
        return super().prepare(case, device)


def require_vulkan() -> None:
    """Look for Mesa's lavapipe before anything is compiled.

    By the Vulkan loader's rules: VK_DRIVER_FILES or VK_ICD_FILENAMES, else the manifests in its search path
    (LoaderDriverInterface.md, "Driver Discovery").

    Raises:
        Unsupported: it is not installed.
    """
    named = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    if named:
        manifests = [Path(p) for p in named.split(os.pathsep) if Path(p).is_file()]
    else:
        folders = [Path(p) / "vulkan" / "icd.d" for p in ("/etc", "/usr/share", "/usr/local/share", "/usr/local/etc")]
        manifests = [m for folder in folders for m in folder.glob("*.json")]
    if not any("lvp" in m.name for m in manifests):
        raise Unsupported("Vulkan finds no lavapipe: install mesa-vulkan-drivers and Vulkan's loader, libvulkan1.")
