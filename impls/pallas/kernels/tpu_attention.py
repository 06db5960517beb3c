"""Attention forward on a TPU in Pallas: queries in VMEM, keys and values fetched from HBM by the kernel's own copies.

Two buffers each for K and V: the copy of the next block of keys is started before this one is multiplied. Which blocks
a block of queries needs is read from SMEM, where it is put before the kernel starts: hidden ones are never fetched.
The running maximum and sum of the online softmax stay in registers and VMEM (Milakov and Gimelshein 2018).

Owns the kernel. Block sizes are ``impls.pallas.vmem``'s. It imports JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.pallas.vmem import AttentionBlocks
from impls.workloads.attention import Attention
from impls.workloads.dtypes import dtype

# Lower than any score; finite, so that the difference of two is 0 and not NaN.
_HIDDEN = -1e30


def function(case: Attention, blocks: AttentionBlocks, interpret: Any) -> Callable[..., jax.Array]:
    """O as a function of Q, K and V, each (B, S, H, D).

    Args:
        interpret: ``pltpu.InterpretParams``; False compiles for the device.
    """
    bq, bk, group, shift = blocks.queries, blocks.keys, case.hq // case.hkv, case.sk - case.sq
    q_tiles, k_tiles = pl.cdiv(case.sq, bq), pl.cdiv(case.sk, bk)
    causal, window = case.mask != "full", case.window
    scale = 1.0 / math.sqrt(case.d)
    precision = lax.Precision.HIGHEST if case.dtype == "f32" else lax.Precision.DEFAULT
    storage = dtype(case.dtype).storage

    def bounds() -> np.ndarray:
        """(2, q_tiles): first block of keys that a block of queries sees, and the one after the last."""
        first = np.arange(q_tiles) * bq
        last = np.minimum(first + bq, case.sq) - 1
        begin = np.maximum(first + shift - window + 1, 0) // bk if window else np.zeros_like(first)
        end = (last + shift) // bk + 1 if causal else np.full_like(first, k_tiles)
        return np.stack([begin, end]).astype(np.int32)

    def kernel(
        spans: Any, q: Any, k_hbm: Any, v_hbm: Any, o: Any, k_vmem: Any, v_vmem: Any, total: Any, sems: Any
    ) -> None:
        batch, head, at = (pl.program_id(axis) for axis in range(3))
        begin, end = spans[0, at], spans[1, at]
        key_head = lax.div(head, jnp.int32(group))

        def copies(step: Any) -> list[Any]:
            slot = lax.rem(step, jnp.int32(2))
            rows = pl.ds(step * bk, bk)
            return [
                pltpu.make_async_copy(hbm.at[batch, key_head, rows], vmem.at[slot], sems.at[which, slot])
                for which, (hbm, vmem) in enumerate(((k_hbm, k_vmem), (v_hbm, v_vmem)))
            ]

        def start(step: Any) -> None:
            for copy in copies(step):
                copy.start()

        start(begin)
        total[...] = jnp.zeros_like(total)

        def body(step: Any, carry: Any) -> Any:
            most, sums = carry
            pl.when(step + 1 < end)(lambda: start(step + 1))
            for copy in copies(step):
                copy.wait()
            slot = lax.rem(step, jnp.int32(2))
            over_d = (((1,), (1,)), ((), ()))
            scores = lax.dot_general(
                q[...], k_vmem[slot], over_d, precision=precision, preferred_element_type=jnp.float32
            )
            scores = scores * scale
            key = lax.broadcasted_iota(jnp.int32, (bq, bk), 1) + step * bk
            seen = key < case.sk
            if causal:
                query = lax.broadcasted_iota(jnp.int32, (bq, bk), 0) + at * bq + shift
                seen = seen & (key <= query)
                if window:
                    seen = seen & (key > query - window)
            scores = jnp.where(seen, scores, _HIDDEN)
            now = jnp.maximum(most, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - now)
            fade = jnp.exp(most - now)
            over_k = (((1,), (0,)), ((), ()))
            values = lax.dot_general(
                weights.astype(storage), v_vmem[slot], over_k, precision=precision, preferred_element_type=jnp.float32
            )
            total[...] = total[...] * fade + values
            return now, sums * fade + weights.sum(axis=1, keepdims=True)

        empty = jnp.full((bq, 1), _HIDDEN, jnp.float32), jnp.zeros((bq, 1), jnp.float32)
        _, sums = lax.fori_loop(begin, end, body, empty)
        o[...] = (total[...] / sums).astype(storage)

    block = pl.BlockSpec((None, None, bq, case.d), lambda b, h, i, spans: (b, h, i, 0))
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    ring = pltpu.VMEM((2, bk, case.d), storage)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(case.batch, case.hq, q_tiles),
            in_specs=[block, hbm, hbm],
            out_specs=block,
            scratch_shapes=[ring, ring, pltpu.VMEM((bq, case.d), jnp.float32), pltpu.SemaphoreType.DMA((2, 2))],
        ),
        out_shape=jax.ShapeDtypeStruct((case.batch, case.hq, q_tiles * bq, case.d), storage),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=blocks.budget_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=case.flops(), bytes_accessed=case.compulsory_bytes(), transcendentals=case.exps()
        ),
        interpret=interpret,
        name="pallas_attention",
    )

    def by_head(x: jax.Array, length: int) -> jax.Array:
        """(B, S, H, D) as (B, H, length, D): a copy takes whole tiles of the last two axes."""
        return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    def compute(Q: jax.Array, K: jax.Array, V: jax.Array) -> jax.Array:
        o = call(bounds(), by_head(Q, q_tiles * bq), by_head(K, k_tiles * bk), by_head(V, k_tiles * bk))
        return o.transpose(0, 2, 1, 3)[:, : case.sq]

    return compute
