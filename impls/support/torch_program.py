"""What programs over tensors of torch have in common: contents in and out, waiting, and giving memory back.

Owns what is the same whatever computes. It imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from impls.contract import Program
from impls.support import torch_arrays


class TorchProgram(Program):
    """A program whose sets have ``inputs`` and ``outputs``, tensors by name, and whose calls return such."""

    def refill(self, loaded: Any, inputs: Mapping[str, np.ndarray]) -> Any:
        """In place."""
        for name, tensor in loaded.inputs.items():
            tensor.copy_(torch_arrays.to_torch(inputs[name]))
        return loaded

    def poison(self, loaded: Any) -> None:
        """NaN, or the least integer, into the outputs."""
        for tensor in loaded.outputs.values():
            torch_arrays.poison(tensor)

    def read_outputs(self, result: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The outputs on the host."""
        return {name: torch_arrays.to_numpy(tensor) for name, tensor in result.items()}

    def read_inputs(self, loaded: Any) -> dict[str, np.ndarray]:
        """The inputs on the host."""
        return {name: torch_arrays.to_numpy(tensor) for name, tensor in loaded.inputs.items()}

    def synchronize(self) -> None:
        """Wait for the device, if there is one."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give the device its memory back: torch would keep it."""
        torch.cuda.empty_cache()
