"""GEMM written in plain torch and compiled: product, epilogue and conversions in one graph.

Inductor on a CPU leaves the product to the library call that eager mode makes (``extern_kernels.mm`` and its kin) and
compiles what surrounds it. Its own C++ GEMM template takes part under ``max_autotune`` in batched f32 products only:
for a single product it asks for a B that is constant, to be packed at compile time, and here B is an input of the call
(``use_cpp_gemm_template``, torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program
from impls.torch_compile import capture
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

if TYPE_CHECKING:
    import torch

    Compute = Callable[..., torch.Tensor]


class _Compiled(Implementation):
    """What all variants have in common.

    Attributes:
        backend, mode: as ``torch.compile`` names them.
    """

    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    backend: ClassVar[str] = "inductor"
    mode: ClassVar[str] = "default"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, accumulation that is not in f32 or i32, and Inductor without a C++ compiler."""
        assert isinstance(case, Gemm)
        if case.dtype == "tf32":
            return "TF32 is a format of GPU tensor cores; torch on a CPU would compute in f32 instead."
        if case.acc not in ("f32", "i32"):
            return f"torch on a CPU accumulates {case.dtype} in f32 and offers no acc={case.acc}."
        return capture.lacks_compiler() if self.backend == "inductor" else None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, copies where another dtype is multiplied, C written and read again for an activation."""
        assert isinstance(case, Gemm)
        again = 2 * case.output_specs()["C"].nbytes if case.epilogue in ("bias+relu", "bias+gelu") else 0
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case) + again

    def workspace_bytes(self, case: Case) -> int:
        """Bytes of operands and results in the dtype that is multiplied, where it is not their own.

        An upper bound: the device is not known here, and f16 needs no copies where it has f16 arithmetic.
        """
        assert isinstance(case, Gemm)
        work = capture.work_dtype(case.dtype, case.out, Device("cpu", "", "", 1, 0))
        specs = [*case.input_specs().values(), *case.output_specs().values()]
        raised = [s for s in specs if work != "i8" and s.dtype not in (work, "i32")]
        return sum(math.prod(s.shape) * dtype(work).bytes for s in raised)

    def prepare(self, case: Case, device: Device) -> Program:
        """Captures and compiles the case."""
        assert isinstance(case, Gemm)
        return _Product(case, device, self.backend, self.mode)


class Default(_Compiled):
    """Inductor as it comes."""

    name: ClassVar[str] = "torch_compile.default"
    summary: ClassVar[str] = "torch.compile: the library's product, epilogue and conversions compiled by Inductor"


class MaxAutotune(_Compiled):
    """Inductor races its templates against the library when it compiles."""

    name: ClassVar[str] = "torch_compile.max_autotune"
    summary: ClassVar[str] = "torch.compile(mode='max-autotune'): Inductor's C++ GEMM template where it takes part"
    mode: ClassVar[str] = "max-autotune"


class AotEager(_Compiled):
    """The control: what capture alone costs or brings."""

    name: ClassVar[str] = "torch_compile.aot_eager"
    summary: ClassVar[str] = "captured by Dynamo and AOTAutograd, run operator by operator: no code generated"
    backend: ClassVar[str] = "aot_eager"


class _Product(Program):
    """The compiled case."""

    def __init__(self, case: Gemm, device: Device, backend: str, mode: str) -> None:
        super().__init__()
        from impls.support import torch_arrays, torch_setup

        self._arrays = torch_arrays
        work = capture.work_dtype(case.dtype, case.out, device)
        self.config = torch_setup.configure(device) | {"multiplied_in": work}
        self._call = capture.Captured(_computation(case, work), backend, mode)
        examples = [
            torch_arrays.to_torch(np.zeros(s.shape, dtype(s.dtype).storage)) for s in case.input_specs().values()
        ]
        self._call.compile(lambda: self._call(*examples))
        self.config |= self._call.config
        self.artefacts = self._call.artefacts

    def load(self, inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Tensors over the worker's arrays, in the order of the case's inputs."""
        return {name: self._arrays.to_torch(array) for name, array in inputs.items()}

    def refill(self, loaded: dict[str, torch.Tensor], inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Nothing to do: the tensors lie over the worker's arrays."""
        return loaded

    def run(self, loaded: dict[str, torch.Tensor]) -> torch.Tensor:
        """C, newly allocated."""
        result: torch.Tensor = self._call(*loaded.values())
        return result

    def read_outputs(self, result: torch.Tensor) -> dict[str, np.ndarray]:
        """C. RuntimeError where a call was compiled again."""
        self._call.assert_compiled_once()
        return {"C": self._arrays.to_numpy(result)}

    def read_inputs(self, loaded: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The tensors over the worker's arrays."""
        return {name: self._arrays.to_numpy(tensor) for name, tensor in loaded.items()}


def _computation(case: Gemm, work: str) -> Compute:
    """C from A, B and the bias, residual or group sizes, multiplied in dtype ``work``."""
    from impls.support.torch_arrays import torch_dtype

    kind, out = torch_dtype(work), torch_dtype(case.out)
    a_transposed, b_transposed = (stored == "t" for stored in case.layout)
    multiply = _grouped(case.groups, work) if case.groups is not None else _single(case, work)

    def gemm(a: torch.Tensor, b: torch.Tensor, third: torch.Tensor | None = None) -> torch.Tensor:
        a, b = a.to(kind), b.to(kind)
        return multiply(a.mT if a_transposed else a, b.mT if b_transposed else b, third).to(out)

    return gemm


def _single(case: Gemm, work: str) -> Compute:
    """The product, or a batch of them, with its epilogue; an addend goes into the product's own call."""
    import torch

    from impls.support.torch_arrays import torch_dtype

    kind, epilogue, integer, batched = torch_dtype(work), case.epilogue, work == "i8", case.batch > 1
    bare, added = (torch.bmm, torch.baddbmm) if batched else (torch.mm, torch.addmm)

    def multiply(a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
        if integer:
            # There is no batched int8 product.
            c = torch.stack([_int_mm(x, y) for x, y in zip(a, b, strict=True)]) if batched else _int_mm(a, b)
            c = c if addend is None else c + addend
        else:
            c = bare(a, b) if addend is None else added(addend.to(kind), a, b)
        if epilogue == "bias+relu":
            c = torch.relu(c)
        elif epilogue == "bias+gelu":
            c = torch.nn.functional.gelu(c, approximate="tanh")
        return c

    return multiply


def _grouped(groups: tuple[int, ...], work: str) -> Compute:
    """One product per group that has rows. The sizes are the case's: torch has no grouped product on a CPU."""
    import torch

    product = _int_mm if work == "i8" else torch.mm
    parts = [(g, stop - rows, stop) for g, (rows, stop) in enumerate(zip(groups, accumulate(groups), strict=True))]
    parts = [(g, start, stop) for g, start, stop in parts if stop > start]

    def multiply(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(a[start:stop], b[g]) for g, start, stop in parts])

    return multiply


def _int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The int8 product in i32.

    With a row or column of one element transposed strides describe the same memory as plain ones, and
    ``torch._int_mm`` (2.13) takes them at their word: it returns without writing C.
    """
    import torch

    a, b = (x.flatten().view(x.shape) if x.is_contiguous() else x for x in (a, b))
    return torch._int_mm(a, b)
