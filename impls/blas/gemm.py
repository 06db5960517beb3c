"""GEMM through torch's eager operators on a CPU: MKL and oneDNN, whichever is the faster for the case.

Torch reaches two libraries. ``torch.mm`` and its kin (``addmm``, ``bmm``, ``baddbmm``) give f32 to MKL, bf16 and i8 to
oneDNN, and write into a given output. ``mkldnn::_linear_pointwise`` is oneDNN's inner product with a fused epilogue,
the operator that torch's own compiler calls for linear layers; it takes f32 and bf16 and allocates its output. Which
one a case gets is a fixed rule (``_fused_linear``, ``_work_dtype``) that rests on races on two cores of an AMD Zen 4
(AVX-512), torch 2.13, compared by CPU time:

- f32: MKL takes 1.05 to 1.2 times as long as oneDNN where M is 4 or more (1024^3: 176 against 207 GFLOP/s), 1.5 times
  at 1023 x 1021 x 1019. But oneDNN takes 2.5 times as long where M is 1 and B is stored (K, N), and up to 1.1 times
  where A is stored (K, M) and N is at most 512, as it transposes A first;
- an activation as an operator of its own costs more than any of this: GELU and all, addmm takes 1.2 to 1.4 times as
  long as the fused operator in f32 and 1.4 to 2 times in bf16, which oneDNN multiplies either way;
- f16 on a CPU without f16 arithmetic: torch's own kernels stay under 43 GFLOP/s. Raised to f32, which is exact, 200;
  only with one or two rows and B stored (N, K) is the conversion of B dearer than the product;
- f8e4m3: ``torch._scaled_mm`` raises its operands with torch's own conversion, 4 ns for an element. Raised to bf16 by a
  table of its 256 values, 0.7 ns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

if TYPE_CHECKING:
    import torch

# oneDNN multiplies f16 natively on CPUs with one of these.
_F16_ARITHMETIC = frozenset({"avx512_fp16", "amx_fp16", "fphp", "asimdhp"})


def _work_dtype(case: Gemm, device: Device) -> str:
    """Dtype in which operands are multiplied; the product leaves in it too (accumulated in f32 or i32)."""
    if case.dtype in ("f32", "i8"):
        return case.dtype
    if case.out == "bf16" and case.dtype in ("bf16", "f8e4m3"):
        return "bf16"
    if case.out == case.dtype == "f16":
        few_rows = case.m <= 2 and case.batch == 1 and case.groups is None and case.layout == "nt"
        if few_rows or device.features & _F16_ARITHMETIC:
            return "f16"
    return "f32"


def _fused_linear(case: Gemm, work: str, m: int) -> bool:
    """Whether a product of ``m`` rows takes oneDNN's fused inner product (evidence: the module's docstring)."""
    activation = case.epilogue in ("bias+relu", "bias+gelu")
    if case.batch > 1 or work not in ("f32", "bf16"):
        return False
    if work == "bf16":
        return activation
    if case.groups is not None and case.k < 1024:
        return False  # its result is copied into the group's rows, which costs more than it saves
    transposed_a, transposed_b = (stored == "t" for stored in case.layout)
    if m == 1 and not transposed_b:
        return False
    return activation or not (transposed_a and case.n <= 512)


class Default(Implementation):
    """The baseline of GEMM on a CPU."""

    name: ClassVar[str] = "blas.default"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "torch eager on oneDNN and MKL, fused epilogue where oneDNN has it"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, and accumulation that is not in f32 or i32."""
        assert isinstance(case, Gemm)
        if case.dtype == "tf32":
            return "TF32 is a format of GPU tensor cores; torch on a CPU would compute in f32 instead."
        if case.acc not in ("f32", "i32"):
            return f"torch on a CPU accumulates {case.dtype} in f32 and offers no acc={case.acc}."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and what is held besides written once and read once."""
        assert isinstance(case, Gemm)
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Operands and results in the dtype that is multiplied, where it is not their own (f8e4m3: an index of each).

        The device is not known here: f16 is taken to be raised, though a CPU with f16 arithmetic needs no copies.
        """
        assert isinstance(case, Gemm)
        work = _work_dtype(case, _ANY_CPU)
        if work == "i8":
            return 0
        specs = (*case.input_specs().values(), *case.output_specs().values())
        copied = [s for s in specs if s.dtype not in (work, "i32")]
        index = sum(4 * math.prod(s.shape) for s in specs if s.dtype == "f8e4m3")
        return index + sum(math.prod(s.shape) * dtype(work).bytes for s in copied)

    def prepare(self, case: Case, device: Device) -> Program:
        """Nothing is compiled: the first call builds oneDNN's primitives."""
        assert isinstance(case, Gemm)
        return _Product(case, device)


_ANY_CPU = Device("cpu", "", "", 1, 0)

Step = Callable[[], "torch.Tensor"]


@dataclass
class _Loaded:
    """One input set.

    Attributes:
        inputs: tensors over the worker's arrays, by name.
        steps: the operators of one call, with their arguments.
        output: C, or None where the last step allocates and returns it.
    """

    inputs: dict[str, torch.Tensor]
    steps: list[Step]
    output: torch.Tensor | None


