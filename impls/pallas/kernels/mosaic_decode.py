"""Attention of one query a sequence on Hopper in Mosaic GPU: the query heads of a key head are the rows of one product.

Persistent blocks go through shares of the keys of one head of one sequence each (split-KV; Dao et al.,
"Flash-Decoding", 2023): one warpgroup loads, running ahead over the end of a share, one multiplies. Every share leaves
its O and the logarithm of its sum; XLA weighs and adds them. What rows of wgmma's 64 no head fills costs nothing but
power: the time is that of reading K and V.

Owns the kernel. It imports JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from impls.pallas.kernels.shared_memory import tiles
from impls.pallas.tiling import DecodeTiling
from impls.workloads.attention import Attention
from impls.workloads.dtypes import dtype

# Rows of a wgmma.
_ROWS = 64
# Lower than any score in base 2; finite, so that the difference of two is 0 and not NaN.
_HIDDEN = -1e30


def function(case: Attention, tiling: DecodeTiling, blocks: int, interpret: Any) -> Callable[..., jax.Array]:
    """O as a function of Q, K and V, each (B, S, H, D), where Q has one row.

    Args:
        blocks: thread blocks to launch: as many as the device has multiprocessors.
        interpret: parameters of the interpreter; None compiles for the device.
    """
    t, group = tiling, case.hq // case.hkv
    scale = math.log2(math.e) / math.sqrt(case.d)
    begin = (case.sk - case.window) // t.keys if case.window else 0
    steps = pl.cdiv(case.sk, t.keys) - begin
    shares = min(t.shares, steps)
    work = case.batch * case.hkv * shares
    programs = min(blocks, work)
    kept = pl.cdiv(group, 8) * 8  # rows that are stored: whole groups of 8
    width = min(case.d, t.stored)
    masked = bool(case.window or case.sk % t.keys)
    # JAX 0.11's interpreter has no products of operands in registers, and no accumulators that outlive a scope.
    simulated = interpret is not None
    row, square = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    storage = dtype(case.dtype).storage

    def pallas_decode(q_gmem: Any, k_gmem: Any, v_gmem: Any, o_gmem: Any, lse_gmem: Any, *scratch: Any) -> None:
        q_smem, k_smem, v_smem, o_smem, lse_smem, p_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = scratch
        me = lax.axis_index("block")
        mine = lax.div(work - 1 - me, programs) + 1

        def share(i: Any) -> tuple[Any, Any, Any, Any, Any]:
            """Sequence, key head, share, and the blocks of keys [first, last) of the i-th piece of work."""
            at = me + i * programs
            part, at = lax.rem(at, shares), lax.div(at, shares)
            first, last = (begin + lax.div(p * steps, shares) for p in (part, part + 1))
            return lax.div(at, case.hkv), lax.rem(at, case.hkv), part, first, last

        def slot(s: Any) -> Any:
            return lax.rem(s, t.stages)

        @pl.when(lax.axis_index("wg") == 1)
        def _load() -> None:
            zeros = plgpu.OOBFillMode.ZEROS

            def load_share(i: Any, s: Any) -> Any:
                batch, head, _, first, last = share(i)
                which = lax.rem(i, t.queries(case))

                @pl.when(i >= t.queries(case))
                def _() -> None:
                    plgpu.barrier_wait(q_empty.at[which])

                # What the rows after them hold is multiplied too, and never stored.
                rows = q_smem.at[which, pl.ds(0, kept)]
                plgpu.copy_gmem_to_smem(q_gmem.at[batch, head], rows, q_full.at[which])

                def load(j: Any, s: Any) -> Any:
                    source = (batch, pl.ds(j * t.keys, t.keys), head)
                    for gmem, ring, full, empty in (
                        (k_gmem, k_smem, k_full, k_empty),
                        (v_gmem, v_smem, v_full, v_empty),
                    ):

                        @pl.when(s >= t.stages)
                        def _(empty: Any = empty) -> None:
                            plgpu.barrier_wait(empty.at[slot(s)])

                        plgpu.copy_gmem_to_smem(gmem.at[source], ring.at[slot(s)], full.at[slot(s)], oob_mode=zeros)
                    return s + 1

                return lax.fori_loop(first, last, load, s)

            def drain(s: Any, _: None) -> None:
                plgpu.barrier_wait(k_empty.at[slot(s)])
                plgpu.barrier_wait(v_empty.at[slot(s)])

            def drain_queries(i: Any, _: None) -> None:
                plgpu.barrier_wait(q_empty.at[lax.rem(i, t.queries(case))])

            total = lax.fori_loop(0, mine, load_share, jnp.int32(0))
            lax.fori_loop(jnp.maximum(total - t.stages, 0), total, drain, None)
            lax.fori_loop(jnp.maximum(mine - t.queries(case), 0), mine, drain_queries, None)

        @pl.when(lax.axis_index("wg") == 0)
        def _attend() -> None:
            def attend_share(i: Any, s: Any) -> Any:
                batch, head, part, first, last = share(i)
                which = lax.rem(i, t.queries(case))
                plgpu.barrier_wait(q_full.at[which])
                q = q_smem.at[which]

                def step(j: Any, carry: Any) -> Any:
                    o, most, sums, s = carry
                    here = slot(s)
                    plgpu.barrier_wait(k_full.at[here])

                    def scores(acc: Any) -> jax.Array:
                        plgpu.wgmma(acc, q, k_smem.at[here].transpose((1, 0)))
                        return acc[...]

                    x = pl.run_scoped(scores, plgpu.ACC((_ROWS, t.keys), jnp.float32)) * scale
                    plgpu.barrier_arrive(k_empty.at[here])
                    if masked:
                        key = plgpu.broadcasted_iota(jnp.int32, (_ROWS, t.keys), 1, layout=square) + j * t.keys
                        seen = key < case.sk
                        x = jnp.where(seen & (key >= case.sk - case.window) if case.window else seen, x, _HIDDEN)
                    now = jnp.maximum(most, x.max(axis=1))
                    p, fade = jnp.exp2(x - lax.broadcast_in_dim(now, x.shape, [0])), jnp.exp2(most - now)
                    o = o * lax.broadcast_in_dim(fade, o.shape, [0])
                    sums = sums * fade + p.sum(axis=1)
                    weights = p.astype(q.dtype)
                    plgpu.barrier_wait(v_full.at[here])
                    values = v_smem.at[here]
                    if simulated:
                        p_smem[...] = weights
                        plgpu.commit_smem()

                        def weigh(acc: Any) -> jax.Array:
                            plgpu.wgmma(acc, p_smem, values)
                            return acc[...]

                        o = o + pl.run_scoped(weigh, plgpu.ACC((_ROWS, case.d), jnp.float32))
                    else:
                        o = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(plgpu.ACC.init(o))
                    plgpu.barrier_arrive(v_empty.at[here])
                    return o, now, sums, s + 1

                empty = (
                    plgpu.layout_cast(jnp.zeros((_ROWS, case.d), jnp.float32), square),
                    plgpu.layout_cast(jnp.full((_ROWS,), _HIDDEN, jnp.float32), row),
                    plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), row),
                )
                o, most, sums, s = lax.fori_loop(first, last, step, (*empty, s))
                plgpu.barrier_arrive(q_empty.at[which])
                o = o * lax.broadcast_in_dim(1.0 / sums, o.shape, [0])
                for left in range(0, case.d, width):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    o_smem[...] = o[:, left : left + width]
                    if left == 0:
                        lse_smem[...] = most + jnp.log2(sums)
                    plgpu.commit_smem()
                    columns = pl.ds(left, width)
                    plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, kept)], o_gmem.at[batch, head, part, :, columns])
                plgpu.copy_smem_to_gmem(lse_smem.at[pl.ds(0, kept)], lse_gmem.at[batch, head, part])
                return s

            lax.fori_loop(0, mine, attend_share, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    ring = tiles((t.stages, t.keys, case.d), storage)
    pair, each = plgpu.Barrier(num_barriers=t.queries(case)), plgpu.Barrier(num_barriers=t.stages)
    parts = (case.batch, case.hkv, shares, kept)
    kernel = plgpu.kernel(
        pallas_decode,
        out_type=[jax.ShapeDtypeStruct((*parts, case.d), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)],
        scratch_types=[
            tiles((t.queries(case), _ROWS, case.d), storage),
            *(ring, ring),
            tiles((_ROWS, width), jnp.float32),
            plgpu.SMEM((_ROWS,), jnp.float32),
            tiles((_ROWS, t.keys), storage) if simulated else None,
            *(pair, pair, each, each, each, each),
        ],
        grid=(programs,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )

    def longer(x: jax.Array, axis: int) -> jax.Array:
        """An axis to whole groups of 8, as the copy engine wants them."""
        return jnp.pad(x, [(0, -size % 8 if a == axis else 0) for a, size in enumerate(x.shape)])

    def compute(Q: jax.Array, K: jax.Array, V: jax.Array) -> jax.Array:
        q = longer(Q.reshape(case.batch, case.hkv, group, case.d), 2)
        o, lse = kernel(q, longer(K, 1), longer(V, 1))
        o, lse = o[..., :group, :], lse[..., :group, None]
        if shares > 1:
            weight = jnp.exp2(lse - lse.max(axis=2, keepdims=True))
            o = (o * weight).sum(axis=2) / weight.sum(axis=2)
        return o.reshape(Q.shape).astype(storage)

    return compute
