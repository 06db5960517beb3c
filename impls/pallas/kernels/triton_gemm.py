"""GEMM through Pallas' older GPU lowering, by Triton: one block of C a program, operands loaded by pointers.

Owns the kernel. It imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from impls.pallas.kernels.mosaic_gemm import activated
from impls.pallas.tiling import TritonGemmTiling
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm


def function(case: Gemm, tiling: TritonGemmTiling, interpret: bool) -> Callable[..., jax.Array]:
    """C as a function of the case's inputs by name."""
    t, a_t, b_t = tiling, case.layout[0] == "t", case.layout[1] == "t"
    tiles_m, tiles_n = pl.cdiv(case.m, t.rows), pl.cdiv(case.n, t.cols)
    names = ["A", "B", *(x for x in ("bias", "residual") if x in case.input_specs())]
    sums = jnp.int32 if case.dtype == "i8" else jnp.float32

    def pallas_gemm(*refs: Any) -> None:
        given, c_ref = dict(zip(names, refs, strict=False)), refs[-1]
        batch = (pl.program_id(1),) if case.batch != 1 else ()
        # Programs in groups of some rows of tiles, which share columns of B in L2.
        group, inside = jnp.divmod(pl.program_id(0), t.group * tiles_n)
        rows = jnp.minimum(tiles_m - group * t.group, t.group)
        col, row = jnp.divmod(inside, rows)
        row = row + group * t.group
        at_m, at_n = row * t.rows + jnp.arange(t.rows), col * t.cols + jnp.arange(t.cols)
        in_m, in_n = at_m < case.m, at_n < case.n
        over_m, over_n = pl.ds(row * t.rows, t.rows), pl.ds(col * t.cols, t.cols)

        def step(k: Any, total: jax.Array) -> jax.Array:
            depth = pl.ds(k * t.depth, t.depth)
            in_k = k * t.depth + jnp.arange(t.depth) < case.k
            a_at, a_in = ((depth, over_m), (in_k, in_m)) if a_t else ((over_m, depth), (in_m, in_k))
            b_at, b_in = ((over_n, depth), (in_n, in_k)) if b_t else ((depth, over_n), (in_k, in_n))
            a = plt.load(given["A"].at[*batch, *a_at], mask=a_in[0][:, None] & a_in[1][None], other=0)
            b = plt.load(given["B"].at[*batch, *b_at], mask=b_in[0][:, None] & b_in[1][None], other=0)
            precision = lax.Precision.HIGHEST if case.dtype == "f32" else lax.Precision.DEFAULT
            a, b = (a.T if a_t else a), (b.T if b_t else b)
            return total + lax.dot(a, b, precision=precision, preferred_element_type=sums)

        x = lax.fori_loop(0, pl.cdiv(case.k, t.depth), step, jnp.zeros((t.rows, t.cols), sums))
        inside_c = in_m[:, None] & in_n[None]
        if "residual" in given:
            x = x + plt.load(given["residual"].at[*batch, over_m, over_n], mask=inside_c, other=0).astype(sums)
        if "bias" in given:
            x = x + plt.load(given["bias"].at[over_n], mask=in_n, other=0).astype(sums)[None]
        x = activated(case.epilogue, x)
        plt.store(c_ref.at[*batch, over_m, over_n], x.astype(dtype(case.out).storage), mask=inside_c)

    spec = case.output_specs()["C"]
    call = pl.pallas_call(
        pallas_gemm,
        grid=(tiles_m * tiles_n, *((case.batch,) if case.batch != 1 else ())),
        out_shape=jax.ShapeDtypeStruct(spec.shape, dtype(spec.dtype).storage),
        compiler_params=plt.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpret,
    )
    return lambda **inputs: call(*(inputs[name] for name in names))
