"""A Relax module as a program: compiled by ``pipeline``, run by Relax's virtual machine, which allocates outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from impls.contract import Device, Program
from impls.tvm.kernels import arrays, compiled, host, pipeline
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype


@dataclass
class _Loaded:
    """The arrays that the tensors lie over (the worker's, or aligned copies), the tensors, and the residuals."""

    arrays: dict[str, np.ndarray]
    tensors: list[tvm.runtime.Tensor]
    residuals: list[tvm.runtime.Tensor]


class RelaxProgram(Program):
    """``main`` of a Relax module: the case's inputs, and after them what its ``residuals`` gave, to the outputs."""

    def __init__(self, case: Case, module: tvm.IRModule, device: Device) -> None:
        super().__init__()
        machine = host.of(device)
        scheduled, executable = pipeline.compile_module(module, machine)
        machine_code = relax.VirtualMachine(executable, tvm.cpu())
        self._main = machine_code["main"]
        functions = {str(name.name_hint) for name in module.functions}
        self._residuals = machine_code["residuals"] if "residuals" in functions else None
        self._outputs = {name: dtype(spec.dtype).storage for name, spec in case.output_specs().items()}
        self.config = compiled.config(machine) | {"kernels": pipeline.kernels(scheduled)}
        self.artefacts = {"graph.py": module.script(), "scheduled.py": scheduled.script()}

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Tensors over the worker's arrays, or over copies where those are not aligned."""
        held = {name: array if arrays.aligned(array) else arrays.copied(array) for name, array in inputs.items()}
        tensors = [arrays.typed(array) for array in held.values()]
        return _Loaded(held, tensors, self._remembered(tensors))

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """New residuals; the tensors lie over the worker's arrays."""
        arrays.update(loaded.arrays, inputs)
        loaded.residuals = self._remembered(loaded.tensors)
        return loaded

    def run(self, loaded: _Loaded) -> Any:
        """The output, or a tuple of them, complete."""
        return self._main(*loaded.tensors, *loaded.residuals)

    def read_outputs(self, result: Any) -> dict[str, np.ndarray]:
        """Copies."""
        tensors = [result] if len(self._outputs) == 1 else list(result)
        return {
            name: arrays.to_numpy(tensor, storage)
            for (name, storage), tensor in zip(self._outputs.items(), tensors, strict=True)
        }

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The arrays that the tensors lie over."""
        return loaded.arrays

    def _remembered(self, tensors: list[tvm.runtime.Tensor]) -> list[tvm.runtime.Tensor]:
        return list(self._residuals(*tensors[:3])) if self._residuals is not None else []
