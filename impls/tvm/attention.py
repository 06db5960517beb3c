"""Attention in TVM: forward as one function written by hand; a Relax graph, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program
from impls.workloads.attention import Attention
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype

if TYPE_CHECKING:
    import tvm

# What threads hold of blocks in flight, in all: less than half a megabyte each.
_THREADS_BYTES = 32 << 20


def _refuses_dtype(case: Attention) -> str | None:
    if case.dtype == "tf32":
        return "TF32 is a format of GPU tensor cores; TVM on a CPU would compute in f32 instead."
    return None


class TensorIR(Implementation):
    """Two products and a softmax between them in the cache; see ``kernels/attention``, and ``kernels/decode`` for few
    query rows, whose K and V are read where they lie.
    """

    name: ClassVar[str] = "tvm.tensorir"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "TensorIR by hand: fused forward with an online softmax, skips what the mask hides"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32 and backward passes."""
        assert isinstance(case, Attention)
        if case.direction != "fwd":
            return "The function written by hand is the forward pass; tvm.relax has the backward pass."
        return _refuses_dtype(case)

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and K and V packed: written, and read. (Of few query rows they are not: an upper bound.)"""
        assert isinstance(case, Attention)
        return case.compulsory_bytes() + 2 * self._packed_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """K and V packed; and each thread's blocks of scores and sums."""
        assert isinstance(case, Attention)
        return self._packed_bytes(case) + _THREADS_BYTES

    def prepare(self, case: Case, device: Device) -> Program:
        """Compiles the function."""
        assert isinstance(case, Attention)
        return _Fused(case, device)

    @staticmethod
    def _packed_bytes(case: Attention) -> int:
        """K and V in words, which hold 4 bytes for an element at most."""
        return 2 * 4 * case.batch * case.sk * case.hkv * case.d


@dataclass
class _Loaded:
    """The arrays that the tensors lie over (the worker's, or aligned copies), the output, and the arguments."""

    arrays: dict[str, np.ndarray]
    output: np.ndarray
    arguments: list[tvm.runtime.Tensor]


class _Fused(Program):
    def __init__(self, case: Attention, device: Device) -> None:
        super().__init__()
        from impls.tvm.kernels import arrays, attention, compiled, host

        machine = host.of(device)
        made = attention.scheduled(case, machine)
        executable = compiled.build(made.module, machine)
        self._arrays = arrays
        self._operand = arrays.words if made.words else arrays.tensor
        self._function = executable["main"]
        self._output = case.output_specs()["O"]
        self.config = compiled.config(machine) | made.config
        self.artefacts = compiled.artefacts(made.module, executable)

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Tensors over the worker's arrays (over copies, were they not aligned) and a new output."""
        arrays = self._arrays
        held = {name: array if arrays.aligned(array) else arrays.copied(array) for name, array in inputs.items()}
        output = arrays.empty(self._output.shape, dtype(self._output.dtype).storage)
        arguments = [
            self._operand(held["Q"]),
            self._operand(held["K"]),
            arrays.tensor(held["V"]),
            arrays.tensor(output),
        ]
        return _Loaded(held, output, arguments)

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Nothing to do where the tensors lie over the worker's arrays."""
        self._arrays.update(loaded.arrays, inputs)
        return loaded

    def run(self, loaded: _Loaded) -> _Loaded:
        """O, complete."""
        self._function(*loaded.arguments)
        return loaded

    def read_outputs(self, result: _Loaded) -> dict[str, np.ndarray]:
        """O."""
        return {"O": result.output}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The arrays that the tensors lie over."""
        return loaded.arrays

    def poison(self, loaded: _Loaded) -> None:
        """NaN into O."""
        self._arrays.poison(loaded.output)


class Relax(Implementation):
    """Two matmuls and a softmax, or the five products of the backward pass on the weights that the forward pass left.

    Scale and mask are fused into the first product, roundings into what precedes them. The score matrix is written in
    full, masked parts included, and read again.
    """

    name: ClassVar[str] = "tvm.relax"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "Relax graph of two matmuls and a softmax, scale and mask fused; writes the scores"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32."""
        assert isinstance(case, Attention)
        return _refuses_dtype(case)

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, copies of the tensors between layouts, and matrices of scores written and read."""
        assert isinstance(case, Attention)
        return case.compulsory_bytes() + 2 * case.total_bytes() + 2 * self._scores_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Matrices of scores, one of them packed as well, and the copies between layouts."""
        assert isinstance(case, Attention)
        return self._scores_bytes(case) * 2 + 3 * case.total_bytes() + _THREADS_BYTES

    def prepare(self, case: Case, device: Device) -> Program:
        """Fuses, schedules and compiles the graph."""
        assert isinstance(case, Attention)
        from impls.tvm.kernels import graphs
        from impls.tvm.kernels.relaxed import RelaxProgram

        return RelaxProgram(case, graphs.attention(case), device)

    @staticmethod
    def _scores_bytes(case: Attention) -> int:
        """Scores and weights, and backward the gradients of both, of 4 bytes at most."""
        matrices = {"fwd": 2, "bwd": 3, "fwdbwd": 4}[case.direction]
        return 4 * matrices * case.batch * case.hq * case.sq * case.sk
