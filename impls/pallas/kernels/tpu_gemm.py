"""GEMM on a TPU in Pallas: blocks of A and B in VMEM, fetched ahead by the grid's pipeline, sums in a VMEM scratch.

The grid goes over batch, rows, columns and, innermost, K: Pallas copies the next step's blocks from HBM while this
one's are multiplied (two buffers each). The sums stay in VMEM over all steps of K; bias, residual and activation follow
in the last.

Owns the kernel. Block sizes are ``impls.pallas.vmem``'s. It imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.pallas.vmem import GemmBlocks
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm


def function(case: Gemm, blocks: GemmBlocks, interpret: Any) -> Callable[..., jax.Array]:
    """C as a function of the case's inputs by name.

    Args:
        interpret: ``pltpu.InterpretParams``; False compiles for the device.
    """
    a_t, b_t = case.layout[0] == "t", case.layout[1] == "t"
    bm, bn, bk = blocks.m, blocks.n, blocks.k
    tiles = pl.cdiv(case.m, bm), pl.cdiv(case.n, bn), pl.cdiv(case.k, bk)
    m, n, k = tiles[0] * bm, tiles[1] * bn, tiles[2] * bk
    sums = jnp.int32 if case.dtype == "i8" else jnp.float32
    names = ["A", "B", *(x for x in ("bias", "residual") if x in case.input_specs())]

    def kernel(*refs: Any) -> None:
        given, (c, total) = dict(zip(names, refs, strict=False)), refs[len(names) :]
        step = pl.program_id(3)

        @pl.when(step == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        a, b = given["A"][...], given["B"][...]
        if case.dtype == "f8e4m3":  # exact; not every generation multiplies f8
            a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        precision = lax.Precision.HIGHEST if case.dtype == "f32" else lax.Precision.DEFAULT
        over = (((0 if a_t else 1,), (1 if b_t else 0,)), ((), ()))
        total[...] += lax.dot_general(a, b, over, precision=precision, preferred_element_type=sums)

        @pl.when(step == tiles[2] - 1)
        def _() -> None:
            x = total[...]
            if "bias" in given:
                x = x + given["bias"][...].astype(sums)
            if "residual" in given:
                x = x + given["residual"][...].astype(sums)
            if case.epilogue == "bias+relu":
                x = jnp.maximum(x, 0)
            elif case.epilogue == "bias+gelu":
                x = jax.nn.gelu(x, approximate=True)
            c[...] = x.astype(c.dtype)

    specs = {
        "A": pl.BlockSpec((None, bk, bm), lambda g, i, j, s: (g, s, i))
        if a_t
        else pl.BlockSpec((None, bm, bk), lambda g, i, j, s: (g, i, s)),
        "B": pl.BlockSpec((None, bn, bk), lambda g, i, j, s: (g, j, s))
        if b_t
        else pl.BlockSpec((None, bk, bn), lambda g, i, j, s: (g, s, j)),
        "bias": pl.BlockSpec((1, bn), lambda g, i, j, s: (0, j)),
        "residual": pl.BlockSpec((None, bm, bn), lambda g, i, j, s: (g, i, j)),
    }
    call = pl.pallas_call(
        kernel,
        grid=(case.batch, *tiles),
        in_specs=[specs[name] for name in names],
        out_specs=specs["residual"],
        out_shape=jax.ShapeDtypeStruct((case.batch, m, n), dtype(case.out).storage),
        scratch_shapes=[pltpu.VMEM((bm, bn), sums)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=blocks.budget_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=case.flops(),
            bytes_accessed=case.compulsory_bytes(),
            transcendentals=case.batch * case.m * case.n if case.epilogue == "bias+gelu" else 0,
        ),
        interpret=interpret,
        name="pallas_gemm",
    )
    whole = {"A": (k, m) if a_t else (m, k), "B": (n, k) if b_t else (k, n), "bias": (1, n), "residual": (m, n)}

    def compute(**inputs: jax.Array) -> jax.Array:
        padded = []
        for name in names:
            x = inputs[name][None] if name == "bias" else inputs[name]
            x = x[None] if case.batch == 1 and name != "bias" else x
            fill = [(0, size - now) for size, now in zip(whole[name], x.shape[-2:], strict=True)]
            padded.append(jnp.pad(x, [(0, 0)] * (x.ndim - 2) + fill))
        c = call(*padded)[:, : case.m, : case.n]
        return c if case.batch != 1 else c[0]

    return compute
