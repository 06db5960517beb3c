"""Attention through torch's eager operators on a CPU: torch's fused operator, and two products with a softmax between.

Owns how each mask, head layout and dtype is put to torch. Both implementations take f16 to f32 and back where the CPU
has no f16 arithmetic: the conversion is exact, and torch's own f16 products are four times slower with it left out.

Backward: the forward pass runs when inputs are loaded and leaves what autograd saves; a call computes dQ, dK, dV.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program
from impls.workloads.attention import Attention
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype

if TYPE_CHECKING:
    import torch

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# oneDNN multiplies f16 natively on CPUs with one of these.
_F16_ARITHMETIC = frozenset({"avx512_fp16", "amx_fp16", "fphp", "asimdhp"})

# Queries that attend together under a sliding window: 128 took 0.15 of the time of one call with a mask at S = 2048,
# W = 128 (256: 0.21, 512: 0.33), and as long as 256 at W = 512; f32 and bf16, two cores of an AMD Zen 4, torch 2.13.
_BAND = 128


class _Eager(Implementation):
    """What both have in common."""

    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32."""
        assert isinstance(case, Attention)
        if case.dtype == "tf32":
            return "TF32 is a format of GPU tensor cores; torch on a CPU would compute in f32 instead."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Nothing is compiled: the first call builds oneDNN's primitives."""
        assert isinstance(case, Attention)
        import torch

        from impls.support import torch_setup

        config = torch_setup.configure(device)
        work = case.dtype
        if work == "f16" and not device.features & _F16_ARITHMETIC:
            work = "f32"
        config["computed_in"] = work
        attend = self._attend(case, work, config)
        if work == case.dtype:
            return _Attention(case, attend, config)
        own, wide = torch.float16, torch.float32
        return _Attention(case, lambda q, k, v: attend(q.to(wide), k.to(wide), v.to(wide)).to(own), config)

    @abstractmethod
    def _attend(self, case: Attention, work: str, config: dict[str, Any]) -> Attend:
        """O from Q, K, V, each (B, S, H, D) in dtype ``work``; what was chosen goes into ``config``."""


class Sdpa(_Eager):
    """The baseline of attention on a CPU."""

    name: ClassVar[str] = "blas.sdpa"
    summary: ClassVar[str] = "torch.nn.functional.scaled_dot_product_attention, its fused CPU kernel"

    def _attend(self, case: Attention, work: str, config: dict[str, Any]) -> Attend:
        return _decode(case, work, config) if case.sq == 1 else _blocked(case, work, config)


class Unfused(_Eager):
    """Q K^T, mask, softmax, P V: what a framework without a fused operator runs."""

    name: ClassVar[str] = "blas.unfused"
    summary: ClassVar[str] = "two batched products with a softmax between, scores in memory"

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

    def _attend(self, case: Attention, work: str, config: dict[str, Any]) -> Attend:
        import torch

        from impls.support.torch_arrays import torch_dtype

        b, hq, hkv, sq, sk, d = case.batch, case.hq, case.hkv, case.sq, case.sk, case.d
        share = hq // hkv
        bias = None
        if case.mask != "full":
            # The queries of the heads that share a K and V lie below each other: one product per K and V.
            bias = _bias(case, torch_dtype(work)).repeat(share, 1)
        scale = 1 / math.sqrt(d)
        config["mask"] = "none" if bias is None else "added within the product"

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

        return attend


def _score_bytes(case: Attention) -> int:
    return case.batch * case.hq * case.sq * case.sk * dtype(case.dtype).bytes


def _bias(case: Attention, kind: torch.dtype, queries: slice = slice(None), keys: slice = slice(None)) -> torch.Tensor:
    """The mask of these queries and keys as what is added to their scores: 0 or -inf, (queries, keys).

    Torch would make this of a boolean mask in every call.
    """
    import torch

    at = torch.arange(case.sq)[queries, None] + case.sk - case.sq
    j = torch.arange(case.sk)[keys]
    hidden = j > at
    if case.mask == "window":
        hidden |= j <= at - case.window
    return torch.zeros(hidden.shape, dtype=kind).masked_fill_(hidden, -math.inf)


