"""GEMM by XLA: one jitted function per case, compiled ahead, its epilogue fused by the compiler.

The product is asked for in f32 (i32 for int8), the epilogue follows there and the result is rounded once at the end:
asked for a bf16 or f16 product directly, XLA's CPU backend raises the operands to f32 first and takes twice as long.
f8e4m3 is raised to bf16, which is exact and keeps the bf16 instructions.

On a GPU the product is asked for in the output dtype, as XLA then hands it to one kernel without a pass of its own for
rounding; f8 is multiplied as it is, with jax's default precision for fast accumulation and its highest for promoted.
Two of XLA's ways of computing a product there are avoided, because they are wrong (jax 0.11.2, H200):

- A small product with one row or column is multiplied and reduced outside of any dot, each product of two elements
  rounded to the dtype that was asked for: 24 times the tolerance in f16, 22 in bf16 (K = 48). It is asked for in f32.
- i8 with A transposed came out doubled. XLA's Triton kernels may cut K into tiles of 16, whose registers they give to
  an instruction that takes 32 twice (``mma.sync.m16n8k32``, in PTX compiled without a GPU). cuBLASLt has i8 instead.

There an epilogue in f32 is a kernel of its own. Written in the output dtype, XLA's rewriter of products takes it for
one of cuBLASLt's (bias, ReLU, the tanh form of GELU, a matrix added), unless a Triton kernel of XLA's is in the running
for the product: ``xla.cublaslt`` switches these off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

if TYPE_CHECKING:
    import jax


# Elements of a matrix from which on XLA multiplies it by a vector as a dot (found by compiling for sm_90, jax 0.11.2).
_DOT_FROM = 10_000_000


class Default(Implementation):
    """XLA's own choice of kernel for a dot; grouped products are one dot per group, their sizes compiled in."""

    name: ClassVar[str] = "xla.default"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    races: ClassVar[bool] = True  # XLA's choice among cuBLASLt's algorithms and its own kernels
    summary: ClassVar[str] = "jax.jit of a dot with its epilogue"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Accumulation that jax cannot ask for, and TF32 on a CPU."""
        assert isinstance(case, Gemm)
        if device.kind == "cuda":
            return "XLA accumulates f16 in f32 on a GPU and offers no acc=f16." if case.acc == "f16" else None
        if case.dtype == "tf32":
            return "TF32 is a format of GPU tensor cores; XLA on a CPU would compute in f32 instead."
        if case.acc not in ("f32", "i32"):
            return f"XLA on a CPU accumulates {case.dtype} in f32 and offers no acc={case.acc}."
        return None

    def workspace_bytes(self, case: Case) -> int:
        """The product before it is rounded to an output dtype narrower than f32, and operands that are raised."""
        assert isinstance(case, Gemm)
        product = sum(s.nbytes // dtype(s.dtype).bytes * 4 for s in case.output_specs().values() if s.dtype != "f32")
        wider = {"f8e4m3": 2, "f16": 4}.get(case.dtype)
        if wider is None:
            return product
        operands = [s for n, s in case.input_specs().items() if n in ("A", "B")]
        return product + sum(s.nbytes // dtype(s.dtype).bytes * wider for s in operands)

    def prepare(self, case: Case, device: Device) -> Program:
        """Lowers and compiles the case."""
        assert isinstance(case, Gemm)
        return _Product(case, device, ragged=False)


class RaggedDot(Default):
    """Grouped products by ``jax.lax.ragged_dot``, which reads the group sizes at run time."""

    name: ClassVar[str] = "xla.ragged_dot"
    summary: ClassVar[str] = "jax.lax.ragged_dot: grouped products whose sizes are read at run time"

    def refuses(self, case: Case, device: Device) -> str | None:
        """All but grouped cases."""
        assert isinstance(case, Gemm)
        if case.groups is None:
            return "jax.lax.ragged_dot is for grouped products only; xla.default has the others."
        if case.dtype == "tf32":
            return "jax.lax.ragged_dot takes no TF32."
        return super().refuses(case, device)

    def workspace_bytes(self, case: Case) -> int:
        """Besides the product: on a CPU XLA multiplies A, masked for each group, with every group's B."""
        assert isinstance(case, Gemm)
        return super().workspace_bytes(case) + len(case.groups or ()) * case.input_specs()["A"].nbytes

    def prepare(self, case: Case, device: Device) -> Program:
        """Lowers and compiles the case."""
        assert isinstance(case, Gemm)
        return _Product(case, device, ragged=True)


