"""Attention by the kernels that users have: those behind torch's ``scaled_dot_product_attention``, FlashAttention-4.

Owns which of them takes which case. torch aligns ``is_causal`` to the top left and knows no window: such cases are
refused rather than run with a mask in memory, which neither kernel's users would accept as its time. FlashAttention-4
comes without torch's operators: what its host code launches is recorded beforehand (``kernels.recording``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from impls.contract import Device, Implementation, Program, Unsupported
from impls.incumbents.kernels import recording
from impls.workloads.attention import Attention
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype

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


class FlashAttention4(Implementation):
    """The newest FlashAttention, written in CUTLASS' CuTe DSL; recorded beforehand."""

    name: ClassVar[str] = "incumbents.fa4"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "FlashAttention-4 (CuTe DSL), its own choice of tiles, compiled beforehand for sm_90a"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other dtypes than f16 and bf16, head sizes that it has no kernel for."""
        assert isinstance(case, Attention)
        if device.arch != recording.ARCH:
            return f"Its kernels are compiled beforehand, for {recording.ARCH}, not for {device.arch}."
        if case.dtype not in ("f16", "bf16"):
            return f"FlashAttention-4 takes f16 and bf16, not {case.dtype}."
        if case.d % 8 or case.d > 256:
            return "FlashAttention-4 takes heads of up to 256, a multiple of 8."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Backward dQ is summed in f32: set to zero, added to, read; of grouped heads dK and dV too. O and dO are read
        by a kernel of their own, whose two f32 per row the next one reads.
        """
        assert isinstance(case, Attention)
        if case.direction == "fwd":
            return case.compulsory_bytes()
        rows = case.batch * case.sq * case.hq
        summed = rows * case.d
        if case.hq != case.hkv:
            summed += 2 * case.batch * case.sk * case.hkv * case.d
        inputs = sum(spec.nbytes for spec in case.input_specs().values()) if case.direction == "fwdbwd" else 0
        once_more = 2 * rows * case.d * dtype(case.dtype).bytes
        return case.compulsory_bytes() + inputs + once_more + 4 * (4 * summed) + 6 * 4 * rows

    def workspace_bytes(self, case: Case) -> int:
        """The scratch that was recorded."""
        return recording.scratch_bytes(self.name, case)

    def prepare(self, case: Case, device: Device) -> Program:
        """What was recorded, its libraries loaded.

        Raises:
            Unsupported: this case was not recorded, or for another device.
        """
        assert isinstance(case, Attention)
        from impls.incumbents.kernels.replay import Replayed

        found = recording.recorded(self.name, case)
        [one] = found.recordings
        return Replayed(case, found, one, {})
