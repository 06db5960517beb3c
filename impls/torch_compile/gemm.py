"""GEMM written in plain torch and compiled: product, epilogue and conversions in one graph.

Inductor on a CPU leaves the product to the library call that eager mode makes (``extern_kernels.mm`` and its kin) and
compiles what surrounds it. Its own C++ GEMM template takes part under ``max_autotune`` in batched f32 products only:
for a single product it asks for a B that is constant, to be packed at compile time, and here B is an input of the call
(``use_cpp_gemm_template``, torch 2.13). For the same reason Inductor does not turn ``mm`` into oneDNN's inner product,
which is the faster in f32 (impls/blas/gemm.py): ``max_autotune`` races it as an external product, whose result is then
copied into Inductor's buffer, and ``torch_compile.linear`` calls it by an operator of its own. A product written as a
batch of one does reach the template, which takes 1.9 to 2.8 times as long as MKL (1024^3, f32).

Speed beside ``blas.default``, which calls the inner product itself (1024^3, f32, two cores of an AMD Zen 4, 30 rounds,
A/A 0.7 %): ``linear`` 0.97, ``max_autotune`` 0.94, ``default`` 0.89, which is MKL's product.

On a GPU the operators are others (gpu), and the product is cuBLAS's except where ``max_autotune`` finds one of its
Triton templates faster when it compiles, with the epilogue fused into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program
from impls.torch_compile import capture, gpu
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
        options: of Inductor, beyond the mode's.
    """

    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    backend: ClassVar[str] = "inductor"
    mode: ClassVar[str] = "default"
    options: ClassVar[dict[str, Any]] = {}

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32 on a CPU, accumulation and shapes that torch has no product for, and Inductor without a compiler."""
        assert isinstance(case, Gemm)
        if device.kind == "cuda":
            reason = gpu.refusal(case)
            if reason is not None:
                return reason
        elif case.dtype == "tf32":
            return "TF32 is a format of GPU tensor cores; torch on a CPU would compute in f32 instead."
        elif case.acc not in ("f32", "i32"):
            return f"torch on a CPU accumulates {case.dtype} in f32 and offers no acc={case.acc}."
        return capture.lacks_compiler(device) if self.backend == "inductor" else None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and C written and read again for an activation.

        Left out are the copies of f16 and f8e4m3 operands that a CPU without their arithmetic multiplies in a wider
        dtype: the device is not known here, and a GPU makes none.
        """
        assert isinstance(case, Gemm)
        again = 2 * case.output_specs()["C"].nbytes if case.epilogue in ("bias+relu", "bias+gelu") else 0
        return case.compulsory_bytes() + again

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
        from impls.support import torch_setup

        work = capture.work_dtype(case.dtype, case.out, device)
        config = torch_setup.configure(device, "high" if case.dtype == "tf32" else "highest") | {"multiplied_in": work}
        if case.groups is not None:
            at_run_time = device.kind == "cuda" and gpu.grouped_in_one_call(case)
            config["group_sizes"] = "read at run time" if at_run_time else "compiled in"
        function = gpu.computation(case) if device.kind == "cuda" else self._computation(case, work)
        products = self._products(work) if device.kind == "cpu" else ()
        call = capture.Captured(function, self.backend, self.mode, device, self.options, products)
        return _Product(case, call, config, device)

    def _computation(self, case: Gemm, work: str) -> Compute:
        """On a CPU, C from A, B and the bias, residual or group sizes, multiplied in dtype ``work``."""
        return _computation(case, work)

    def _products(self, work: str) -> tuple[Compute, ...]:
        """On a CPU, what Inductor may race against its own product in dtype ``work``."""
        return ()


class Default(_Compiled):
    """Inductor as it comes."""

    name: ClassVar[str] = "torch_compile.default"
    summary: ClassVar[str] = "torch.compile: the library's product, epilogue and conversions compiled by Inductor"


