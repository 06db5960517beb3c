"""Attention as two batched products of cuBLAS with torch's softmax between: what fused kernels replaced."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from impls.contract import Device, Implementation, Program
from impls.workloads.attention import Attention
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype

if TYPE_CHECKING:
    import torch


class Unfused(Implementation):
    """Q K^T, mask, softmax, P V, each a kernel of its own, scores in memory."""

    name: ClassVar[str] = "cublas.unfused"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "two batched cuBLAS products with a softmax between, scores in memory"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, for which softmax and products would have to disagree on the dtype."""
        assert isinstance(case, Attention)
        return "torch's products take TF32 by a global switch only: ask for f32." if case.dtype == "tf32" else None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and passes over the score matrix, whole under any mask.

        Forward: scores written and read, probabilities written and read. Backward: probabilities read for dV and for
        the softmax, dP written and read, dS written and read for dQ and dK.
        """
        assert isinstance(case, Attention)
        passes = {"fwd": 4, "bwd": 7, "fwdbwd": 11}[case.direction]
        return case.compulsory_bytes() + passes * _score_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Scores and probabilities; backward dP and dS besides."""
        assert isinstance(case, Attention)
        return (2 if case.direction == "fwd" else 4) * _score_bytes(case)

    def prepare(self, case: Case, device: Device) -> Program:
        """Nothing is compiled; a mask is made once."""
        assert isinstance(case, Attention)
        import torch

        from impls.support import torch_cuda, torch_setup
        from impls.support.torch_arrays import torch_dtype

        config = torch_setup.configure(device)
        b, hq, hkv, sq, sk, d = case.batch, case.hq, case.hkv, case.sq, case.sk, case.d
        share = hq // hkv
        scale = 1 / math.sqrt(d)
        bias = None
        if case.mask != "full":
            at = torch.arange(sq, device="cuda")[:, None] + sk - sq
            j = torch.arange(sk, device="cuda")
            hidden = j > at
            if case.mask == "window":
                hidden |= j <= at - case.window
            # As what is added to the scores; the queries of the heads that share a K and V lie below each other.
            bias = torch.zeros(hidden.shape, dtype=torch_dtype(case.dtype), device="cuda")
            bias = bias.masked_fill_(hidden, -math.inf).repeat(share, 1)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q = q.view(b, sq, hkv, share, d).permute(0, 2, 3, 1, 4).reshape(b * hkv, share * sq, d)
            k = k.permute(0, 2, 3, 1).reshape(b * hkv, d, sk)
            v = v.permute(0, 2, 1, 3).reshape(b * hkv, sk, d)
            if bias is None:
                scores = torch.baddbmm(q.new_empty(1), q, k, beta=0, alpha=scale)
            else:
                scores = torch.baddbmm(bias, q, k, alpha=scale)
            o = torch.bmm(torch.softmax(scores, -1), v)
            return o.view(b, hkv, share, sq, d).permute(0, 3, 1, 2, 4).reshape(b, sq, hq, d)

        return torch_cuda.AttentionProgram(
            case, attend, config | {"mask": "none" if bias is None else "added in the product"}
        )


def _score_bytes(case: Attention) -> int:
    return case.batch * case.hq * case.sq * case.sk * dtype(case.dtype).bytes
