"""Blocks of the TPU kernels, and the VMEM that they take.

Owns the sizes and the budget. It imports no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

from impls.workloads.attention import Attention
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

#: What XLA gives a kernel of the VMEM by default, on every generation ("scoped VMEM"): 16 MiB.
BUDGET_BYTES = 16 << 20
# A vector register holds 8 sublanes of 128 lanes; arrays in VMEM are padded to whole ones.
_LANES, _SUBLANES = 128, 8


@dataclass(frozen=True)
class GemmBlocks:
    """Rows and columns of C, and of K, that one step works on."""

    m: int
    n: int
    k: int
    budget_bytes: int = BUDGET_BYTES

    def bytes(self, case: Gemm) -> int:
        """VMEM: two buffers for every block that is copied, and the sums."""
        size, out = dtype(case.dtype).bytes, dtype(case.out).bytes
        copied = (self.m * self.k + self.k * self.n) * size + self.m * self.n * out
        if case.epilogue == "residual":
            copied += self.m * self.n * out
        # Operands that are widened first take their room a second time.
        widened = 2 * (self.m + self.n) * self.k if case.dtype == "f8e4m3" else 0
        return 2 * copied + self.m * self.n * 4 + widened


@dataclass(frozen=True)
class AttentionBlocks:
    """Queries and keys that one step works on."""

    queries: int
    keys: int
    budget_bytes: int = BUDGET_BYTES

    def bytes(self, case: Attention) -> int:
        """VMEM: two buffers each for Q, O, K and V; sums, scores and probabilities."""
        d, size = _up(case.d, _LANES), dtype(case.dtype).bytes
        copied = 2 * (2 * self.queries + 2 * self.keys) * d * size
        return copied + self.queries * d * 4 + self.queries * self.keys * (4 + 4 + size)


def gemm(case: Gemm) -> GemmBlocks:
    """Blocks of 512, smaller where the case is."""
    return GemmBlocks(*(min(512, _up(size, _LANES)) for size in (case.m, case.n, case.k)))


def attention(case: Attention) -> AttentionBlocks:
    """Blocks of 256 queries and 512 keys, smaller where the case is; 16-bit tiles have twice the sublanes."""
    return AttentionBlocks(min(256, _up(case.sq, 2 * _SUBLANES)), min(512, _up(case.sk, _LANES)))


def refusal(blocks: GemmBlocks | AttentionBlocks, need: int) -> str | None:
    """Why these blocks do not fit, one sentence; None where they do."""
    if need <= blocks.budget_bytes:
        return None
    return (
        f"The kernel's blocks need {need / 2**20:.1f} MiB of VMEM; it may have {blocks.budget_bytes / 2**20:.0f} MiB."
    )


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
