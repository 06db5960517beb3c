"""Attention under torch.compile: written out in plain torch, torch's fused operator captured, and FlexAttention.

Backward: AOTAutograd splits the compiled case into a forward and a backward graph. For ``bwd`` the forward graph runs
when inputs are loaded and its residuals are kept; a call runs the backward graph alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from impls.blas import attention as eager
from impls.contract import Device, Implementation, Program
from impls.torch_compile import capture
from impls.workloads.attention import Attention
from impls.workloads.base import Case

if TYPE_CHECKING:
    import torch

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Compiled(Implementation):
    """What all variants have in common.

    Attributes:
        backend, mode: as ``torch.compile`` names them.
        raises_f16: whether f16 is taken to f32 and back where the CPU has no f16 arithmetic.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    backend: ClassVar[str] = "inductor"
    mode: ClassVar[str] = "default"
    raises_f16: ClassVar[bool] = True

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, and Inductor without a compiler."""
        assert isinstance(case, Attention)
        if case.dtype == "tf32":
            return (
                "Softmax and products would have to disagree on the dtype: ask for f32."
                if device.kind == "cuda"
                else "TF32 is a format of GPU tensor cores; torch on a CPU would compute in f32 instead."
            )
        return capture.lacks_compiler(device) if self.backend == "inductor" else None

    def prepare(self, case: Case, device: Device) -> Program:
        """Captures and compiles the case."""
        assert isinstance(case, Attention)
        import torch

        from impls.support import torch_setup

        config = torch_setup.configure(device)
        work = capture.work_dtype(case.dtype, case.dtype, device) if self.raises_f16 else case.dtype
        config["computed_in"] = work
        inner = self._attend(case, work, config, device)
        own, wide = torch.float16, torch.float32
        raised = work != case.dtype

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if raised:
                return inner(q.to(wide), k.to(wide), v.to(wide)).to(own).contiguous()
            return inner(q, k, v).contiguous()

        return _Attention(case, capture.Captured(attend, self.backend, self.mode, device), config, device)

    def _attend(self, case: Attention, work: str, config: dict[str, Any], device: Device) -> Attend:
        """O from Q, K, V, each (B, S, H, D) in dtype ``work``; what was chosen goes into ``config``."""
        raise NotImplementedError


class Default(_Compiled, eager.Unfused):
    """Attention as its definition reads; traffic and workspace are the eager one's, since scores go to memory."""

    name: ClassVar[str] = "torch_compile.default"
    summary: ClassVar[str] = "torch.compile: two batched products, mask and softmax between them in one kernel"

    def _attend(self, case: Attention, work: str, config: dict[str, Any], device: Device) -> Attend:
        import torch

        b, hq, hkv, sq, sk, d = case.batch, case.hq, case.hkv, case.sq, case.sk, case.d
        share, scale, masked, window = hq // hkv, 1 / math.sqrt(d), case.mask != "full", case.window
        config["mask"] = "computed with the softmax" if masked else "none"

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # The queries of the heads that share a K and V lie below each other: one product per K and V.
            q = q.view(b, sq, hkv, share, d).permute(0, 2, 3, 1, 4).reshape(b * hkv, share * sq, d)
            k = k.permute(0, 2, 3, 1).reshape(b * hkv, d, sk)
            v = v.permute(0, 2, 1, 3).reshape(b * hkv, sk, d)
            # The products leave in their own dtype; between them everything is f32.
            scores = torch.bmm(q, k).float() * scale
            if masked:
                at = torch.arange(sq, device=q.device)[:, None] + (sk - sq)
                j = torch.arange(sk, device=q.device)
                visible = j <= at
                if window:
                    visible &= j > at - window
                scores = scores.view(b * hkv, share, sq, sk).masked_fill(~visible, -math.inf)
                scores = scores.view(b * hkv, share * sq, sk)
            o = torch.bmm(torch.softmax(scores, -1).to(v.dtype), v)
            return o.view(b, hkv, share, sq, d).permute(0, 3, 1, 2, 4).reshape(b, sq, hq, d)

        return attend


class MaxAutotune(Default):
    """The same, where Inductor races its template for batched products against the library when it compiles."""

    name: ClassVar[str] = "torch_compile.max_autotune"
    summary: ClassVar[str] = "as default, under torch.compile(mode='max-autotune')"
    mode: ClassVar[str] = "max-autotune"
    races: ClassVar[bool] = True


class AotEager(Default):
    """The control: what capture alone costs or brings."""

    name: ClassVar[str] = "torch_compile.aot_eager"
    summary: ClassVar[str] = "as default, captured and run operator by operator: no code generated"
    backend: ClassVar[str] = "aot_eager"

    def traffic_bytes(self, case: Case) -> int:
        """As the eager one's, and an f32 copy of the scores written and read by the conversions, scaling and mask each.

        Forward: widened, scaled, masked, narrowed. Backward: the same four the other way.
        """
        assert isinstance(case, Attention)
        scores = 4 * case.batch * case.hq * case.sq * case.sk
        steps = (1 if case.mask == "full" else 2) + (0 if case.dtype == "f32" else 2)
        return super().traffic_bytes(case) + 2 * steps * scores * (2 if case.direction == "fwdbwd" else 1)

    def workspace_bytes(self, case: Case) -> int:
        """As the eager one's, and two f32 copies of the scores."""
        assert isinstance(case, Attention)
        return super().workspace_bytes(case) + 8 * case.batch * case.hq * case.sq * case.sk


