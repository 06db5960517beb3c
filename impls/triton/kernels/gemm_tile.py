"""What every GEMM kernel does with a tile: where it lies, one step of its product, its epilogue.

Functions of the device, inlined into the kernels beside this module.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The tanh form of GELU (Hendrycks and Gimpel, arXiv:1606.08415) is z/2 (1 + tanh u) = z / (1 + e^-2u), where
# u = sqrt(2 / pi) (z + 0.044715 z^3). These are -2 sqrt(2 / pi) log2(e), and the same times 0.044715.
_LINEAR = tl.constexpr(-2.302208198144325)
_CUBIC = tl.constexpr(-0.10294324)


@triton.jit
def raster(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile. GROUP rows of tiles are walked column by column: tiles that run at the same time share
    rows of A and columns of B in L2."""
    band = GROUP * tiles_n
    first = tile // band * GROUP
    height = min(tiles_m - first, GROUP)
    return first + tile % band % height, tile % band // height


@triton.jit
def start(BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """An accumulator of zeros."""
    if PRECISION == "i32":
        return tl.zeros((BM, BN), tl.int32)
    elif PRECISION == "f16":
        return tl.zeros((BM, BN), tl.float16)
    else:
        return tl.zeros((BM, BN), tl.float32)


@triton.jit
def step(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` for one step along K.

    PRECISION: ``f32`` (16-bit operands; f8 summed in the tensor core alone), ``promoted`` (f8: the tensor core sums
    this step, of 128 at most, from zero, and its sum is added in f32), ``ieee`` (f32 operands without tensor cores),
    ``tf32``, ``f16`` and ``i32`` (accumulated in that).
    """
    if PRECISION == "i32":
        return tl.dot(a, b, acc, out_dtype=tl.int32)
    elif PRECISION == "f16":
        return tl.dot(a, b, acc, out_dtype=tl.float16)
    elif PRECISION == "ieee":
        return tl.dot(a, b, acc, input_precision="ieee")
    elif PRECISION == "tf32":
        return tl.dot(a, b, acc, input_precision="tf32")
    elif PRECISION == "promoted":
        # On sm_90 Triton sets no limit to sums of f8 in the tensor core, and then leaves this addition where it is.
        return acc + tl.dot(a, b)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def finish(acc, addend, rows, columns, m, n, WHOLE: tl.constexpr, EPILOGUE: tl.constexpr):
    """The epilogue in f32 (whole numbers in i32).

    Args:
        acc: the tile's product.
        addend: bias, or the residual of this batch element; read where EPILOGUE names it.
        rows, columns: of C, of this tile; rows in 64 bits where offsets need them.
        m, n: rows and columns of C.
        WHOLE: the tile lies within C.
        EPILOGUE: as in a case.
    """
    z = acc
    if EPILOGUE != "none":
        if acc.dtype == tl.float16:
            z = acc.to(tl.float32)
        if EPILOGUE == "residual":
            at = addend + rows[:, None] * n + columns[None, :]
            if WHOLE:
                z += tl.load(at).to(z.dtype)
            else:
                z += tl.load(at, mask=(rows < m)[:, None] & (columns < n)[None, :], other=0.0).to(z.dtype)
        else:
            bias = tl.load(addend + columns) if WHOLE else tl.load(addend + columns, mask=columns < n, other=0.0)
            z += bias.to(z.dtype)[None, :]
        if EPILOGUE == "bias+relu":
            z = tl.maximum(z, 0)
        elif EPILOGUE == "bias+gelu":
            # The square of a reciprocal root takes fewer instructions than a quotient, and is 0 where e^-2u overflows.
            root = tl.rsqrt(1 + tl.exp2(z * (_LINEAR + _CUBIC * z * z)))
            z = z * root * root
    return z


@triton.jit
def store(c, values, rows, columns, m, n, WHOLE: tl.constexpr):
    """A tile of C by pointers; ``c`` points to this batch element."""
    at = c + rows[:, None] * n + columns[None, :]
    if WHOLE:
        tl.store(at, values.to(c.dtype.element_ty))
    else:
        tl.store(at, values.to(c.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])
