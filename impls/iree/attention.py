"""Attention by IREE: from StableHLO, and fused through ``iree_linalg_ext.attention`` (see ``linalg_ext``).

Flags for StableHLO, raced with IREE 3.13 on two cores of an AMD Zen 4: 8 heads of 1024 x 1024, D = 64, f32 take 18.3 ms
without data tiling and 25.6 with it (packing scores and probabilities costs more than the products gain), bf16 24.7 and
18.9; odd sizes are several times slower without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from impls.contract import Device, Implementation, Program
from impls.iree import linalg_ext, targets
from impls.iree.gemm import DATA_TILING, require_vulkan
from impls.iree.targets import Target
from impls.workloads.attention import Attention
from impls.workloads.base import Case

# Bytes of an f32 score.
_SCORE = 4


class _FromStableHlo(Implementation):
    """Two products with the softmax between them: the compiler fuses the softmax's passes, not the products."""

    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    target: ClassVar[Target]

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32."""
        assert isinstance(case, Attention)
        return _tf32(case)

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and passes over the whole score matrix in f32.

        Forward: scores written, read for the maximum and for the exponentials, these written and read. Backward:
        scores written and read, probabilities written and read for dV and for the softmax, dP written and read, dS
        written and read for dQ and dK.
        """
        assert isinstance(case, Attention)
        passes = {"fwd": 5, "bwd": 10, "fwdbwd": 15}[case.direction]
        return case.compulsory_bytes() + passes * _score_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Scores and exponentials, and packed copies of both; backward dP and dS besides."""
        assert isinstance(case, Attention)
        return (4 if case.direction == "fwd" else 6) * _score_bytes(case)

    def flags(self, case: Attention) -> tuple[str, ...]:
        """Flags of iree-compile, beside the target's."""
        return ()

    def prepare(self, case: Case, device: Device) -> Program:
        """Exports and compiles the case; for the backward pass alone, the forward pass that gives its residuals too."""
        assert isinstance(case, Attention)
        from impls.iree.runtime import IreeProgram
        from impls.support import jax_cases, stablehlo

        artefact = stablehlo.export(jax_cases.computation(case))
        flags = self.flags(case)
        compiled = targets.compile_module(artefact.data, self.target, flags)
        if case.direction == "bwd":
            residuals = jax_cases.residuals(case)
            forward = targets.compile_module(stablehlo.export(residuals).data, self.target, flags)
            program = IreeProgram(
                case, device, self.target, compiled, forward=forward, forward_outputs=len(residuals.outputs)
            )
        else:
            program = IreeProgram(case, device, self.target, compiled)
        program.config |= {"flags": list(flags), **artefact.config()}
        program.artefacts["module.stablehlo"] = artefact.data
        return program


def _tf32(case: Attention) -> str | None:
    if case.dtype == "tf32":
        return "TF32 is a format of GPU tensor cores; IREE on a CPU would compute in f32 instead."
    return None


def _score_bytes(case: Attention) -> int:
    return case.batch * case.hq * case.sq * case.sk * _SCORE


def _loses_rows(case: Attention) -> bool:
    """Whether data tiling (IREE 3.13) may leave the last rows unwritten, or not compile.

    Seen where one query of several sequences meets several key heads with 7, 13, 14 or 15 query heads each, such as
    b2h14kv2q1k257d96:f32; up to 6 heads, 9 to 11 and multiples of 4 were right. Without it such a case takes about
    half as long again: 28 heads over 4, 1024 keys, D = 128, f32: 4.6 ms of CPU time in place of 3.9.
    """
    return case.sq == 1 and case.batch > 1 and case.hkv > 1 and case.group > 6 and case.group % 4 != 0


class StableHlo(_FromStableHlo):
    """Native code for the host, from the StableHLO that xla.stablehlo compiles too."""

    name: ClassVar[str] = "iree.stablehlo"
    summary: ClassVar[str] = "native code for this CPU from StableHLO: products and softmax apart"
    target: ClassVar[Target] = targets.HOST

    def flags(self, case: Attention) -> tuple[str, ...]:
        """Data tiling for bf16 and where sizes are not whole vectors; not where it is wrong: see ``_loses_rows``."""
        if _loses_rows(case):
            return ("--iree-opt-generalize-matmul",)
        whole_vectors = case.sq % 16 == case.sk % 16 == case.d % 16 == 0
        return () if case.dtype != "bf16" and whole_vectors else DATA_TILING


