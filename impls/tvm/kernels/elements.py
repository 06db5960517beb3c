"""Expressions on single elements: reading a workload's dtypes as f32 or i32, rounding back, and the epilogues.

Where we write the function, TVM sees bf16 and f8e4m3 as the integers that hold their bits, so that nothing is left to
its legalisation. Relax gives functions their dtypes, and there they are TVM's own.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from impls.tvm.kernels.arithmetic import bits, from_bits

Expr = Any

#: TVM's dtype for a workload's.
STORAGE = {"f32": "float32", "f16": "float16", "bf16": "uint16", "f8e4m3": "uint8", "i8": "int8", "i32": "int32"}


def raised(value: Expr, dtype: str) -> Expr:
    """An element as f32, exactly; integers as int32."""
    if dtype == "f32":
        return value
    if dtype == "f16":
        return tirx.Cast("float32", value)
    word = tirx.Cast("int32", value)
    if dtype == "bf16":
        return from_bits(T.shift_left(word, _int(16)))
    if dtype == "f8e4m3":
        # E4M3's exponent bias is 7, f16's 15: read as an f16 the same bits are 2^8 too small. NaN is all ones.
        half = T.shift_left(word & _int(0x80), _int(8)) | T.shift_left(word & _int(0x7F), _int(7))
        value = tirx.Cast("float32", T.reinterpret("float16", tirx.Cast("uint16", half))) * _float(256.0)
        return tirx.Select((word & _int(0x7F)) == _int(0x7F), from_bits(_int(0x7FC00000)), value)
    return word


def raised_native(value: Expr, dtype: str) -> Expr:
    """As ``raised``, of an element that TVM knows by its own dtype.

    f8e4m3 goes through its bits: TVM's conversion gives 0 for subnormal numbers.
    """
    if dtype == "f8e4m3":
        return raised(T.reinterpret("uint8", value), dtype)
    return value if dtype == "f32" else tirx.Cast("int32" if dtype == "i8" else "float32", value)


def rounded(value: Expr, dtype: str) -> Expr:
    """An f32 rounded to nearest even in ``dtype``; an int32 as it is."""
    if dtype in ("f32", "i32"):
        return value
    if dtype == "f16":
        return tirx.Cast("float16", value)
    # bf16: half of what is cut off, less one where the kept part is even, carries into it.
    word = bits(value)
    odd = T.shift_right(word, _int(16)) & _int(1)
    upper = T.shift_right(word + _int(0x7FFF) + odd, _int(16))
    quiet = T.shift_right(word, _int(16)) | _int(0x40)
    is_nan = (word & _int(0x7FFFFFFF)) > _int(0x7F800000)
    return tirx.Cast("uint16", tirx.Select(is_nan, quiet, upper))


def activated(value: Expr, epilogue: str, integer: bool) -> Expr:
    """What the epilogue does after its addition, to an f32 or an int32."""
    if epilogue == "bias+relu":
        zero = _int(0) if integer else _float(0.0)
        return tirx.Select(value < zero, zero, value)  # NaN stays
    if epilogue == "bias+gelu":
        return gelu(value)
    return value


def gelu(z: Expr) -> Expr:
    """The tanh form, z / 2 (1 + tanh u) with u = sqrt(2 / pi) (z + 0.044715 z^3), written as z / (1 + exp(-2 u))."""
    u2 = z * (_float(-1.5957691216057308) + _float(-0.07135481627159815) * (z * z))
    return z / (_float(1.0) + exp(u2))


def exp(x: Expr) -> Expr:
    """exp in f32, within 2 units in the last place and 0 below -87, without a call that would break a vector loop.

    exp(x) = 2^n exp(r), n the integer nearest to x / ln 2, r = x - n ln 2 in two steps (Cody and Waite), exp(r) by its
    Taylor polynomial of degree 7: |r| <= ln 2 / 2, so that the rest is below 1e-8. x is clipped to what f32 can hold.
    """
    clipped = tirx.max(tirx.min(x, _float(88.0)), _float(-87.0))
    n = tirx.floor(clipped * _float(1.4426950408889634) + _float(0.5))
    r = clipped - n * _float(0.693359375) - n * _float(-2.12194440e-4)
    polynomial = _float(1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        polynomial = polynomial * r + _float(1 / factorial)
    scale = from_bits(T.shift_left(tirx.Cast("int32", n) + _int(127), _int(23)))
    # What is masked out must vanish, not nearly vanish.
    return tirx.Select(x < _float(-87.0), _float(0.0), polynomial * scale)


def _int(value: int) -> Expr:
    return tirx.const(value, "int32")


def _float(value: float) -> Expr:
    return tirx.const(value, "float32")