class _Product(Program):
    """Every operator of a call is bound to its tensors when a set is loaded; a call runs them and does nothing else."""

    def __init__(self, case: Gemm, device: Device) -> None:
        super().__init__()
        import torch

        from impls.support import torch_arrays, torch_setup

        self._torch = torch
        self._arrays = torch_arrays
        self._case = case
        self._work = _work_dtype(case, device)
        self._operators: set[str] = set()
        self.config = torch_setup.configure(device) | {"multiplied_in": self._work}

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Operators bound to tensors over the worker's arrays and to a new output."""
        case = self._case
        tensors = {name: self._arrays.to_torch(array) for name, array in inputs.items()}
        steps: list[Step] = []
        work = {name: self._raised(tensor, steps) for name, tensor in tensors.items() if name != "group_sizes"}
        a = _plain(work["A"].mT if case.layout[0] == "t" else work["A"])
        b = _plain(work["B"].mT if case.layout[1] == "t" else work["B"])
        output = self._torch.empty(case.output_specs()["C"].shape, dtype=self._arrays.torch_dtype(case.out))
        converts = case.dtype != "i8" and case.out != self._work
        fused_alone = False
        for part_a, part_b, addend, c in self._parts(a, b, work.get("bias", work.get("residual")), output):
            if _fused_linear(case, self._work, part_a.shape[0]):
                linear = self._linear(part_a, part_b, addend)
                fused_alone = not converts and case.groups is None
                steps.append(linear if fused_alone else partial(_copy, c, linear))
            else:
                target = self._torch.empty_like(c, dtype=part_a.dtype) if converts else c
                steps += self._multiply(part_a, part_b, addend, target)
                if converts:
                    steps.append(partial(c.copy_, target))
        self.config["operators"] = sorted(self._operators)
        return _Loaded(tensors, steps, None if fused_alone else output)

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Nothing to do: the tensors lie over the worker's arrays."""
        return loaded

    def run(self, loaded: _Loaded) -> torch.Tensor:
        """C."""
        result = loaded.output
        for step in loaded.steps:
            written = step()
        return written if result is None else result

    def poison(self, loaded: _Loaded) -> None:
        """NaN into C, where it is preallocated."""
        if loaded.output is not None:
            self._arrays.poison(loaded.output)

    def read_outputs(self, result: torch.Tensor) -> dict[str, np.ndarray]:
        """C."""
        return {"C": self._arrays.to_numpy(result)}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The tensors over the worker's arrays."""
        return {name: self._arrays.to_numpy(tensor) for name, tensor in loaded.inputs.items()}

    def _raised(self, operand: torch.Tensor, steps: list[Step]) -> torch.Tensor:
        """The operand in the dtype that is multiplied: where it has another, a copy that every call makes anew."""
        torch = self._torch
        to = self._arrays.torch_dtype(self._work)
        if self._case.dtype == "i8" or operand.dtype == to:
            return operand
        copy = torch.empty_like(operand, dtype=to)
        if operand.dtype != torch.float8_e4m3fn:
            steps.append(partial(copy.copy_, operand))
            return copy
        values = torch.arange(256, dtype=torch.uint8).view(operand.dtype).to(to)
        index = torch.empty(operand.numel(), dtype=torch.int32)
        steps.append(partial(index.copy_, operand.view(torch.uint8).flatten()))
        steps.append(partial(torch.index_select, values, 0, index, out=copy.view(-1)))
        return copy

    def _parts(
        self, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None, c: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """A, B, bias or residual, and C of each operator call: a group's, or an int8 batch element's."""
        case = self._case
        if case.groups is not None:
            for g, (rows, stop) in enumerate(zip(case.groups, accumulate(case.groups), strict=True)):
                if rows:
                    yield a[stop - rows : stop], b[g], None, c[stop - rows : stop]
        elif case.batch > 1 and case.dtype == "i8":  # torch has no batched int8 product
            for i in range(case.batch):
                yield a[i], b[i], addend[i] if addend is not None and addend.dim() == 3 else addend, c[i]
        else:
            yield a, b, addend, c

    def _linear(self, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None) -> Step:
        """oneDNN's inner product, weight as (N, K), the whole epilogue inside it."""
        self._operators.add("mkldnn::_linear_pointwise")
        linear = self._torch.ops.mkldnn._linear_pointwise
        if self._case.epilogue == "residual":
            return partial(linear.binary, a, addend, b.mT, None, "add")
        activation = {"bias+relu": ("relu", ""), "bias+gelu": ("gelu", "tanh")}
        name, algorithm = activation.get(self._case.epilogue, ("none", ""))
        return partial(linear.default, a, b.mT, addend, name, [], algorithm)

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None, c: torch.Tensor) -> list[Step]:
        """The product into ``c``, its bias or residual with it, an activation after it in place."""
        torch = self._torch
        steps: list[Step]
        if a.dtype == torch.int8:
            self._operators.add("aten::_int_mm")
            steps = [partial(torch._int_mm, a, b, out=c)]
            if addend is not None:
                steps.append(partial(c.add_, addend))
        else:
            bare, added = (torch.mm, torch.addmm) if a.dim() == 2 else (torch.bmm, torch.baddbmm)
            self._operators.add(f"aten::{(bare if addend is None else added).__name__}")
            steps = [partial(bare, a, b, out=c) if addend is None else partial(added, addend, a, b, out=c)]
        if self._case.epilogue == "bias+relu":
            steps.append(c.relu_)
        elif self._case.epilogue == "bias+gelu":
            steps.append(partial(torch.ops.aten.gelu_.default, c, approximate="tanh"))
        return steps


def _plain(operand: torch.Tensor) -> torch.Tensor:
    """The same view with the strides of a contiguous tensor, if it is one.

    With a row or column of one element transposed strides describe the same memory, and ``torch._int_mm`` (2.13) takes
    them at their word: it returns without writing C.
    """
    return operand.flatten().view(operand.shape) if operand.is_contiguous() else operand


def _copy(c: torch.Tensor, linear: Step) -> torch.Tensor:
    return c.copy_(linear())
