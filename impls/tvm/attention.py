"""Attention in TVM: a Relax graph, forward and backward."""

from __future__ import annotations

from typing import ClassVar

from impls.contract import Device, Implementation, Program
from impls.workloads.attention import Attention
from impls.workloads.base import Case


class Relax(Implementation):
    """Two matmuls and a softmax, or the five products of the backward pass on the weights that the forward pass left.

    Scale and mask are fused into the first product, roundings into what precedes them. The score matrix is written in
    full, masked parts included, and read again.
    """

    name: ClassVar[str] = "tvm.relax"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "Relax graph of two matmuls and a softmax, scale and mask fused; writes the scores"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32."""
        assert isinstance(case, Attention)
        if case.dtype == "tf32":
            return "TF32 is a format of GPU tensor cores; TVM on a CPU would compute in f32 instead."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, copies of the tensors between layouts, and matrices of scores written and read."""
        assert isinstance(case, Attention)
        return case.compulsory_bytes() + 2 * case.total_bytes() + 2 * self._scores_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Matrices of scores, one of them packed as well, and the copies between layouts."""
        assert isinstance(case, Attention)
        return self._scores_bytes(case) * 2 + 3 * case.total_bytes() + (32 << 20)

    def prepare(self, case: Case, device: Device) -> Program:
        """Fuses, schedules and compiles the graph."""
        assert isinstance(case, Attention)
        from impls.tvm.kernels import graphs
        from impls.tvm.kernels.relaxed import RelaxProgram

        return RelaxProgram(case, graphs.attention(case), device)

    @staticmethod
    def _scores_bytes(case: Attention) -> int:
        """Scores and weights, and backward the gradients of both, of 4 bytes at most."""
        matrices = {"fwd": 2, "bwd": 3, "fwdbwd": 4}[case.direction]
        return 4 * matrices * case.batch * case.hq * case.sq * case.sk