def _blocked(case: Attention, work: str, config: dict[str, Any]) -> Attend:
    """The fused operator on blocks of queries with the keys they may see: one block, or bands under a short window.

    Torch aligns ``is_causal`` to the top left, so that Sq != Sk needs a mask, as a window does.
    """
    import torch

    from impls.support.torch_arrays import torch_dtype

    kind = torch_dtype(work)
    blocks: list[tuple[slice, slice, torch.Tensor | None]]
    causal = False
    if case.mask == "window" and case.window + _BAND <= case.sk:
        blocks = []
        ahead = case.sk - case.sq
        for first in range(0, case.sq, _BAND):
            last = min(first + _BAND, case.sq)
            queries, keys = slice(first, last), slice(max(0, first + ahead - case.window + 1), last + ahead)
            blocks.append((queries, keys, _bias(case, kind, queries, keys)))
        config["mask"] = f"attn_mask, bands of {_BAND} queries"
    else:
        causal = case.mask == "causal" and case.sq == case.sk
        bias = None if case.mask == "full" or causal else _bias(case, kind)
        blocks = [(slice(0, case.sq), slice(0, case.sk), bias)]
        config["mask"] = "is_causal" if causal else "none" if bias is None else "attn_mask"
    gqa = case.hq != case.hkv
    fused = torch.nn.functional.scaled_dot_product_attention
    queries, keys, bias = blocks[0]
    _note_backend(
        config,
        torch.empty(case.batch, queries.stop, case.hq, case.d, dtype=kind),
        torch.empty(case.batch, keys.stop - keys.start, case.hkv, case.d, dtype=kind),
        bias,
        causal,
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        outputs = [
            fused(q[:, :, own], k[:, :, seen], v[:, :, seen], attn_mask=bias, is_causal=causal, enable_gqa=gqa)
            for own, seen, bias in blocks
        ]
        if len(outputs) == 1:
            return outputs[0].transpose(1, 2)
        return torch.cat([o.transpose(1, 2) for o in outputs], 1)

    return attend


def _decode(case: Attention, work: str, config: dict[str, Any]) -> Attend:
    """One query per sequence: it sees all keys, or the window's, so that no mask is needed.

    The heads that share a K and V are put to the fused operator as queries of one head, so that its products have more
    than one row. Two cores of an AMD Zen 4, torch 2.13, 32 heads on 8, Sk = 2048: 0.5 of the time in f32 and 0.06 in
    bf16, whose product of a single row is slow; a lone bf16 query is therefore given twice (0.3 of the time).
    """
    import torch

    from impls.support.torch_arrays import torch_dtype

    b, hkv, share, d = case.batch, case.hkv, case.hq // case.hkv, case.d
    window = slice(max(0, case.sk - case.window) if case.mask == "window" else 0, case.sk)
    rows = max(share, 2) if work == "bf16" else share
    config["mask"] = "none: the last query sees every key" + ("" if window.start == 0 else " of the window")
    config["queries_per_head"] = rows
    fused = torch.nn.functional.scaled_dot_product_attention
    kind = torch_dtype(work)
    _note_backend(
        config,
        torch.empty(b, rows, hkv, d, dtype=kind),
        torch.empty(b, case.sk - window.start, hkv, d, dtype=kind),
        None,
        False,
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.view(b, hkv, share, d)
        if rows != share:
            q = q.expand(b, hkv, rows, d)
        o = fused(q, k[:, window].transpose(1, 2), v[:, window].transpose(1, 2))
        return o[:, :, :share].reshape(b, 1, hkv * share, d)

    return attend


def _note_backend(
    config: dict[str, Any], q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool
) -> None:
    """Which kernel torch picks for tensors like these, (B, S, H, D)."""
    import torch
    from torch.nn.attention import SDPBackend

    q, k = q.transpose(1, 2), k.transpose(1, 2)
    choice = torch._fused_sdp_choice(q, k, k, attn_mask=bias, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    config["sdpa_backend"] = SDPBackend(choice).name


@dataclass
class _Loaded:
    """One input set.

    Attributes:
        inputs: tensors over the worker's arrays, (B, S, H, D), by name.
        output: O with its graph, where only the backward pass is called.
    """

    inputs: dict[str, torch.Tensor]
    output: torch.Tensor | None


class _Attention(Program):
    """Forward, backward or both, by one function of Q, K and V and torch's autograd."""

    def __init__(self, case: Attention, attend: Attend, config: dict[str, Any]) -> None:
        super().__init__()
        import torch

        from impls.support import torch_arrays

        self._case = case
        self._attend = attend
        self._arrays = torch_arrays
        self._grad = torch.autograd.grad
        self.config = config

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Tensors over the worker's arrays; for the backward pass alone, the forward pass's residuals."""
        tensors = {name: self._arrays.to_torch(array) for name, array in inputs.items()}
        if self._case.direction != "fwd":
            for name in ("Q", "K", "V"):
                tensors[name].requires_grad_()
        return _Loaded(tensors, self._forward(tensors) if self._case.direction == "bwd" else None)

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """The tensors lie over the worker's arrays; what the forward pass left behind is made anew."""
        if loaded.output is not None:
            loaded.output = None  # frees the former residuals first
            loaded.output = self._forward(loaded.inputs)
        return loaded

    def run(self, loaded: _Loaded) -> dict[str, torch.Tensor]:
        """O, or dQ, dK and dV, or all four."""
        t = loaded.inputs
        output = loaded.output
        if output is None:
            output = self._forward(t)
            if self._case.direction == "fwd":
                return {"O": output}
        # The graph outlives the call where the next call needs it too.
        gradients = self._grad(output, (t["Q"], t["K"], t["V"]), t["dO"], retain_graph=loaded.output is not None)
        dq, dk, dv = (g.contiguous() for g in gradients)
        results = {"dQ": dq, "dK": dk, "dV": dv}
        return results if loaded.output is not None else {"O": output} | results

    def read_outputs(self, result: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The results on the host."""
        return {name: self._arrays.to_numpy(tensor) for name, tensor in result.items()}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The tensors over the worker's arrays."""
        return {name: self._arrays.to_numpy(tensor) for name, tensor in loaded.inputs.items()}

    def _forward(self, t: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._attend(t["Q"], t["K"], t["V"]).contiguous()
