"""Attention through torch on a GPU: one program for whoever computes O from Q, K and V by torch's operators.

Owns inputs on the device and the split of forward and backward: the forward pass of a backward case runs when inputs
are loaded and leaves what autograd saves; a call computes dQ, dK and dV. It imports torch: implementations import it
inside ``prepare``, never at module level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from impls.support import torch_arrays
from impls.support.torch_program import TorchProgram
from impls.workloads.attention import Attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class _Loaded:
    """One input set.

    Attributes:
        inputs: tensors on the device, (B, S, H, D), by name.
        output: O with its graph, where only the backward pass is called.
    """

    inputs: dict[str, torch.Tensor]
    output: torch.Tensor | None


class AttentionProgram(TorchProgram):
    """Forward, backward or both, by one function of Q, K and V and torch's autograd.

    Args:
        case: the case.
        attend: O from Q, K, V, each (B, S, H, D) on the device.
        config: for the record.
    """

    def __init__(self, case: Attention, attend: Attend, config: dict[str, Any]) -> None:
        super().__init__()
        self._case, self._attend = case, attend
        self.config = config

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies on the device; for the backward pass alone, the forward pass's residuals."""
        tensors = {name: torch_arrays.to_torch(array).cuda() for name, array in inputs.items()}
        if self._case.direction != "fwd":
            for name in ("Q", "K", "V"):
                tensors[name].requires_grad_()
        return _Loaded(tensors, self._forward(tensors) if self._case.direction == "bwd" else None)

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """In place; what the forward pass left behind is made anew."""
        loaded.output = None  # frees the former residuals first
        with torch.no_grad():
            for name, tensor in loaded.inputs.items():
                tensor.copy_(torch_arrays.to_torch(inputs[name]))
        if self._case.direction == "bwd":
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
        gradients = torch.autograd.grad(
            output, (t["Q"], t["K"], t["V"]), t["dO"], retain_graph=loaded.output is not None
        )
        dq, dk, dv = (g.contiguous() for g in gradients)
        results = {"dQ": dq, "dK": dk, "dV": dv}
        return results if loaded.output is not None else {"O": output} | results

    def poison(self, loaded: _Loaded) -> None:
        """Nothing: every call allocates what it returns."""

    def _forward(self, t: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._attend(t["Q"], t["K"], t["V"]).contiguous()
