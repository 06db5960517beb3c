"""A case as jax functions of its inputs, in their order: what is exported as StableHLO.

Owns how GEMM and attention are written down where a compiler is to find the rest by itself: one dot (attention: two)
with what precedes and follows it, no hint of tiles. It imports jax: implementations import it inside ``prepare``.

- Products are asked for in f32 (i32 for int8), epilogues follow there, and results are rounded once at the end.
- f16 and f8e4m3 operands are raised first, to f32 and bf16, which is exact, and a barrier keeps the raised copy apart
  from the product. Without it IREE undoes the raising and multiplies f16 by converting inside the inner loop: 18.8 ms
  in place of 11.1 for 1024^3 on two cores of an AMD Zen 4.
- Masks are added, zeros and minus infinities, behind a barrier of their own: where IREE (3.13) fuses the comparison of
  positions with packed scores, its compiler crashes.
- Attention's operands stand in the order in which a product wants them, so that no matrix of scores is turned around:
  8 heads of 1024 x 1024 in f32 by XLA take 44 ms of CPU time, by ``einsum`` 78. Where few rows meet each K, K stands on
  the left, since turning K costs more than turning the scores: decoding in bf16 by IREE takes 4.1 ms, else 6.4.
- Attention divides by the sum of exponentials after the second product: Sq x D divisions in place of Sq x Sk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp

from impls.workloads.attention import Attention
from impls.workloads.base import Case, TensorSpec
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

#: Arrays in, arrays out.
Function = Callable[..., tuple[jax.Array, ...]]

# What operands are raised to before they are multiplied.
_RAISED = {"f16": jnp.float32, "f8e4m3": jnp.bfloat16}

# Up to so many query rows per K, K stands on the left of the product that gives the scores.
_FEW_ROWS = 32


@dataclass(frozen=True)
class Computation:
    """A function and what it takes.

    Attributes:
        name: the exported module's name.
        function: of the inputs, in their order; gives a tuple of outputs, in their order.
        inputs: by name.
        outputs: names.
    """

    name: str
    function: Function
    inputs: dict[str, TensorSpec]
    outputs: tuple[str, ...]


def computation(case: Case) -> Computation:
    """The case's timed work. A backward pass also takes what ``residuals`` gives, after the case's inputs.

    Raises:
        NotImplementedError: a workload that is not written in jax here.
    """
    outputs = tuple(case.output_specs())
    if isinstance(case, Gemm):
        return Computation("gemm", partial(_gemm, case), case.input_specs(), outputs)
    if isinstance(case, Attention):
        if case.direction == "fwd":
            return Computation("attention", lambda q, k, v: _forward(case, q, k, v)[:1], case.input_specs(), outputs)
        if case.direction == "fwdbwd":
            return Computation("attention_fwdbwd", partial(_both, case), case.input_specs(), outputs)
        inputs = case.input_specs() | _residual_specs(case)
        return Computation("attention_bwd", partial(_backward, case), inputs, outputs)
    raise NotImplementedError(f"{case.workload} is not written in jax.")


def residuals(case: Attention) -> Computation:
    """What a backward pass keeps of a forward pass: O and, per query, the logarithm of the sum of exponentials."""
    inputs = {name: spec for name, spec in case.input_specs().items() if name != "dO"}
    return Computation("attention_residuals", partial(_forward, case), inputs, tuple(_residual_specs(case)))


def _residual_specs(case: Attention) -> dict[str, TensorSpec]:
    return {
        "O": TensorSpec((case.batch, case.sq, case.hq, case.d), case.dtype),
        "lse": TensorSpec((case.batch, case.hkv, case.group, case.sq), "f32"),
    }


def _raised(case: Gemm | Attention, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands in the dtype that is multiplied."""
    if case.dtype not in _RAISED:
        return operands
    raised: tuple[jax.Array, ...] = jax.lax.optimization_barrier(
        tuple(operand.astype(_RAISED[case.dtype]) for operand in operands)
    )
    return raised


# --- GEMM -----------------------------------------------------------------------------------------------------------


