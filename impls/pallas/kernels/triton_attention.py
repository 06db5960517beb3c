"""Attention forward through Pallas' older GPU lowering, by Triton: some queries of one head a program.

Owns the kernel. It imports JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from impls.pallas.kernels.triton_tiles import Span, load, store
from impls.pallas.tiling import TritonAttentionTiling
from impls.workloads.attention import Attention
from impls.workloads.dtypes import dtype

# A score in base 2 that no query has; finite, so that the difference of two is 0 and not NaN.
_HIDDEN = -1e30


def function(case: Attention, tiling: TritonAttentionTiling, interpret: bool) -> Callable[..., jax.Array]:
    """O as a function of Q, K and V, each (B, S, H, D)."""
    t, group, shift = tiling, case.hq // case.hkv, case.sk - case.sq
    width = 1 << (case.d - 1).bit_length()  # Triton's arrays are powers of two long
    scale = math.log2(math.e) / math.sqrt(case.d)
    causal, window = case.mask != "full", case.window
    precision = lax.Precision.HIGHEST if case.dtype == "f32" else lax.Precision.DEFAULT
    storage = dtype(case.dtype).storage
    tiles = pl.cdiv(case.sq, t.rows)

    def pallas_attention(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any) -> None:
        at, head, batch = (pl.program_id(axis) for axis in range(3))
        first = (tiles - 1 - at if causal else at) * t.rows
        query, key_head = first + jnp.arange(t.rows), head // group
        rows, columns = Span(first, t.rows, case.sq), Span(0, width, case.d)
        q = load(q_ref, batch, rows, head, columns)

        def step(j: Any, carry: Any, masked: bool) -> Any:
            o, most, sums = carry
            key = j * t.keys + jnp.arange(t.keys)
            keys = Span(j * t.keys, t.keys, case.sk if masked else None)
            k = load(k_ref, batch, keys, key_head, columns)
            s = lax.dot(q, k.T, precision=precision, preferred_element_type=jnp.float32) * scale
            if masked:
                seen = jnp.broadcast_to((key < case.sk)[None], s.shape)
                if causal:
                    seen = seen & (key[None] <= query[:, None] + shift)
                if window:
                    seen = seen & (key[None] > query[:, None] + (shift - window))
                s = jnp.where(seen, s, _HIDDEN)
            now = jnp.maximum(most, s.max(axis=1))
            p, fade = jnp.exp2(s - now[:, None]), jnp.exp2(most - now)
            v = load(v_ref, batch, keys, key_head, columns)
            o = o * fade[:, None] + lax.dot(
                p.astype(storage), v, precision=precision, preferred_element_type=jnp.float32
            )
            return o, now, sums * fade + p.sum(axis=1)

        end, partly, begin, whole = pl.cdiv(case.sk, t.keys), case.sk // t.keys, 0, 0
        if causal:
            end = lax.div(jnp.minimum(first + t.rows, case.sq) - 1 + shift, t.keys) + 1
            partly = lax.div(first + shift + 1, t.keys)
        if window:
            begin = lax.div(jnp.maximum(first + shift - window + 1, 0), t.keys)
            whole = lax.div(jnp.maximum(first + t.rows + shift - window, 0) + t.keys - 1, t.keys)
        whole = jnp.clip(whole, begin, end)
        partly = jnp.clip(partly, whole, end)
        zeros = jnp.zeros((t.rows, width), jnp.float32)
        carry = zeros, jnp.full((t.rows,), _HIDDEN, jnp.float32), jnp.zeros((t.rows,), jnp.float32)
        if window:
            carry = lax.fori_loop(begin, whole, partial(step, masked=True), carry)
        carry = lax.fori_loop(whole, partly, partial(step, masked=False), carry)
        if causal or case.sk % t.keys:
            carry = lax.fori_loop(partly, end, partial(step, masked=True), carry)
        o, _, sums = carry
        store(o_ref, (batch, rows, head, columns), (o / sums[:, None]).astype(storage))

    call = pl.pallas_call(
        pallas_attention,
        grid=(tiles, case.hq, case.batch),
        out_shape=jax.ShapeDtypeStruct((case.batch, case.sq, case.hq, case.d), storage),
        compiler_params=plt.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpret,
    )
    return lambda Q, K, V: call(Q, K, V)
