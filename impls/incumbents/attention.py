"""Attention by the fused kernels behind torch's ``scaled_dot_product_attention`` on a GPU.

Owns which of them takes which case. torch aligns ``is_causal`` to the top left and knows no window: such cases are
refused rather than run with a mask in memory, which neither kernel's users would accept as its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from impls.contract import Device, Implementation, Program, Unsupported
from impls.workloads.attention import Attention
from impls.workloads.base import Case

if TYPE_CHECKING:
    import torch


class _Sdpa(Implementation):
    """What both have in common."""

    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    backend: ClassVar[str]

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other dtypes than f16 and bf16, windows, a causal mask over more keys than queries."""
        assert isinstance(case, Attention)
        if case.dtype not in ("f16", "bf16"):
            return f"This kernel takes f16 and bf16, not {case.dtype}."
        if case.mask == "window":
            return "torch gives this kernel no sliding window."
        if case.mask == "causal" and case.sq != case.sk and case.sq != 1:
            return "torch aligns a causal mask to the top left: with Sq != Sk that is another case."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Nothing is compiled; torch is asked whether the kernel takes the case.

        Raises:
            Unsupported: it does not.
        """
        assert isinstance(case, Attention)
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from impls.support import torch_cuda
        from impls.support.torch_arrays import torch_dtype

        backend = getattr(SDPBackend, self.backend)
        causal = case.mask == "causal" and case.sq != 1
        gqa = case.hq != case.hkv
        shapes = [(case.batch, heads, s, case.d) for heads, s in ((case.hq, case.sq), *[(case.hkv, case.sk)] * 2)]
        q, k, v = (torch.empty(s, dtype=torch_dtype(case.dtype), device="cuda") for s in shapes)
        asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, gqa)
        able: Any = getattr(torch.backends.cuda, f"can_use_{self.backend.lower()}")
        if not able(asked, False):
            raise Unsupported(f"torch {torch.__version__} does not give this case to {self.backend}.")
        del q, k, v, asked

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                o: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=gqa
                )
            return o.transpose(1, 2)

        config = {"sdpa_backend": self.backend, "cudnn": torch.backends.cudnn.version()}
        return torch_cuda.AttentionProgram(case, attend, config)


class Cudnn(_Sdpa):
    """The baseline of attention on a GPU."""

    name: ClassVar[str] = "incumbents.cudnn"
    summary: ClassVar[str] = "cuDNN's fused attention, through torch"
    backend: ClassVar[str] = "CUDNN_ATTENTION"


class Flash(_Sdpa):
    """torch's build of FlashAttention-2."""

    name: ClassVar[str] = "incumbents.flash"
    summary: ClassVar[str] = "FlashAttention as torch ships it"
    backend: ClassVar[str] = "FLASH_ATTENTION"
