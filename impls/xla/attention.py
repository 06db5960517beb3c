"""Attention by XLA: written out in plain jax, whole or in chunks, and jax's own ``dot_product_attention``.

Scores and softmax are kept in f32 by both. Backward: ``jax.vjp`` splits the case into a jitted forward pass, run when
inputs are loaded, that returns O and its residuals, and a jitted backward pass of residuals and dO: a call runs the
second alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program, Unsupported
from impls.workloads.attention import Attention
from impls.workloads.base import Case

if TYPE_CHECKING:
    import jax

    Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# Bytes of an f32 score.
_SCORE = 4

# Queries in a chunk, and chunks at most: each adds a tenth of a second of compiling. CPU time at B 1, H 8, S 1024 on
# two cores of an AMD Zen 4, in chunks of 128 and whole: f32 causal D 64 12 and 35 ms (64: 18); bf16 causal on 2 key
# heads D 128 10 and 37; its window of 128 in f32 8 and 52.
_CHUNK = 128
_MOST_CHUNKS = 32


class _Jitted(Implementation):
    """What all have in common: XLA fuses neither product with the softmax, so the scores go to memory."""

    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    races: ClassVar[bool] = True  # its products, as in gemm
    compiler_options: ClassVar[dict[str, str]] = {}

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32."""
        assert isinstance(case, Attention)
        if case.dtype == "tf32":
            return "jax asks for TF32 product by product; attention is computed in f32 instead."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and passes over the whole score matrix in f32.

        Forward: scores written and read, probabilities written and read. Backward: probabilities read for dV and for
        the softmax, dP written and read, dS written and read for dQ and dK.
        """
        assert isinstance(case, Attention)
        passes = {"fwd": 4, "bwd": 7, "fwdbwd": 11}[case.direction]
        return case.compulsory_bytes() + passes * _score_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Scores and probabilities; backward dP and dS besides."""
        assert isinstance(case, Attention)
        return (2 if case.direction == "fwd" else 4) * _score_bytes(case)

    def prepare(self, case: Case, device: Device) -> Program:
        """Lowers and compiles the case."""
        assert isinstance(case, Attention)
        return _Compiled(case, device, self._attend(case, device), self.compiler_options)

    def _attend(self, case: Attention, device: Device) -> Attend:
        """O from Q, K, V, each (B, S, H, D), in jax."""
        raise NotImplementedError


class Plain(_Jitted):
    """Attention as its definition reads."""

    name: ClassVar[str] = "xla.plain"
    summary: ClassVar[str] = "einsum, mask, softmax, einsum in one jax.jit"

    def _attend(self, case: Attention, device: Device) -> Attend:
        return partial(_attention, case, case.sq)


class Chunked(Plain):
    """The same on one chunk of queries after the other, each with the keys that it may see: scores stay in cache.

    Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021; here over queries only, the loop unrolled: half
    of the keys are left out under a causal mask, most under a window.
    """

    name: ClassVar[str] = "xla.chunked"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "xla.plain on chunks of queries that fit the cache, hidden keys left out"
    # XLA's default on a CPU runs independent chunks side by side and holds all their scores.
    compiler_options: ClassVar[dict[str, str]] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

    def refuses(self, case: Case, device: Device) -> str | None:
        """Besides TF32, cases of a single chunk that leaves nothing out."""
        assert isinstance(case, Attention)
        if case.sq <= _CHUNK and case.mask != "window":
            return f"{case.sq} queries are one chunk that sees every key, which is xla.plain."
        return super().refuses(case, device)

    def traffic_bytes(self, case: Case) -> int:
        """By design the scores of a forward pass stay in cache: compulsory bytes. Backward keeps the probabilities."""
        assert isinstance(case, Attention)
        if case.direction == "fwd":
            return case.compulsory_bytes()
        passes = {"bwd": 2, "fwdbwd": 3}[case.direction]
        return case.compulsory_bytes() + passes * case.batch * case.hq * case.visible() * _SCORE

    def workspace_bytes(self, case: Case) -> int:
        """Scores and probabilities of a chunk; backward those of all chunks."""
        assert isinstance(case, Attention)
        if case.direction != "fwd":
            return super().workspace_bytes(case)
        return 2 * case.batch * case.hq * min(_chunk(case), case.sq) * case.sk * _SCORE

    def _attend(self, case: Attention, device: Device) -> Attend:
        return partial(_attention, case, _chunk(case))


