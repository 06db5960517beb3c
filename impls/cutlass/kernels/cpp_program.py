"""A GEMM of CUTLASS C++ as a program: its library over tensors of torch.

torch is imported first: it loads the CUDA runtime that the libraries link against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from impls.contract import Device, Unsupported
from impls.cutlass import build, cpp_choices
from impls.cutlass.cpp_choices import Choice
from impls.cutlass.kernels.cpp_library import Call, opened
from impls.support import machine_code, torch_arrays
from impls.support.torch_program import TorchProgram
from impls.workloads.gemm import Gemm

_RASTER = {"heuristic": 0, "m": 1, "n": 2}


@dataclass
class _Loaded:
    """One input set on the device, and the launch over it."""

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    workspace: torch.Tensor
    launch: Any


class Product(TorchProgram):
    """One case, cut by one choice.

    Args:
        case: the case.
        device: where it runs.
        choice: how it is cut.
        origin: where the choice comes from, for the record.
        describe: read the machine code, which takes the disassembler a second: not for a candidate of many.

    Raises:
        Unsupported: the kernel's library is not there and cannot be compiled here, or it refuses the sizes.
    """

    def __init__(self, case: Gemm, device: Device, choice: Choice, origin: str = "", *, describe: bool = True) -> None:
        super().__init__()
        self._case, self._choice = case, choice
        kernel = cpp_choices.kernel(case, choice)
        try:
            path = build.ensure(kernel)
        except build.BuildError as error:
            raise Unsupported(str(error)) from error
        torch.cuda.init()
        self._library = opened(path)
        self._multiprocessors = int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
        if not self._library.can_implement(self._call({}, None)):
            raise Unsupported("CUTLASS' collectives do not take sizes or strides of this case.")
        self.config = {
            "choice": choice.config(),
            "origin": origin,
            **cpp_choices.described(case, choice, self._library.facts),
        }
        if describe:
            code = machine_code.inspect(path.read_bytes(), dynamic_shared_bytes=self._library.facts["shared_bytes"])
            self.config["code"] = code.facts
            self.artefacts = code.artefacts("gemm")

    def _call(self, tensors: Mapping[str, torch.Tensor], output: torch.Tensor | None) -> Call:
        """The call over these tensors; the workspace is still to be set. Without tensors: its sizes only."""
        case, choice = self._case, self._choice
        address = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        a, b = ("B", "A") if choice.swapped else ("A", "B")
        m, n, k = cpp_choices.sizes(case, choice)
        return Call(
            a=address.get(a),
            b=address.get(b),
            addend=address.get("bias", address.get("residual")),
            d=None if output is None else output.data_ptr(),
            group_sizes=address.get("group_sizes"),
            m=m,
            n=n,
            k=k,
            batch=len(case.groups) if case.groups else case.batch,
            raster=_RASTER[choice.raster],
            swizzle=choice.swizzle,
            splits=choice.splits,
            multiprocessors=self._multiprocessors,
        )

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies on the device, a new output, a prepared call over both."""
        tensors = {name: torch_arrays.to_torch(array).cuda() for name, array in inputs.items()}
        spec = self._case.output_specs()["C"]
        output = torch.empty(spec.shape, dtype=torch_arrays.torch_dtype(spec.dtype), device="cuda")
        return self._bound(tensors, output)

    def over(self, loaded: _Loaded) -> _Loaded:
        """The inputs and output that another program of the case has loaded, under this one's launch."""
        return self._bound(loaded.inputs, loaded.outputs["C"])

    def _bound(self, tensors: dict[str, torch.Tensor], output: torch.Tensor) -> _Loaded:
        call = self._call(tensors, output)
        workspace = torch.empty(max(16, self._library.workspace_bytes(call)), dtype=torch.uint8, device="cuda")
        call.workspace = workspace.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        return _Loaded(tensors, {"C": output}, workspace, self._library.launcher(self._library.prepare(call), stream))

    def run(self, loaded: _Loaded) -> dict[str, torch.Tensor]:
        """C."""
        loaded.launch()
        return loaded.outputs