class CublasLt(Default):
    """The epilogue inside cuBLASLt's kernel, which adds and activates in f32; ``config.epilogue`` says what it is."""

    name: ClassVar[str] = "xla.cublaslt"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "without XLA's Triton products, so that the epilogue goes into cuBLASLt's kernel"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Products without an epilogue, or that XLA gives none: integers, rows, columns, groups; and f32 GELU."""
        assert isinstance(case, Gemm)
        if case.epilogue == "none":
            return "There is no epilogue to fuse: xla.default is the product."
        if case.dtype == "i8":
            return "XLA gives cuBLASLt's integer products no epilogue."
        if case.epilogue == "bias+gelu" and case.out == "f32":
            return "cuBLASLt's GELU is not exact to f32."
        if 1 in (case.m, case.n):
            return "XLA multiplies by a single row or column without cuBLASLt."
        return super().refuses(case, device)

    def prepare(self, case: Case, device: Device) -> Program:
        """Lowers and compiles the case. Raises RuntimeError where XLA left the epilogue outside."""
        assert isinstance(case, Gemm)
        program = _Product(case, device, ragged=False, fused=True)
        program.config["epilogue"] = found = epilogue_within(str(program.artefacts["optimized_hlo.txt"]))
        if found is None:
            raise RuntimeError("XLA left the epilogue outside cuBLASLt's call; xla.default computes it as it is meant.")
        return program


def epilogue_within(hlo: str) -> str | None:
    """What the only call of cuBLASLt in an optimised HLO text does besides the product, in XLA's words; None: nothing.

    ``BIAS``, ``BIAS_RELU``, ``BIAS_GELU``, or ``MATRIX`` where a matrix is added.
    """
    calls = [line for line in hlo.splitlines() if 'custom_call_target="__cublas$lt$matmul' in line]
    found = re.search(r'"beta":(\d).*"epilogue":"(\w+)"', calls[0]) if len(calls) == 1 else None
    if found is None or found.groups() == ("0", "DEFAULT"):
        return None
    return found[2] if found[2] != "DEFAULT" else "MATRIX"


class _Product(Program):
    """A compiled function of the case's inputs, in their order.

    Args:
        ragged: a grouped product reads its group sizes at run time.
        fused: the epilogue is to go into cuBLASLt's kernel.
    """

    def __init__(self, case: Gemm, device: Device, ragged: bool, fused: bool = False) -> None:
        super().__init__()
        import jax

        from impls.support import jax_arrays, jax_setup

        self._arrays = jax_arrays
        self._blocks = device.kind == "cpu"
        self.config = jax_setup.configure(device)
        if case.groups is not None:
            self.config["group_sizes"] = "read at run time" if ragged else "compiled in"
        specs = case.input_specs()
        avals = {name: jax.ShapeDtypeStruct(s.shape, jax_arrays.jax_dtype(s.dtype)) for name, s in specs.items()}
        lowered = jax.jit(lambda **inputs: _gemm(case, device.kind, ragged, fused, inputs)).lower(**avals)
        options = {}
        if fused or (device.kind == "cuda" and case.dtype == "i8"):
            options = self.config["compiler_options"] = {"xla_gpu_enable_triton_gemm": False}
        compiled = lowered.compile(compiler_options=options)
        self._call = compiled
        self._last: jax.Array | None = None
        self.artefacts["optimized_hlo.txt"] = compiled.as_text()

    def load(self, inputs: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Copies: jax's arrays must not change under its hands when the worker rewrites its own."""
        return {name: self._arrays.to_jax(array) for name, array in inputs.items()}

    def refill(self, loaded: dict[str, jax.Array], inputs: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """New copies: jax's arrays are immutable."""
        return self.load(inputs)

    def run(self, loaded: dict[str, jax.Array]) -> jax.Array:
        """C; on a CPU complete."""
        result: jax.Array = self._call(**loaded)
        if self._blocks:
            return result.block_until_ready()
        self._last = result
        return result

    def synchronize(self) -> None:
        """Wait for the last call: XLA runs calls in their order."""
        if self._last is not None:
            self._last.block_until_ready()
            self._last = None

    def read_outputs(self, result: jax.Array) -> dict[str, np.ndarray]:
        """C."""
        return {"C": self._arrays.to_numpy(result)}

    def read_inputs(self, loaded: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        """The copies."""
        return {name: self._arrays.to_numpy(array) for name, array in loaded.items()}


def _gemm(case: Gemm, device_kind: str, ragged: bool, narrow: bool, inputs: Mapping[str, Any]) -> jax.Array:
    """The case as a jax function of its inputs by name; ``narrow``: with its epilogue in the output dtype."""
    import jax
    import jax.numpy as jnp

    a, b = inputs["A"], inputs["B"]
    gpu = device_kind == "cuda"
    if case.dtype == "f8e4m3" and not gpu:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    wide = jnp.int32 if case.dtype == "i8" else jnp.float32
    product = dtype(case.out).storage if gpu else wide
    precision: Any = None
    if gpu and case.dtype == "tf32":
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
    elif gpu and case.dtype != "f32" and (case.dtype, case.acc) != ("f8e4m3", "f32"):
        # Narrow operands have nothing to gain from the process-wide "highest"; f8's fast accumulation is the default.
        precision = jax.lax.Precision.DEFAULT
    # Counted from the end, so that they hold with and without a batch or group axis.
    a_k, b_k = (-1 if case.layout[0] == "n" else -2), (-2 if case.layout[1] == "n" else -1)

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        batch = tuple(range(x.ndim - 2))
        numbers = (((x.ndim + a_k,), (y.ndim + b_k,)), (batch, batch))
        vector = 1 in (x.shape[-1 if a_k == -2 else -2], y.shape[-1 if b_k == -2 else -2])
        reduced = vector and max(math.prod(x.shape[-2:]), math.prod(y.shape[-2:])) < _DOT_FROM
        kind = wide if reduced and case.dtype in ("f16", "bf16") else product
        c = jax.lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=kind)
        return c.astype(product)

    if case.groups is None:
        c = dot(a, b)
    elif ragged:
        b = b if b_k == -2 else b.mT
        c = jax.lax.ragged_dot(a, b, inputs["group_sizes"], preferred_element_type=product)
    else:
        groups = enumerate(zip(case.groups, accumulate(case.groups), strict=True))
        parts = [dot(a[stop - rows : stop], b[g]) for g, (rows, stop) in groups if rows]
        c = jnp.concatenate(parts)
    if case.epilogue != "none" and not narrow:
        c = c.astype(wide)
    if "bias" in inputs:
        c = c + inputs["bias"].astype(c.dtype)
    if "residual" in inputs:
        c = c + inputs["residual"].astype(c.dtype)
    if case.epilogue == "bias+relu":
        c = jax.nn.relu(c)
    elif case.epilogue == "bias+gelu":
        c = jax.nn.gelu(c, approximate=True)
    return c.astype(dtype(case.out).storage)