class DotProductAttention(_Jitted):
    """``jax.nn.dot_product_attention``, which on a CPU is jax's own composition of the same steps."""

    name: ClassVar[str] = "xla.dot_product_attention"
    summary: ClassVar[str] = "jax.nn.dot_product_attention"

    def _attend(self, case: Attention, device: Device) -> Attend:
        import jax

        # Its is_causal and local_window_size count from the top left: right only where Sq == Sk.
        aligned = case.sq == case.sk
        whole = partial(_visible, case, 0, case.sq, 0, case.sk)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            if case.mask == "full":
                return jax.nn.dot_product_attention(q, k, v)
            if not aligned:
                return jax.nn.dot_product_attention(q, k, v, mask=whole()[None, None])
            window = (case.window - 1, 0) if case.mask == "window" else None
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)

        if case.dtype != "f16" or device.kind != "cpu":
            return attend

        # It asks for the dot algorithm F16_F16_F32, which XLA's CPU backend refuses, although a plain f16 dot is raised
        # to f32 there anyway.
        def attend_f16(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend(*(x.astype(np.float32) for x in (q, k, v))).astype(np.float16)

        return attend_f16


class Cudnn(_Jitted):
    """cuDNN's fused attention, called by XLA."""

    name: ClassVar[str] = "xla.cudnn"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = 'jax.nn.dot_product_attention(implementation="cudnn")'

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other dtypes than f16 and bf16, and masks that jax aligns to the top left."""
        assert isinstance(case, Attention)
        if case.dtype not in ("f16", "bf16"):
            return f"cuDNN's fused attention takes f16 and bf16, not {case.dtype}."
        if case.mask != "full" and case.sq not in (1, case.sk):
            return "jax aligns cuDNN's causal mask to the top left: with Sq != Sk that is another case."
        if case.mask == "window" and case.sq == 1:
            return "jax aligns cuDNN's window to the top left: with one query that is another case."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Fused: compulsory bytes."""
        return case.compulsory_bytes()

    def workspace_bytes(self, case: Case) -> int:
        """None that grows with the scores."""
        return 0

    def prepare(self, case: Case, device: Device) -> Program:
        """Lowers and compiles the case.

        Raises:
            Unsupported: jax has no cuDNN kernel for its sizes (backward of odd sequence lengths, for one).
        """
        try:
            return super().prepare(case, device)
        except NotImplementedError as error:
            told = " ".join(str(error).split()).rstrip(".")
            raise Unsupported(f"jax does not give this case to cuDNN: {told}.") from error

    def _attend(self, case: Attention, device: Device) -> Attend:
        import jax

        causal = case.mask != "full" and case.sq != 1
        window = (case.window - 1, 0) if case.mask == "window" else None

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=causal, local_window_size=window, implementation="cudnn"
            )

        return attend


