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
from impls.pallas.kernels.triton_tiles import Span, load, store
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
        over_m, over_n = Span(row * t.rows, t.rows, case.m), Span(col * t.cols, t.cols, case.n)

        def step(k: Any, total: jax.Array) -> jax.Array:
            over_k = Span(k * t.depth, t.depth, case.k)
            a = load(given["A"], *batch, over_k, over_m).T if a_t else load(given["A"], *batch, over_m, over_k)
            b = load(given["B"], *batch, over_n, over_k).T if b_t else load(given["B"], *batch, over_k, over_n)
            precision = lax.Precision.HIGHEST if case.dtype == "f32" else lax.Precision.DEFAULT
            return total + lax.dot(a, b, precision=precision, preferred_element_type=sums)

        x = lax.fori_loop(0, pl.cdiv(case.k, t.depth), step, jnp.zeros((t.rows, t.cols), sums))
        if "residual" in given:
            x = x + load(given["residual"], *batch, over_m, over_n).astype(sums)
        if "bias" in given:
            x = x + load(given["bias"], over_n).astype(sums)[None]
        store(c_ref, (*batch, over_m, over_n), activated(case.epilogue, x).astype(dtype(case.out).storage))

    spec = case.output_specs()["C"]
    call = pl.pallas_call(
        pallas_gemm,
        grid=(tiles_m * tiles_n, *((case.batch,) if case.batch != 1 else ())),
        out_shape=jax.ShapeDtypeStruct(spec.shape, dtype(spec.dtype).storage),
        compiler_params=plt.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpret,
    )
    return lambda **inputs: call(*(inputs[name] for name in names))
