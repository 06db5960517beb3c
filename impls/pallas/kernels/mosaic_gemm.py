"""GEMM on Hopper in Mosaic GPU: persistent blocks, one warpgroup that loads and up to two that multiply.

The loading warpgroup keeps a ring of tiles of A and B filled by the copy engine (TMA) and runs ahead of the products,
also over the end of an output tile: the next tile's operands arrive while this one's epilogue runs. Each multiplying
warpgroup holds its part of the output tile in registers, hands back a slot of the ring when the product after it is
under way, and writes its part through shared memory, a few columns at a time, so that storing overlaps. Two blocks may
form a cluster: they share the tile of one operand, which then crosses L2 once (multicast). Where few rows of C leave
multiprocessors without a tile, several blocks share one tile's K (split-K): each leaves its sums in f32, transposed as
it holds them, and XLA adds them up and applies the epilogue.

Owns the kernel. Which tiling a case takes is ``impls.pallas.tiling``'s. It imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from impls.pallas.kernels.shared_memory import tiles
from impls.pallas.tiling import GemmTiling, whole_rows, whole_tiles
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

# Registers of a thread: 65,536 on a multiprocessor, for 128 threads that load and 128 or 256 that multiply.
_LOADING, _MULTIPLYING = 40, 232


def function(case: Gemm, tiling: GemmTiling, blocks: int, interpret: Any) -> Callable[..., jax.Array]:
    """C as a function of the case's inputs by name.

    Args:
        blocks: thread blocks to launch: as many as the device has multiprocessors.
        interpret: parameters of the interpreter; None compiles for the device.
    """

    def compute(A: jax.Array, B: jax.Array, bias: Any = None, residual: Any = None) -> jax.Array:
        lead = case.batch != 1
        a, b, r = (x if lead or x is None else x[None] for x in (A, B, residual))
        # Zeros beyond K add nothing; what is computed beyond M and N is cut off.
        m, n, k = whole_tiles(case)
        a = _padded(a, (k, m) if case.layout[0] == "t" else (m, k))
        # Where N counts B's rows only C's columns need be whole: the copy engine reads zeros beyond the last row.
        b = _padded(b, (whole_rows(case.n), k) if case.layout[1] == "t" else (k, n))
        if tiling.splits > 1:
            parts = _call(case, tiling, blocks, interpret, (m, n, k), a, b, None, None)
            c = _added(case, parts.reshape(case.batch, -1, *parts.shape[1:]), bias, r)
            return c if lead else c[0]
        r = None if r is None else _padded(r, (m, n))
        if bias is not None:
            bias = jnp.pad(bias, (0, pl.cdiv(n, tiling.block_n) * tiling.block_n - case.n))
        c = _call(case, tiling, blocks, interpret, (m, n, k), a, b, bias, r)[:, : case.m, : case.n]
        return c if lead else c[0]

    return compute


def _added(case: Gemm, parts: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """C from the parts of its transpose, (batch, splits, N, M) in f32, of whole tiles."""
    c = parts.sum(axis=1)[:, : case.n, : case.m].swapaxes(1, 2)
    if bias is not None:
        c = c + bias.astype(jnp.float32)
    if residual is not None:
        c = c + residual.astype(jnp.float32)
    return activated(case.epilogue, c).astype(dtype(case.out).storage)


def _padded(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jnp.pad(x, ((0, 0), *((0, size - now) for size, now in zip(shape, x.shape[1:], strict=True))))


def _call(
    case: Gemm,
    tiling: GemmTiling,
    blocks: int,
    interpret: Any,
    shape: tuple[int, int, int],
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    m, n, k = shape
    t, a_t, b_t = tiling, case.layout[0] == "t", case.layout[1] == "t"
    across, down = (t.cluster if t.shares == "a" else 1), (t.cluster if t.shares == "b" else 1)
    tiles_m, tiles_n = pl.cdiv(m, t.block_m * down), pl.cdiv(n, t.block_n * across)
    split = t.splits > 1
    steps = pl.cdiv(pl.cdiv(k, t.depth), t.splits)
    splits = pl.cdiv(pl.cdiv(k, t.depth), steps)  # none without a step
    products = case.batch * splits
    work = products * tiles_m * tiles_n
    clusters = min(blocks // t.cluster, work)
    out = jnp.float32 if split else dtype(case.out).storage
    chunk = t.chunk(case)
    promoted = case.dtype == "f8e4m3" and case.acc == "f32"
    accumulator = plgpu.ACC((t.rows, t.cols), jnp.float32)

    def pallas_gemm(*refs: Any) -> None:
        names = ["a", "b", *(["bias"] if bias is not None else []), *(["residual"] if residual is not None else [])]
        given, (c_gmem, a_smem, b_smem, c_smem, full, empty, arrived) = refs[: len(names)], refs[len(names) :]
        gmem = dict(zip(names, given, strict=True))
        wg, me = lax.axis_index("wg"), lax.axis_index("block")
        mine = lax.div(work - 1 - me, clusters) + 1

        def place(i: Any) -> tuple[Any, Any, Any]:
            """Product (or its part), first row and first column of this block's i-th tile."""
            at = me + i * clusters
            product, at = lax.div(at, tiles_m * tiles_n), lax.rem(at, tiles_m * tiles_n)
            row, col = plgpu.planar_snake(at, (tiles_m, tiles_n), t.minor, t.width)
            if down > 1:
                row = row * down + lax.axis_index("pair")
            if across > 1:
                col = col * across + lax.axis_index("pair")
            return product, row * t.block_m, col * t.block_n

        @pl.when(wg == t.consumers)
        def _load() -> None:
            plgpu.set_max_registers(_LOADING, action="decrease")

            def load_tile(i: Any, _: None) -> None:
                product, row, col = place(i)
                rows, cols = pl.ds(row, t.block_m), pl.ds(col, t.block_n)
                begin = 0
                if split:
                    begin, product = lax.rem(product, splits) * steps, lax.div(product, splits)

                def load(ki: Any, _: None) -> None:
                    s, depth = i * steps + ki, pl.ds((begin + ki) * t.depth, t.depth)
                    slot = lax.rem(s, t.stages)

                    @pl.when(s >= t.stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    a_tile = gmem["a"].at[product, depth, rows] if a_t else gmem["a"].at[product, rows, depth]
                    b_tile = gmem["b"].at[product, cols, depth] if b_t else gmem["b"].at[product, depth, cols]
                    for source, ring, shared in ((a_tile, a_smem, across > 1), (b_tile, b_smem, down > 1)):
                        plgpu.copy_gmem_to_smem(
                            source,
                            ring.at[slot],
                            full.at[slot],
                            collective_axes="pair" if shared else None,
                            oob_mode=plgpu.OOBFillMode.ZEROS,
                        )

                lax.fori_loop(0, steps, load, None)

            def drain(s: Any, _: None) -> None:
                plgpu.barrier_wait(empty.at[lax.rem(s, t.stages)])

            lax.fori_loop(0, mine, load_tile, None)
            lax.fori_loop(jnp.maximum(mine * steps - t.stages, 0), mine * steps, drain, None)

        @pl.when(wg < t.consumers)
        def _multiply() -> None:
            plgpu.set_max_registers(_MULTIPLYING, action="increase")
            row_of, col_of = (wg * t.part_m, 0) if t.along == "m" else (0, wg * t.part_n)
            part_m = pl.ds(wg * t.part_m, t.part_m) if t.along == "m" else slice(None)
            part_n = pl.ds(wg * t.part_n, t.part_n) if t.along == "n" else slice(None)

            def operands(slot: Any) -> tuple[Any, Any]:
                """This warpgroup's A and B, (M, K) and (K, N); where swapped, their transposes in turn."""
                x = a_smem.at[slot, :, part_m] if a_t else a_smem.at[slot, part_m]
                y = b_smem.at[slot, part_n] if b_t else b_smem.at[slot, :, part_n]
                if t.swapped:
                    return (y if b_t else y.transpose((1, 0))), (x if a_t else x.transpose((1, 0)))
                return (x.transpose((1, 0)) if a_t else x), (y.transpose((1, 0)) if b_t else y)

            def release(s: Any) -> None:
                plgpu.barrier_arrive(empty.at[lax.rem(s, t.stages)])

            def summed(i: Any) -> jax.Array:
                """The product of tile i, all sums in the accumulator."""

                def accumulate(acc: Any) -> jax.Array:
                    def step(ki: Any, _: None) -> None:
                        s = i * steps + ki
                        plgpu.barrier_wait(full.at[lax.rem(s, t.stages)])
                        plgpu.wgmma(acc, *operands(lax.rem(s, t.stages)))
                        plgpu.wgmma_wait(1)  # the product before this one is done: its slot may be filled
                        pl.when(ki > 0)(lambda: release(s - 1))

                    lax.fori_loop(0, steps, step, None)
                    plgpu.wgmma_wait(0)
                    release(i * steps + steps - 1)
                    return acc[...]

                return pl.run_scoped(accumulate, accumulator)

            def summed_apart(i: Any) -> jax.Array:
                """The same where the accumulator is short of bits: every step's sums are added up in f32."""

                def step(ki: Any, sums: jax.Array) -> jax.Array:
                    s = i * steps + ki
                    plgpu.barrier_wait(full.at[lax.rem(s, t.stages)])

                    def accumulate(acc: Any) -> jax.Array:
                        plgpu.wgmma(acc, *operands(lax.rem(s, t.stages)))
                        return acc[...]

                    sums = sums + pl.run_scoped(accumulate, accumulator)
                    release(s)
                    return sums

                zeros = plgpu.layout_cast(jnp.zeros((t.rows, t.cols), jnp.float32), plgpu.Layout.WGMMA)
                return lax.fori_loop(0, steps, step, zeros)

            def tile(i: Any, _: None) -> None:
                product, row, col = place(i)
                c = (summed_apart if promoted else summed)(i)
                for number, first in enumerate(range(0, t.part_n, chunk)):
                    slot = number % 2
                    at = (product, pl.ds(row + row_of, t.part_m), pl.ds(col + col_of + first, chunk))
                    at = (at[0], at[2], at[1]) if split else at
                    # The slot's last store has been read. Where slots alternate over the end of a tile too, one store,
                    # the other slot's, may still be under way.
                    plgpu.wait_smem_to_gmem(1 if t.part_n // chunk % 2 == 0 else 0, wait_read_only=True)
                    part = c if t.swapped else c[:, first : first + chunk]
                    if "residual" in gmem:
                        into, barrier, zeros = c_smem.at[wg, slot], arrived.at[wg, slot], plgpu.OOBFillMode.ZEROS
                        plgpu.copy_gmem_to_smem(gmem["residual"].at[at], into, barrier, oob_mode=zeros)
                        plgpu.barrier_wait(arrived.at[wg, slot])
                        part = part + c_smem[wg, slot].astype(jnp.float32)
                    if "bias" in gmem:
                        axis, columns = 0 if t.swapped else 1, pl.ds(col + col_of + first, chunk)
                        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
                        added = plgpu.load(gmem["bias"], columns, layout=layout, optimized=False)
                        part = part + lax.broadcast_in_dim(added.astype(jnp.float32), part.shape, [axis])
                    as_held = split or not t.swapped
                    stored = c_smem.at[wg, slot] if as_held else c_smem.at[wg, slot].transpose((1, 0))
                    stored[...] = part if split else activated(case.epilogue, part).astype(out)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(c_smem.at[wg, slot], c_gmem.at[at])

            lax.fori_loop(0, mine, tile, None)
            plgpu.wait_smem_to_gmem(0)

    a_shape = (t.stages, t.depth, t.block_m) if a_t else (t.stages, t.block_m, t.depth)
    b_shape = (t.stages, t.block_n, t.depth) if b_t else (t.stages, t.depth, t.block_n)
    paired = t.cluster > 1
    returned: Any = (
        plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=t.consumers, num_barriers=t.stages)
        if paired
        else plgpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages)
    )
    kernel = plgpu.kernel(
        pallas_gemm,
        out_type=jax.ShapeDtypeStruct((products, n, t.block_m) if split else (products, m, n), out),
        scratch_types=[
            tiles(a_shape, a.dtype),
            tiles(b_shape, b.dtype),
            tiles((t.consumers, 2, chunk, t.part_m) if split else (t.consumers, 2, t.part_m, chunk), out),
            plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            returned,
            plgpu.Barrier(num_barriers=(t.consumers, 2)) if residual is not None else None,
        ],
        grid=(clusters,),
        grid_names=("block",),
        cluster=(t.cluster,) if paired else (),
        cluster_names=("pair",) if paired else (),
        num_threads=t.consumers + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return kernel(*(x for x in (a, b, bias, residual) if x is not None))


def activated(epilogue: str, x: jax.Array) -> jax.Array:
    """The activation of an epilogue, which bias and residual have gone into."""
    if epilogue == "bias+relu":
        return jnp.maximum(x, 0.0)
    if epilogue == "bias+gelu":
        # 0.5 (1 + tanh u) is 1 / (1 + exp(-2 u)); u = sqrt(2 / pi) (x + 0.044715 x^3), Hendrycks and Gimpel 2016.
        return x / (1.0 + jnp.exp2(x * (-2.302208198 - 0.102943240 * x * x)))
    return x