def _gemm(case: Gemm, *inputs: jax.Array) -> tuple[jax.Array]:
    named = dict(zip(case.input_specs(), inputs, strict=True))
    a, b = _raised(case, named["A"], named["B"])
    wide = jnp.int32 if case.dtype == "i8" else jnp.float32
    # Counted from the end, so that they hold with and without a batch or group axis.
    a_k, b_k = (-1 if case.layout[0] == "n" else -2), (-2 if case.layout[1] == "n" else -1)

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        batch = tuple(range(x.ndim - 2))
        numbers = (((x.ndim + a_k,), (y.ndim + b_k,)), (batch, batch))
        return jax.lax.dot_general(x, y, numbers, preferred_element_type=wide)

    if case.groups is None:
        c = dot(a, b)
    else:
        groups = enumerate(zip(case.groups, accumulate(case.groups), strict=True))
        c = jnp.concatenate([dot(a[stop - rows : stop], b[g]) for g, (rows, stop) in groups if rows])
    for addend in ("bias", "residual"):
        if addend in named:
            c = c + named[addend].astype(wide)
    if case.epilogue == "bias+relu":
        c = jnp.maximum(c, 0)
    elif case.epilogue == "bias+gelu":
        c = jax.nn.gelu(c, approximate=True)
    return (c.astype(dtype(case.out).storage),)


# --- attention ------------------------------------------------------------------------------------------------------


def _with_keys(x: jax.Array, keys: jax.Array, axis: int) -> jax.Array:
    """x, (B, Hkv, ..., one axis), times K or V, (B, Sk, Hkv, D), summed over x's last axis and ``axis``, in f32."""
    numbers = (((x.ndim - 1,), (axis,)), ((0, 1), (0, 2)))
    return jax.lax.dot_general(x, keys, numbers, preferred_element_type=jnp.float32)


def _over_queries(x: jax.Array, y: jax.Array) -> jax.Array:
    """x and y, both (B, Hkv, group, Sq, one axis), summed over a group's queries, in f32: (B, x's, Hkv, y's)."""
    numbers = (((2, 3), (2, 3)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32).transpose(0, 2, 1, 3)


def _queries(case: Attention, x: jax.Array) -> jax.Array:
    """(B, Sq, Hq, D) as (B, Hkv, group, Sq, D)."""
    return x.reshape(case.batch, case.sq, case.hkv, case.group, case.d).transpose(0, 2, 3, 1, 4)


def _scores(case: Attention, q: jax.Array, k: jax.Array) -> jax.Array:
    """(B, Hkv, group, Sq, Sk) in f32, hidden ones minus infinity."""
    if case.group * case.sq <= _FEW_ROWS:
        numbers = (((3,), (4,)), ((0, 2), (0, 1)))
        scores = jax.lax.dot_general(k, q, numbers, preferred_element_type=jnp.float32).transpose(0, 1, 3, 4, 2)
    else:
        scores = _with_keys(q, k, 3)
    scores = scores * case.d**-0.5
    if case.mask == "full":
        return scores
    query = jnp.arange(case.sq)[:, None] + (case.sk - case.sq)
    key = jnp.arange(case.sk)[None, :]
    visible = key <= query
    if case.mask == "window":
        visible &= key > query - case.window
    return scores + jax.lax.optimization_barrier(jnp.where(visible, jnp.float32(0), -jnp.inf))


def _forward(case: Attention, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """O, and the logarithm of the sum of exponentials (B, Hkv, group, Sq)."""
    q, k, v = _raised(case, q, k, v)
    scores = _scores(case, _queries(case, q), k)
    most = scores.max(axis=-1, keepdims=True)
    exps = jnp.exp(scores - most)
    sums = exps.sum(axis=-1)
    o = _with_keys(exps.astype(v.dtype), v, 1) / sums[..., None]
    return _as_stored(case, o), most[..., 0] + jnp.log(sums)


def _backward(
    case: Attention, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, o: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dQ, dK, dV: the scores again, then ds = p (dp - delta) with delta = do . o (Dao 2023, FlashAttention-2)."""
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(axis=-1)  # (B, Sq, Hq)
    delta = delta.transpose(0, 2, 1).reshape(lse.shape)
    q, k, v, do = _raised(case, q, k, v, do)
    q, do = _queries(case, q), _queries(case, do)
    p = jnp.exp(_scores(case, q, k) - lse[..., None])
    dp = _with_keys(do, v, 3)
    ds = (p * (dp - delta[..., None])).astype(v.dtype)
    dq = _with_keys(ds, k, 1) * case.d**-0.5
    dk = _over_queries(ds, q) * case.d**-0.5
    dv = _over_queries(p.astype(v.dtype), do)
    storage = dtype(case.dtype).storage
    return _as_stored(case, dq), dk.astype(storage), dv.astype(storage)


def _as_stored(case: Attention, x: jax.Array) -> jax.Array:
    """(B, Hkv, group, Sq, D) as (B, Sq, Hq, D), in the case's dtype."""
    x = x.transpose(0, 3, 1, 2, 4).reshape(case.batch, case.sq, case.hq, case.d)
    return x.astype(dtype(case.dtype).storage)


def _both(case: Attention, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> tuple[jax.Array, ...]:
    o, lse = _forward(case, q, k, v)
    return (o, *_backward(case, q, k, v, do, o, lse))