def _chunk(case: Attention) -> int:
    """Queries in a chunk."""
    return max(_CHUNK, -(-case.sq // _MOST_CHUNKS))


def _score_bytes(case: Attention) -> int:
    return case.batch * case.hq * case.sq * case.sk * _SCORE


def _attention(case: Attention, chunk: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """O, ``chunk`` queries at a time; (B, S, H, D) in and out.

    Heads go before the sequence first, as a batched product has them: left to place them by itself, XLA's CPU backend
    takes 1.6 times as long (B 1, H 8, S 1024, D 64).
    """
    import jax
    import jax.numpy as jnp

    # Narrow operands have nothing to gain from the process-wide "highest", which is for f32.
    precision = jax.lax.Precision.HIGHEST if case.dtype == "f32" else jax.lax.Precision.DEFAULT
    einsum = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    q = q.reshape(case.batch, case.sq, case.hkv, case.group, case.d).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    outputs = []
    for first in range(0, case.sq, chunk):
        last = min(first + chunk, case.sq)
        begin, end = 0, case.sk
        if case.mask != "full":
            end = last + case.sk - case.sq
        if case.mask == "window":
            begin = max(0, first + case.sk - case.sq - case.window + 1)
        scores = einsum("bhgid,bhjd->bhgij", q[:, :, :, first:last], k[:, :, begin:end]) / math.sqrt(case.d)
        if case.mask != "full":
            scores = jnp.where(_visible(case, first, last, begin, end), scores, -jnp.inf)
        p = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        outputs.append(einsum("bhgij,bhjd->bhgid", p, v[:, :, begin:end]).astype(q.dtype))
    o = jnp.concatenate(outputs, axis=3).transpose(0, 3, 1, 2, 4)
    return o.reshape(case.batch, case.sq, case.hq, case.d)


def _visible(case: Attention, first: int, last: int, begin: int, end: int) -> jax.Array:
    """Whether query i in [first, last) sees key j in [begin, end): computed where it is used, not read from memory."""
    import jax
    import jax.numpy as jnp

    shape = (last - first, end - begin)
    at = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + (first + case.sk - case.sq)
    j = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + begin
    seen = j <= at
    return seen & (j > at - case.window) if case.mask == "window" else seen


@dataclass
class _Loaded:
    """One input set.

    Attributes:
        inputs: copies of the inputs, by name.
        arguments: what the compiled function is called with: inputs, or the forward pass's residuals and dO.
    """

    inputs: dict[str, jax.Array]
    arguments: tuple[Any, ...]


class _Compiled(Program):
    """A compiled function of Q, K, V [, dO], or of the forward pass's residuals and dO."""

    def __init__(self, case: Attention, device: Device, attend: Attend, options: dict[str, str]) -> None:
        super().__init__()
        import jax

        from impls.support import jax_arrays, jax_setup

        self._arrays = jax_arrays
        self._block = jax.block_until_ready
        self._blocks = device.kind == "cpu"
        self._last: tuple[jax.Array, ...] | None = None
        self._direction = case.direction
        self._outputs = tuple(case.output_specs())
        self.config = jax_setup.configure(device) | {"compiler_options": options}

        def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            o, residuals = jax.vjp(attend, q, k, v)
            return o, residuals

        def backward(residuals: Any, do: jax.Array) -> tuple[jax.Array, ...]:
            gradients: tuple[jax.Array, ...] = residuals(do)
            return gradients

        def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> tuple[jax.Array, ...]:
            o, residuals = forward(q, k, v)
            return (o, *backward(residuals, do))

        def alone(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array]:
            return (attend(q, k, v),)

        avals = [jax.ShapeDtypeStruct(s.shape, jax_arrays.jax_dtype(s.dtype)) for s in case.input_specs().values()]
        if case.direction == "bwd":
            # Jitted, vjp's closure over the residuals comes out as a tree of arrays and goes into the next function.
            lowered = jax.jit(forward).lower(*avals[:3])
            _, residuals = jax.tree.map(lambda o: jax.ShapeDtypeStruct(o.shape, o.dtype), lowered.out_info)
            self._forward = lowered.compile(options)
            self._call = jax.jit(backward).lower(residuals, avals[3]).compile(options)
            leaves = jax.tree.leaves(residuals)
            self.config["residual_bytes"] = sum(math.prod(r.shape) * r.dtype.itemsize for r in leaves)
        else:
            self._call = jax.jit(alone if case.direction == "fwd" else both).lower(*avals).compile(options)
        self.artefacts["optimized_hlo.txt"] = self._call.as_text()

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies of the inputs; for the backward pass alone, the forward pass's residuals."""
        arrays = {name: self._arrays.to_jax(array) for name, array in inputs.items()}
        if self._direction != "bwd":
            return _Loaded(arrays, tuple(arrays.values()))
        q, k, v, do = arrays.values()
        _, residuals = self._forward(q, k, v)
        return _Loaded(arrays, self._block((residuals, do)))

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """New copies and residuals: jax's arrays are immutable."""
        return self.load(inputs)

    def run(self, loaded: _Loaded) -> tuple[jax.Array, ...]:
        """The case's outputs in their order; on a CPU complete."""
        results: tuple[jax.Array, ...] = self._call(*loaded.arguments)
        if self._blocks:
            self._block(results)
        else:
            self._last = results
        return results

    def synchronize(self) -> None:
        """Wait for the last call: XLA runs calls in their order."""
        if self._last is not None:
            self._block(self._last)
            self._last = None

    def read_outputs(self, result: tuple[jax.Array, ...]) -> dict[str, np.ndarray]:
        """The outputs on the host."""
        return {name: self._arrays.to_numpy(o) for name, o in zip(self._outputs, result, strict=True)}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The copies."""
        return {name: self._arrays.to_numpy(array) for name, array in loaded.inputs.items()}
