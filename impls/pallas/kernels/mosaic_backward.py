"""Attention backward on Hopper in Mosaic GPU: one kernel, five products for every block of keys and queries.

A block of threads owns 128 keys of one key head and goes through the queries that see them, of every query head of the
group. Two warpgroups hold dK and dV of 64 keys each in registers; scores are computed transposed, so that
probabilities and their gradients go on to dV and dK from registers (FlashAttention-3, Shah et al. 2024, appendix B).
The gradient of the scores meets in shared memory, from where each warpgroup computes half of dQ; the copy
engine adds them to dQ in f32 in global memory. That addition has no order: dQ differs from run to run in its last
bits.

Owns the kernel, and what comes before and after it in XLA: the row sums of O dO, zeros for dQ, and its rounding. It
imports JAX.
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
from impls.pallas.tiling import BackwardTiling
from impls.workloads.attention import Attention
from impls.workloads.dtypes import dtype

# Registers of a thread: 65,536 on a multiprocessor, for 128 threads that load and 256 that multiply.
_LOADING, _MULTIPLYING = 24, 240
_CONSUMERS, _ROWS = 2, 64
_KEYS = _CONSUMERS * _ROWS
# The logarithm of a sum that makes every probability of a row 0.
_FULL = 1e30


def function(case: Attention, tiling: BackwardTiling, interpret: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """(dQ, dK, dV) as a function of Q, K, V, dO, O, each (B, S, H, D), and the logarithms of the rows' sums.

    The logarithms are in base 2 and (B, Hq, Sq), as ``mosaic_attention`` returns them.

    Args:
        interpret: parameters of the interpreter; None compiles for the device.
    """
    t, group, shift, rows = tiling, case.hq // case.hkv, case.sk - case.sq, tiling.queries
    scale = 1.0 / math.sqrt(case.d)
    base2 = scale * math.log2(math.e)
    q_tiles, k_tiles = pl.cdiv(case.sq, rows), pl.cdiv(case.sk, _KEYS)
    causal, window = case.mask != "full", case.window
    storage = dtype(case.dtype).storage
    # Of a step's dQ a warpgroup computes half of the columns; of the rows, where those were no whole swizzled segment.
    by_rows = case.d < 128
    dq_rows, dq_cols = (rows // _CONSUMERS, case.d) if by_rows else (rows, case.d // _CONSUMERS)
    # The interpreter of JAX 0.11 has no additions by the copy engine, no products of operands in registers, and no
    # accumulators that outlive a scope: every block of keys then leaves its share of dQ.
    simulated = interpret is not None
    square = plgpu.Layout.WGMMA

    def spans(first: Any) -> tuple[Any, Any, Any, Any]:
        """Blocks of queries of the keys from ``first`` on: some see [begin, end), all see all of [whole, partly)."""
        begin, whole = jnp.int32(0), jnp.int32(0)
        end, partly = jnp.int32(q_tiles), jnp.int32(q_tiles)
        if causal:
            begin = lax.div(jnp.maximum(first - shift, 0), rows)
            whole = lax.div(jnp.maximum(first + _KEYS - 1 - shift, 0) + rows - 1, rows)
        if window:
            last = jnp.minimum(first + _KEYS, case.sk) - 1 + window - 1 - shift  # the last query that sees a key
            end = jnp.minimum(lax.div(jnp.maximum(last, -1) + rows, rows), q_tiles)
            partly = lax.div(jnp.maximum(first + window - shift, 0), rows)
        end = jnp.maximum(end, begin)
        whole = jnp.clip(whole, begin, end)
        return begin, whole, jnp.clip(partly, whole, end), end

    def pallas_backward(*refs: Any) -> None:
        q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, dq_gmem, dk_gmem, dv_gmem, *scratch = refs
        q_smem, do_smem, k_smem, v_smem, ds_smem, dq_smem, lse_smem, delta_smem, p_smem, *barriers = scratch
        kv_full, full, empty, met = barriers
        wg, batch, head = (lax.axis_index(name) for name in ("wg", "batch", "head"))
        first = lax.axis_index("keys") * _KEYS
        begin, whole, partly, end = spans(first)
        count = end - begin
        zeros = plgpu.OOBFillMode.ZEROS

        @pl.when(wg == _CONSUMERS)
        def _load() -> None:
            plgpu.set_max_registers(_LOADING, action="decrease")
            for gmem, into in ((k_gmem, k_smem), (v_gmem, v_smem)):
                plgpu.copy_gmem_to_smem(gmem.at[batch, pl.ds(first, _KEYS), head], into, kv_full, oob_mode=zeros)

            def load_head(g: Any, _: None) -> None:
                q_head = head * group + g

                def load(i: Any, _: None) -> None:
                    s = g * count + i
                    slot, at = lax.rem(s, t.stages), pl.ds((begin + i) * rows, rows)

                    @pl.when(s >= t.stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    for gmem, ring in ((q_gmem, q_smem), (do_gmem, do_smem)):
                        source = gmem.at[batch, at, q_head]
                        plgpu.copy_gmem_to_smem(source, ring.at[slot], full.at[slot], oob_mode=zeros)
                    for gmem, ring in ((lse_gmem, lse_smem), (delta_gmem, delta_smem)):
                        plgpu.copy_gmem_to_smem(gmem.at[batch, q_head, at], ring.at[slot], full.at[slot])

                lax.fori_loop(0, count, load, None)

            def drain(s: Any, _: None) -> None:
                plgpu.barrier_wait(empty.at[lax.rem(s, t.stages)])

            lax.fori_loop(0, group, load_head, None)
            lax.fori_loop(jnp.maximum(group * count - t.stages, 0), group * count, drain, None)

        @pl.when(wg < _CONSUMERS)
        def _differentiate() -> None:
            plgpu.set_max_registers(_MULTIPLYING, action="increase")
            mine = pl.ds(wg * _ROWS, _ROWS)
            plgpu.barrier_wait(kv_full)

            def product(shape: tuple[int, int], a: Any, b: Any) -> jax.Array:
                def multiply(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, a, b)
                    return acc[...]

                return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

            def added(total: jax.Array, a: jax.Array, b: Any) -> jax.Array:
                """total + a b, where a is in registers."""
                if simulated:
                    p_smem.at[wg][...] = a
                    plgpu.commit_smem()
                    return total + product(total.shape, p_smem.at[wg], b)
                return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.ACC.init(total))

            def seen(i: Any) -> Any:
                """Of keys (rows) by the queries (columns) of block i."""
                key = plgpu.broadcasted_iota(jnp.int32, (_ROWS, rows), 0, layout=square) + (first + wg * _ROWS)
                query = plgpu.broadcasted_iota(jnp.int32, (_ROWS, rows), 1, layout=square) + (i * rows + shift)
                return (key <= query) & (key > query - window) if window else key <= query

            def row_vector(smem: Any, slot: Any, shape: tuple[int, int]) -> jax.Array:
                vector = plgpu.load(smem.at[slot], layout=square.reduce(0), optimized=False)
                return lax.broadcast_in_dim(vector, shape, [1])

            def step(g: Any, i: Any, carry: Any, masked: bool) -> Any:
                dk, dv = carry
                s = g * count + (i - begin)
                slot, side = lax.rem(s, t.stages), lax.rem(s, 2)
                plgpu.barrier_wait(full.at[slot])
                q, do = q_smem.at[slot], do_smem.at[slot]
                x = product((_ROWS, rows), k_smem.at[mine], q.transpose((1, 0))) * base2
                p = jnp.exp2(x - row_vector(lse_smem, slot, x.shape))
                if masked:
                    p = jnp.where(seen(i), p, 0.0)
                dp = product((_ROWS, rows), v_smem.at[mine], do.transpose((1, 0)))
                ds = (p * (dp - row_vector(delta_smem, slot, x.shape))).astype(storage)
                ds_smem.at[side, mine][...] = ds
                plgpu.commit_smem()
                dv = added(dv, p.astype(storage), do)
                dk = added(dk, ds, q)
                plgpu.barrier_arrive(empty.at[slot])
                # Both halves of the keys are in shared memory; and both have read what lay there two steps ago.
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)
                part_rows = wg * dq_rows if by_rows else 0
                columns = slice(None) if by_rows else pl.ds(wg * dq_cols, dq_cols)
                scores = ds_smem.at[side, :, pl.ds(part_rows, dq_rows)] if by_rows else ds_smem.at[side]
                dq = product((dq_rows, dq_cols), scores.transpose((1, 0)), k_smem.at[:, columns])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_smem.at[wg][...] = dq
                plgpu.commit_smem()
                at = (batch, pl.ds(i * rows + part_rows, dq_rows), head * group + g, columns)
                if simulated:
                    plgpu.copy_smem_to_gmem(dq_smem.at[wg], dq_gmem.at[lax.axis_index("keys"), *at])
                else:
                    plgpu.copy_smem_to_gmem(dq_smem.at[wg], dq_gmem.at[at], reduction_op="add")
                return dk, dv

            def of_head(g: Any, carry: Any) -> Any:
                if causal:
                    carry = lax.fori_loop(begin, whole, partial(step, g, masked=True), carry)
                carry = lax.fori_loop(whole, partly, partial(step, g, masked=False), carry)
                if window:
                    carry = lax.fori_loop(partly, end, partial(step, g, masked=True), carry)
                return carry

            nothing = plgpu.layout_cast(jnp.zeros((_ROWS, case.d), jnp.float32), square)
            dk, dv = lax.fori_loop(0, group, of_head, (nothing, nothing))
            # K and V have been read for the last time by both: their memory takes dK and dV.
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
            at = (batch, pl.ds(first + wg * _ROWS, _ROWS), head)
            for gradient, smem, gmem in ((dk * scale, k_smem, dk_gmem), (dv, v_smem, dv_gmem)):
                smem.at[mine][...] = gradient.astype(storage)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem.at[mine], gmem.at[at])
            plgpu.wait_smem_to_gmem(0)

    # The copy engine's groups of 8 rows; vectors of whole blocks.
    queries, keys, vectors = -(-case.sq // 8) * 8, -(-case.sk // 8) * 8, q_tiles * rows
    like_k = jax.ShapeDtypeStruct((case.batch, keys, case.hkv, case.d), storage)
    dq_shape = (case.batch, queries, case.hq, case.d)
    ring = tiles((t.stages, rows, case.d), storage)
    vector = plgpu.SMEM((t.stages, rows), jnp.float32)
    kernel = plgpu.kernel(
        pallas_backward,
        out_type=[like_k, like_k],
        scratch_types=[
            *(ring, ring),
            *(tiles((_KEYS, case.d), storage), tiles((_KEYS, case.d), storage)),
            tiles((2, _KEYS, rows), storage),
            tiles((_CONSUMERS, dq_rows, dq_cols), jnp.float32),
            *(vector, vector),
            tiles((_CONSUMERS, _ROWS, rows), storage) if simulated else None,
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=4, num_barriers=t.stages),
            plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=t.stages),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
        ],
        grid=(case.hkv, k_tiles, case.batch),
        grid_names=("head", "keys", "batch"),
        num_threads=_CONSUMERS + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )

    def longer(x: jax.Array, axis: int, length: int, fill: float = 0.0) -> jax.Array:
        widths = [(0, length - size if a == axis else 0) for a, size in enumerate(x.shape)]
        return jnp.pad(x, widths, constant_values=fill)

    def compute(Q: Any, K: Any, V: Any, dO: Any, O: Any, lse: Any) -> tuple[jax.Array, ...]:  # noqa: E741
        delta = (O.astype(jnp.float32) * dO.astype(jnp.float32)).sum(axis=-1).transpose(0, 2, 1)
        dq = jax.new_ref(jnp.zeros((k_tiles, *dq_shape) if simulated else dq_shape, jnp.float32))
        dk, dv = kernel(
            *(longer(Q, 1, queries), longer(K, 1, keys), longer(V, 1, keys), longer(dO, 1, queries)),
            *(longer(lse, 2, vectors, _FULL), longer(delta, 2, vectors), dq),
        )
        total = dq[...].sum(axis=0) if simulated else dq[...]
        return (total * scale).astype(storage)[:, : case.sq], dk[:, : case.sk], dv[:, : case.sk]

    return compute