class MaxAutotune(_Compiled):
    """Inductor races its templates against the library when it compiles; on a CPU against oneDNN's product and MKL's.

    A product that an addend goes into (``addmm``) is MKL's all the same: Inductor takes external ones for ``mm`` alone.
    """

    name: ClassVar[str] = "torch_compile.max_autotune"
    summary: ClassVar[str] = "torch.compile(mode='max-autotune'): Inductor's GEMM templates raced against the libraries"
    mode: ClassVar[str] = "max-autotune"
    races: ClassVar[bool] = True

    def _products(self, work: str) -> tuple[Compute, ...]:
        return (onednn_inner_product,) if work in ("f32", "bf16") else ()


class MaxAutotuneTma(MaxAutotune):
    """As ``max_autotune``, with the template for TMA and persistent blocks among those that are raced."""

    name: ClassVar[str] = "torch_compile.max_autotune_tma"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "as max_autotune, Inductor's persistent TMA template among the choices (off by default)"
    # What ENABLE_PERSISTENT_TMA_MATMUL=1 sets.
    options: ClassVar[dict[str, Any]] = {"triton.enable_persistent_tma_matmul": True}

    def refuses(self, case: Case, device: Device) -> str | None:
        """Besides the others' reasons, what the template does not multiply."""
        assert isinstance(case, Gemm)
        if case.batch > 1 or case.groups is not None or case.dtype == "i8":
            return "Inductor's persistent TMA template multiplies one A and one B of floating-point numbers."
        return super().refuses(case, device)


class ReduceOverhead(_Compiled):
    """What ``default`` compiles, replayed as a CUDA graph. On a CPU the mode changes nothing: no graph to replay."""

    name: ClassVar[str] = "torch_compile.reduce_overhead"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = f"torch.compile(mode='reduce-overhead'): {capture.NO_CPU}"
    mode: ClassVar[str] = "reduce-overhead"