class LinalgExt(Implementation):
    """Scores stay in registers: the online softmax, tiled for this CPU's vectors."""

    name: ClassVar[str] = "iree.linalg_ext"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "native code for this CPU from iree_linalg_ext.attention: fused"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, and backward passes."""
        assert isinstance(case, Attention)
        if case.direction != "fwd":
            return "iree_linalg_ext.attention has no backward pass; iree.stablehlo has one."
        return _tf32(case)

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and every tensor in f32 written head by head and read again."""
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Q, K, V and O in f32."""
        assert isinstance(case, Attention)
        return 4 * case.batch * case.d * 2 * (case.hq * case.sq + case.hkv * case.sk)

    def prepare(self, case: Case, device: Device) -> Program:
        """Writes the module and compiles it."""
        assert isinstance(case, Attention)
        from impls.iree.runtime import IreeProgram

        module = linalg_ext.module(case)
        compiled = targets.compile_module(module, targets.HOST, linalg_ext.FLAGS, form="none")
        program = IreeProgram(case, device, targets.HOST, compiled)
        tile = linalg_ext.tile(case.d)
        program.config |= {
            "flags": list(linalg_ext.FLAGS),
            "tile": [tile.rows, tile.keys],
            "bands": len(linalg_ext.bands(case)),
        }
        program.artefacts["module.mlir"] = module
        return program


class LlvmCpu(Implementation):
    """Native code for the host: the faster of the two ways, by head size and direction."""

    name: ClassVar[str] = "iree.llvm_cpu"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "linalg_ext where it is the faster, else stablehlo"

    def refuses(self, case: Case, device: Device) -> str | None:
        """What the chosen way refuses."""
        return self._way(case).refuses(case, device)

    def traffic_bytes(self, case: Case) -> int:
        """Of the chosen way."""
        return self._way(case).traffic_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Of the chosen way."""
        return self._way(case).workspace_bytes(case)

    def prepare(self, case: Case, device: Device) -> Program:
        """As the chosen way; the configuration names it."""
        way = self._way(case)
        program = way.prepare(case, device)
        program.config["as"] = way.name
        return program

    def _way(self, case: Case) -> Implementation:
        assert isinstance(case, Attention)
        return LinalgExt() if fused(case) else StableHlo()


def fused(case: Attention) -> bool:
    """Whether the fused way is the faster: forward, few enough columns for the registers, rows to share K's tiles."""
    return case.direction == "fwd" and case.d <= 64 and case.sq * case.group >= 16


class Vmvx(_FromStableHlo):
    """IREE's virtual machine: bytecode that runs wherever its runtime does."""

    name: ClassVar[str] = "iree.vmvx"
    summary: ClassVar[str] = "portable bytecode from StableHLO"
    target: ClassVar[Target] = targets.VMVX

    def refuses(self, case: Case, device: Device) -> str | None:
        """What an interpreter takes too long for."""
        assert isinstance(case, Attention)
        # Scores that the mask hides are computed as well.
        whole = replace(case, mask="full", window=0)
        return targets.too_long_for_vmvx(whole.flops()) or super().refuses(case, device)


class Vulkan(_FromStableHlo):
    """SPIR-V through Vulkan, on Mesa's lavapipe, which runs it on the CPU."""

    name: ClassVar[str] = "iree.vulkan"
    summary: ClassVar[str] = "SPIR-V compute shaders on the CPU, through Mesa's lavapipe, from StableHLO"
    target: ClassVar[Target] = targets.VULKAN

    def refuses(self, case: Case, device: Device) -> str | None:
        """As the others, 16-bit elements and backward passes."""
        assert isinstance(case, Attention)
        if case.dtype in ("f16", "bf16"):
            return "IREE 3.13's 16-bit attention is wrong on lavapipe for some shapes, such as b2h4kv2q70k33d64:bf16."
        if case.direction != "fwd":
            return "IREE 3.13 computes wrong gradients on lavapipe for some shapes, such as b1h2s67d64:f32:window=16."
        return super().refuses(case, device)

    def prepare(self, case: Case, device: Device) -> Program:
        """As the others, where Vulkan has a driver."""
        require_vulkan()
        return super().prepare(case, device)
