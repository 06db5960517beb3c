"""Attention forward on Hopper in Mosaic GPU: one warpgroup that loads K and V, two that each own some queries.

The two take turns on the tensor cores, as in FlashAttention-3 (Shah et al. 2024, section 3.1): while one multiplies,
the other computes the exponentials of the scores it has. Probabilities go to the second product from registers. Blocks
of keys that every query of the block sees are not masked; those that none sees are not loaded. Under a causal mask the
blocks with the most keys are launched first.

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
from jax.experimental.pallas import mosaic_gpu as plgpu

from impls.pallas.kernels.shared_memory import tiles
from impls.pallas.tiling import AttentionTiling
from impls.workloads.attention import Attention
from impls.workloads.dtypes import dtype

# Registers of a thread: 65,536 on a multiprocessor, for 128 threads that load and 256 that multiply.
_LOADING, _MULTIPLYING = 40, 232
_CONSUMERS = 2
# A score in base 2 that no query has: its exponential is 0 beside any other, and the difference of two is 0, not NaN.
_HIDDEN = -1e30


def function(case: Attention, tiling: AttentionTiling, interpret: Any, residuals: bool = False) -> Callable[..., Any]:
    """O as a function of Q, K and V, each (B, S, H, D).

    Args:
        interpret: parameters of the interpreter; None compiles for the device.
        residuals: also return, for a backward pass, the logarithms in base 2 of the rows' sums, (B, Hq, Sq) in f32.
    """
    t, group, shift = tiling, case.hq // case.hkv, case.sk - case.sq
    scale = math.log2(math.e) / math.sqrt(case.d)  # exponentials are taken in base 2
    rows = _CONSUMERS * t.rows
    row_tiles = pl.cdiv(case.sq, rows)
    causal, window = case.mask != "full", case.window
    # JAX 0.11's interpreter has no products of operands in registers, and no accumulators that outlive a scope.
    simulated = interpret is not None
    row, square = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

    def spans(first: Any) -> tuple[Any, Any, Any, Any]:
        """Blocks of keys of the queries from ``first`` on: some query sees [begin, end), every one [whole, partial)."""
        end, partly = jnp.int32(pl.cdiv(case.sk, t.keys)), jnp.int32(case.sk // t.keys)
        begin = whole = jnp.int32(0)
        if causal:
            last = jnp.minimum(first + rows, case.sq) - 1 + shift
            end, partly = lax.div(last, t.keys) + 1, lax.div(first + shift + 1, t.keys)
        if window:
            begin = lax.div(jnp.maximum(first + shift - window + 1, 0), t.keys)
            whole = lax.div(jnp.maximum(first + rows + shift - window, 0) + t.keys - 1, t.keys)
        whole = jnp.clip(whole, begin, end)
        return begin, whole, jnp.clip(partly, whole, end), end

    def pallas_attention(q_gmem: Any, k_gmem: Any, v_gmem: Any, o_gmem: Any, *rest: Any) -> None:
        lse_gmem, scratch = (rest[0], rest[1:]) if residuals else (None, rest)
        q_smem, k_smem, v_smem, lse_smem, p_smem, q_full, k_full, v_full, k_empty, v_empty, turn = scratch
        wg, batch, head, at = (lax.axis_index(name) for name in ("wg", "batch", "head", "rows"))
        first = (row_tiles - 1 - at if causal else at) * rows
        begin, whole, partly, end = spans(first)
        zeros = plgpu.OOBFillMode.ZEROS

        def slot(step: Any) -> Any:
            return lax.rem(step - begin, jnp.int32(t.stages))

        def meet() -> None:
            if t.turns:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        @pl.when(wg == _CONSUMERS)
        def _load() -> None:
            plgpu.set_max_registers(_LOADING, action="decrease")
            key_head = lax.div(head, jnp.int32(group))

            def load(step: Any, _: None) -> None:
                source = (batch, pl.ds(step * t.keys, t.keys), key_head)
                for gmem, ring, full, empty in ((k_gmem, k_smem, k_full, k_empty), (v_gmem, v_smem, v_full, v_empty)):
                    pl.when(step - begin >= t.stages)(partial(plgpu.barrier_wait, empty.at[slot(step)]))
                    into = ring.at[slot(step)]
                    plgpu.copy_gmem_to_smem(gmem.at[source], into, full.at[slot(step)], oob_mode=zeros)

            def drain(step: Any, _: None) -> None:
                plgpu.barrier_wait(k_empty.at[slot(step)])
                plgpu.barrier_wait(v_empty.at[slot(step)])

            lax.fori_loop(begin, end, load, None)
            lax.fori_loop(jnp.maximum(end - t.stages, begin), end, drain, None)

        @pl.when(wg < _CONSUMERS)
        def _attend() -> None:
            plgpu.set_max_registers(_MULTIPLYING, action="increase")
            mine = first + wg * t.rows
            q = q_smem.at[wg]
            plgpu.copy_gmem_to_smem(q_gmem.at[batch, pl.ds(mine, t.rows), head], q, q_full.at[wg], oob_mode=zeros)
            plgpu.barrier_wait(q_full.at[wg])
            pl.when(wg == 1)(meet)

            def seen(step: Any) -> Any:
                key = plgpu.broadcasted_iota(jnp.int32, (t.rows, t.keys), 1, layout=square) + step * t.keys
                if not causal:
                    return key < case.sk
                query = plgpu.broadcasted_iota(jnp.int32, (t.rows, t.keys), 0, layout=square) + (mine + shift)
                return (key <= query) & (key > query - window) if window else key <= query

            def step(j: Any, carry: Any, masked: bool) -> Any:
                o, most, sums = carry
                here = slot(j)
                plgpu.barrier_wait(k_full.at[here])

                def scores(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, q, k_smem.at[here].transpose((1, 0)))
                    meet()
                    return acc[...]

                s = pl.run_scoped(scores, plgpu.ACC((t.rows, t.keys), jnp.float32))
                plgpu.barrier_arrive(k_empty.at[here])
                if masked:
                    s = jnp.where(seen(j), s * scale, _HIDDEN)
                    now = jnp.maximum(most, s.max(axis=1))
                    p = jnp.exp2(s - lax.broadcast_in_dim(now, s.shape, [0]))
                else:  # scale and difference become one operation
                    now = jnp.maximum(most, s.max(axis=1) * scale)
                    p = jnp.exp2(s * scale - lax.broadcast_in_dim(now, s.shape, [0]))
                fade = jnp.exp2(most - now)
                o = o * lax.broadcast_in_dim(fade, o.shape, [0])
                sums = sums * fade + p.sum(axis=1)
                weights = p.astype(q.dtype)
                # All of the exponentials belong to this side of the turn.
                o, sums, now, weights = lax.optimization_barrier((o, sums, now, weights))
                if t.turns:
                    plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_full.at[here])
                if t.turns:
                    plgpu.barrier_wait(turn)
                values = v_smem.at[here]
                if simulated:
                    p_smem.at[wg][...] = weights
                    plgpu.commit_smem()

                    def weigh(acc: Any) -> jax.Array:
                        plgpu.wgmma(acc, p_smem.at[wg], values)
                        return acc[...]

                    o = o + pl.run_scoped(weigh, plgpu.ACC((t.rows, case.d), jnp.float32))
                else:
                    o = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(plgpu.ACC.init(o))
                plgpu.barrier_arrive(v_empty.at[here])
                return o, now, sums

            carry = (
                plgpu.layout_cast(jnp.zeros((t.rows, case.d), jnp.float32), square),
                plgpu.layout_cast(jnp.full((t.rows,), _HIDDEN, jnp.float32), row),
                plgpu.layout_cast(jnp.zeros((t.rows,), jnp.float32), row),
            )
            if window:
                carry = lax.fori_loop(begin, whole, partial(step, masked=True), carry)
            carry = lax.fori_loop(whole, partly, partial(step, masked=False), carry)
            if causal or case.sk % t.keys:
                carry = lax.fori_loop(partly, end, partial(step, masked=True), carry)
            o, most, sums = carry
            pl.when(wg == 0)(meet)
            q[...] = (o * lax.broadcast_in_dim(1.0 / sums, o.shape, [0])).astype(q.dtype)
            if residuals:
                lse_smem.at[wg][...] = most + jnp.log2(sums)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q, o_gmem.at[batch, pl.ds(mine, t.rows), head])
            if residuals:
                plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_gmem.at[batch, head, pl.ds(mine, t.rows)])
            plgpu.wait_smem_to_gmem(0)

    # The copy engine's groups of 8 rows: other lengths are copied into longer arrays, whose ends nobody sees.
    queries, keys = (size if size < 8 else pl.cdiv(size, 8) * 8 for size in (case.sq, case.sk))
    storage = dtype(case.dtype).storage
    o = jax.ShapeDtypeStruct((case.batch, queries, case.hq, case.d), storage)
    full = plgpu.Barrier(num_barriers=t.stages)
    empty = plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=t.stages)
    kernel = plgpu.kernel(
        pallas_attention,
        out_type=[o, jax.ShapeDtypeStruct((case.batch, case.hq, row_tiles * rows), jnp.float32)] if residuals else o,
        scratch_types=[
            tiles((_CONSUMERS, t.rows, case.d), storage),
            tiles((t.stages, t.keys, case.d), storage),
            tiles((t.stages, t.keys, case.d), storage),
            plgpu.SMEM((_CONSUMERS, t.rows), jnp.float32) if residuals else None,
            tiles((_CONSUMERS, t.rows, t.keys), storage) if simulated else None,
            plgpu.Barrier(num_barriers=_CONSUMERS),
            *(full, full, empty, empty),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
        ],
        grid=(case.hq, row_tiles, case.batch),
        grid_names=("head", "rows", "batch"),
        num_threads=_CONSUMERS + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )

    def longer(x: jax.Array, length: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))

    def compute(Q: jax.Array, K: jax.Array, V: jax.Array) -> Any:
        results = kernel(longer(Q, queries), longer(K, keys), longer(V, keys))
        if residuals:
            return results[0][:, : case.sq], results[1][:, :, : case.sq]
        return results[:, : case.sq]

    return compute