class ReduceOverhead(Default):
    """What ``default`` compiles, replayed as a CUDA graph. On a CPU the mode changes nothing: no graph to replay."""

    name: ClassVar[str] = "torch_compile.reduce_overhead"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = f"as default, under torch.compile(mode='reduce-overhead'): {capture.NO_CPU}"
    mode: ClassVar[str] = "reduce-overhead"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Besides the others' reasons, the backward pass alone."""
        assert isinstance(case, Attention)
        if case.direction == "bwd":
            return "A recorded graph keeps the residuals of its last replay only, and two input sets need theirs."
        return super().refuses(case, device)


class Sdpa(_Compiled, eager.Sdpa):
    """What ``blas.sdpa`` calls, captured: torch's fused operator stays a library call."""

    name: ClassVar[str] = "torch_compile.sdpa"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "torch.compile of scaled_dot_product_attention as blas.sdpa calls it"

    def _attend(self, case: Attention, work: str, config: dict[str, Any], device: Device) -> Attend:
        return eager.Sdpa._attend(self, case, work, config)


class Flex(_Compiled):
    """FlexAttention: masks as functions, blocks that they hide left out."""

    name: ClassVar[str] = "torch_compile.flex"
    workload: ClassVar[str] = "attention"
    summary: ClassVar[str] = "flex_attention with a block mask, Inductor's fused template in C++ or Triton"
    # The template takes f16, and no conversion may follow it: Inductor (torch 2.13) tries to fuse one and gives up.
    raises_f16: ClassVar[bool] = False

    def refuses(self, case: Case, device: Device) -> str | None:
        """Besides the others' reasons, gradients and CPUs that the template is not for."""
        assert isinstance(case, Attention)
        if device.kind == "cpu" and case.direction != "fwd":
            return "FlexAttention on a CPU computes the forward pass only."
        if device.kind == "cpu" and "avx2" not in device.features:
            return "FlexAttention's template for CPUs needs an x86 CPU with AVX2."
        return super().refuses(case, device)

    def _attend(self, case: Attention, work: str, config: dict[str, Any], device: Device) -> Attend:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        ahead, window, gqa = case.sk - case.sq, case.window, case.hq != case.hkv
        block_mask = None
        if case.mask != "full":

            def visible(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
                seen = j <= i + ahead
                return seen & (j > i + ahead - window) if window else seen

            block_mask = create_block_mask(visible, None, None, case.sq, case.sk, device=device.kind)
            whole = 0 if block_mask.full_kv_num_blocks is None else int(block_mask.full_kv_num_blocks.sum())
            config["block_mask"] = {
                "block": list(block_mask.BLOCK_SIZE),
                "blocks_whole": whole,
                "blocks_masked": int(block_mask.kv_num_blocks.sum()),
            }

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            o = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=gqa)
            assert not isinstance(o, tuple)
            return o.transpose(1, 2)

        return attend


class FlexMaxAutotune(Flex):
    """The same, its tiles, stages and warps raced when it compiles."""

    name: ClassVar[str] = "torch_compile.flex_max_autotune"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "as flex, under torch.compile(mode='max-autotune'): tiles raced"
    mode: ClassVar[str] = "max-autotune"
    races: ClassVar[bool] = True


@dataclass
class _Loaded:
    """One input set.

    Attributes:
        inputs: tensors over the worker's arrays, (B, S, H, D), by name.
        output: O with its graph and residuals, where only the backward pass is called.
    """

    inputs: dict[str, torch.Tensor]
    output: torch.Tensor | None


class _Attention(Program):
    """Forward, backward or both, by one captured function of Q, K and V."""

    def __init__(self, case: Attention, attend: capture.Captured, config: dict[str, Any], device: Device) -> None:
        super().__init__()
        import torch
        from torch._functorch import config as autograd_config

        from impls.support import torch_arrays

        self._case, self._attend, self._arrays = case, attend, torch_arrays
        self._inputs = capture.Inputs(device, stay=attend.replays)
        self._grad = torch.autograd.grad
        # A donated residual is overwritten by the backward pass, which then runs once only: not where the next call
        # needs the residuals too.
        with autograd_config.patch(donated_buffer=case.direction != "bwd"):
            examples = self._inputs.examples(case)
            attend.compile(lambda: self.run(self._with_residuals(examples)))
        self.config = config | attend.config
        self.artefacts = attend.artefacts

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Tensors of the arrays; for the backward pass alone, the forward graph's residuals.

        Where a CUDA graph is replayed, its recording over them.
        """
        loaded = self._with_residuals(self._inputs.place(inputs))
        if self._attend.replays:
            self.run(loaded)
        return loaded

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """In place; what the forward graph left behind is made anew."""
        self._inputs.replace(loaded.inputs, inputs)
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
        # The residuals outlive the call where the next call needs them too.
        gradients = self._grad(output, (t["Q"], t["K"], t["V"]), t["dO"], retain_graph=loaded.output is not None)
        dq, dk, dv = (g.contiguous() for g in gradients)
        results = {"dQ": dq, "dK": dk, "dV": dv}
        return results if loaded.output is not None else {"O": output} | results

    def read_outputs(self, result: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The results. RuntimeError where a call was compiled again."""
        self._attend.assert_compiled_once()
        return {name: self._arrays.to_numpy(tensor) for name, tensor in result.items()}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The tensors."""
        return {name: self._arrays.to_numpy(tensor) for name, tensor in loaded.inputs.items()}

    def synchronize(self) -> None:
        """Wait for the device."""
        self._inputs.synchronize()

    def release(self) -> None:
        """Give the memory back to the device: torch would keep it."""
        self._attend.release()
        self._inputs.release()

    def _with_residuals(self, tensors: dict[str, torch.Tensor]) -> _Loaded:
        if self._case.direction != "fwd":
            for name in ("Q", "K", "V"):
                tensors[name].requires_grad_()
        return _Loaded(tensors, self._forward(tensors) if self._case.direction == "bwd" else None)

    def _forward(self, t: dict[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self._attend(t["Q"], t["K"], t["V"])
        return output