class Linear(_Compiled):
    """oneDNN's inner product with its epilogue inside, as an operator of our own that Inductor only calls.

    Inductor compiles torch's own operator for it only with a constant weight, which is then packed beforehand.
    """

    name: ClassVar[str] = "torch_compile.linear"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = (
        "torch.compile of a custom operator: oneDNN's product with the epilogue inside, no code made"
    )

    def refuses(self, case: Case, device: Device) -> str | None:
        """Besides the others' reasons, what the operator does not take."""
        assert isinstance(case, Gemm)
        if case.batch > 1 or case.groups is not None:
            return "oneDNN's inner product takes one A and one B."
        if case.dtype not in ("f32", "bf16") or case.out != case.dtype:
            return "oneDNN's inner product takes f32 or bf16 and returns the same."
        return super().refuses(case, device)

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes: the epilogue is part of the product."""
        return case.compulsory_bytes()

    def _computation(self, case: Gemm, work: str) -> Compute:
        a_transposed, b_transposed = (stored == "t" for stored in case.layout)
        linear, epilogue = _linear_operator(), case.epilogue

        def gemm(a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
            a, weight = a.mT if a_transposed else a, b if b_transposed else b.mT
            c: torch.Tensor = linear(a, weight, addend, epilogue)
            return c

        return gemm


class AotEager(_Compiled):
    """The control: what capture alone costs or brings."""

    name: ClassVar[str] = "torch_compile.aot_eager"
    summary: ClassVar[str] = "captured by Dynamo and AOTAutograd, run operator by operator: no code generated"
    backend: ClassVar[str] = "aot_eager"


class _Product(Program):
    """The compiled case."""

    def __init__(self, case: Gemm, call: capture.Captured, config: dict[str, Any], device: Device) -> None:
        super().__init__()
        from impls.support import torch_arrays

        self._arrays, self._call, self._inputs = torch_arrays, call, capture.Inputs(device, stay=call.replays)
        scaled = device.kind == "cuda" and case.dtype == "f8e4m3"
        self._scale = tuple(self._inputs.place({"scale": np.ones((), np.float32)}).values()) if scaled else ()
        examples = self._inputs.examples(case)
        call.compile(lambda: self.run(examples))
        self.config = config | call.config
        self.artefacts = call.artefacts

    def load(self, inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Tensors in the order of the case's inputs; where a CUDA graph is replayed, its recording over them."""
        loaded = self._inputs.place(inputs)
        if self._call.replays:
            self.run(loaded)
        return loaded

    def refill(self, loaded: dict[str, torch.Tensor], inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """In place."""
        self._inputs.replace(loaded, inputs)
        return loaded

    def run(self, loaded: dict[str, torch.Tensor]) -> torch.Tensor:
        """C, newly allocated."""
        result: torch.Tensor = self._call(*loaded.values(), *self._scale)
        return result

    def read_outputs(self, result: torch.Tensor) -> dict[str, np.ndarray]:
        """C. RuntimeError where a call was compiled again."""
        self._call.assert_compiled_once()
        return {"C": self._arrays.to_numpy(result)}

    def read_inputs(self, loaded: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The tensors."""
        return {name: self._arrays.to_numpy(tensor) for name, tensor in loaded.items()}

    def synchronize(self) -> None:
        """Wait for the device."""
        self._inputs.synchronize()

    def release(self) -> None:
        """Give the memory back to the device: torch would keep it."""
        self._call.release()
        self._inputs.release()


def _computation(case: Gemm, work: str) -> Compute:
    """C from A, B and the bias, residual or group sizes, multiplied in dtype ``work``."""
    from impls.support.torch_arrays import torch_dtype

    kind, out = torch_dtype(work), torch_dtype(case.out)
    a_transposed, b_transposed = (stored == "t" for stored in case.layout)
    multiply = _grouped(case.groups, work) if case.groups is not None else _single(case, work)

    def gemm(a: torch.Tensor, b: torch.Tensor, third: torch.Tensor | None = None) -> torch.Tensor:
        a, b = a.to(kind), b.to(kind)
        return multiply(_transposed(a) if a_transposed else a, _transposed(b) if b_transposed else b, third).to(out)

    return gemm


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """The operand read the other way: a row or column keeps the strides of a contiguous tensor.

    Transposed strides describe the same memory, and ``torch._int_mm`` (2.13) takes them at their word: it returns
    without writing C.
    """
    rows, columns = x.shape[-2:]
    return x.reshape(*x.shape[:-2], columns, rows) if 1 in (rows, columns) else x.mT


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


def onednn_inner_product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """A product as Inductor calls external ones, by this name: oneDNN allocates its result, which is then copied."""
    import torch

    return out.copy_(torch.ops.mkldnn._linear_pointwise.default(a, b.mT, None, "none", [], ""))


@cache
def _linear_operator() -> Any:
    """``ridgemark::linear(a, weight, addend, epilogue)``: ``mkldnn::_linear_pointwise``, opaque to Inductor."""
    import torch

    wrapped = torch.ops.mkldnn._linear_pointwise
    activations = {"bias+relu": ("relu", ""), "bias+gelu": ("gelu", "tanh")}

    def linear(a: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None, epilogue: str) -> torch.Tensor:
        if epilogue == "residual":
            c: torch.Tensor = wrapped.binary(a, addend, weight, None, "add")
        else:
            name, algorithm = activations.get(epilogue, ("none", ""))
            c = wrapped.default(a, weight, addend, name, [], algorithm)
        return c

    def shape_alone(a: torch.Tensor, weight: torch.Tensor, addend: Any, epilogue: str) -> torch.Tensor:
        return a.new_empty(a.shape[0], weight.shape[0])

    torch.library.define("ridgemark::linear", "(Tensor a, Tensor weight, Tensor? addend, str epilogue) -> Tensor")
    torch.library.impl("ridgemark::linear", "CPU", linear)
    torch.library.register_fake("ridgemark::linear", shape_alone)
    return torch.ops.ridgemark.linear.default


def _int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The int8 product in i32."""
    import torch

    return torch._int_mm(a, b)
