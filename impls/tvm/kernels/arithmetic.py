"""How operands are packed into words, and how one word of A multiplies one word of B into a sum.

A word holds ``group`` consecutive elements along K. Each arithmetic is stated twice: as a scalar expression, which is
what it means (and what TVM compiles where nothing better is known), and as the vector instruction that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from impls.tvm.kernels.host import Host
from impls.tvm.tiling import VectorUnit

Expr = Any

# The intrinsics take vectors of bfloat or of bytes; TVM's LLVM backend has no bfloat, so a small function in LLVM's own
# language, inlined everywhere, casts the 32-bit words.
_DPBF16 = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define <16 x float> @ridgemark_dpbf16(<16 x float> %sum, <16 x i32> %a, <16 x i32> %b) {
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sum, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}
"""
_DPBUSD = """
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
define <16 x i32> @ridgemark_dpbusd(<16 x i32> %sum, <16 x i32> %a, <16 x i32> %b) {
  %x = bitcast <16 x i32> %a to <64 x i8>
  %y = bitcast <16 x i32> %b to <64 x i8>
  %r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %sum, <64 x i8> %x, <64 x i8> %y)
  ret <16 x i32> %r
}
"""

#: Name of the function that ``lane_sum`` defines.
LANE_SUM = "ridgemark_lane_sum"


def lane_sum(lanes: int) -> str:
    """An LLVM function that adds up the lanes of a vector of f32, in any order."""
    vector = f"<{lanes} x float>"
    return f"""
declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, {vector})
define float @{LANE_SUM}({vector} %x) {{
  %r = call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float 0.0, {vector} %x)
  ret float %r
}}
"""


@dataclass(frozen=True)
class Arithmetic:
    """One way to multiply.

    Attributes:
        name: of the instruction, for the record.
        group: elements of K in a word.
        word: dtype of packed words.
        sum: dtype of the sums, and of the elements before they are packed.
        pack_a, pack_b: ``group`` elements -> word.
        multiply: words of A and B -> the sum of their products (scalars).
        accumulate: vectors (sums, words of A, words of B) -> sums.
        library: LLVM functions that ``accumulate`` calls.
        temporaries: vectors that ``accumulate`` needs beside its arguments.
        offset: what ``pack_a`` adds to each element of A; the sums hold ``offset`` times B's column sums too many.
    """

    name: str
    group: int
    word: str
    sum: str
    pack_a: Callable[[Sequence[Expr]], Expr]
    pack_b: Callable[[Sequence[Expr]], Expr]
    multiply: Callable[[Expr, Expr], Expr]
    accumulate: Callable[[Expr, Expr, Expr], Expr]
    library: str = ""
    temporaries: int = 0
    offset: int = 0

    def unit(self, unit: VectorUnit) -> VectorUnit:
        """The vector unit as this arithmetic leaves it to a tile."""
        return replace(unit, temporaries=unit.temporaries + self.temporaries)


def choose(dtype: str, host: Host) -> Arithmetic:
    """The arithmetic for operands of a workload's dtype."""
    if dtype == "i8":
        return VNNI if host.has("avx512vnni") else INTEGER
    if dtype in ("bf16", "f8e4m3") and host.has("avx512bf16"):
        return DPBF16
    return FMA


def _only(elements: Sequence[Expr]) -> Expr:
    return elements[0]


def _word(value: int) -> Expr:
    return tirx.const(value, "int32")


def bits(value: Expr) -> Expr:
    """The bits of an f32 as int32."""
    return T.reinterpret("int32", value)


def from_bits(value: Expr) -> Expr:
    """The f32 with these bits."""
    return T.reinterpret("float32", value)


def _pack_bf16(elements: Sequence[Expr]) -> Expr:
    """Two f32 that are bf16 values: the even one in the low half."""
    low, high = (bits(e) for e in elements)
    return (T.shift_right(low, _word(16)) & _word(0xFFFF)) | (high & _word(-65536))


def _multiply_bf16(a: Expr, b: Expr) -> Expr:
    low = from_bits(T.shift_left(a, _word(16))) * from_bits(T.shift_left(b, _word(16)))
    high = from_bits(a & _word(-65536)) * from_bits(b & _word(-65536))
    return low + high


def _pack_bytes(elements: Sequence[Expr]) -> Expr:
    word = elements[0] & _word(0xFF)
    for place, element in enumerate(elements[1:], 1):
        word = word | T.shift_left(element & _word(0xFF), _word(8 * place))
    return word


def _pack_unsigned(elements: Sequence[Expr]) -> Expr:
    return _pack_bytes([e + _word(128) for e in elements])


def signed_bytes(word: Expr) -> list[Expr]:
    """The four signed bytes of a word, as int32."""
    return [T.shift_right(T.shift_left(word, _word(24 - 8 * place)), _word(24)) for place in range(4)]


def _multiply_bytes(a: Expr, b: Expr) -> Expr:
    unsigned = [T.shift_right(a, _word(8 * place)) & _word(0xFF) for place in range(4)]
    products = [x * y for x, y in zip(unsigned, signed_bytes(b), strict=True)]
    return products[0] + products[1] + products[2] + products[3]


# LLVM contracts the first to one instruction.
FMA = Arithmetic(
    "multiply-add f32", 1, "float32", "float32", _only, _only, lambda a, b: a * b, lambda sums, a, b: sums + a * b
)
INTEGER = Arithmetic(
    "multiply-add i32", 1, "int32", "int32", _only, _only, lambda a, b: a * b, lambda sums, a, b: sums + a * b,
    temporaries=2,
)  # fmt: skip
DPBF16 = Arithmetic(
    "vdpbf16ps",
    2,
    "int32",
    "float32",
    _pack_bf16,
    _pack_bf16,
    _multiply_bf16,
    lambda sums, a, b: T.call_pure_extern("float32x16", "ridgemark_dpbf16", sums, a, b),
    _DPBF16,
)
# The instruction takes A unsigned: A + 128 is, and B's column sums say by how much that is too much.
VNNI = Arithmetic(
    "vpdpbusd",
    4,
    "int32",
    "int32",
    _pack_unsigned,
    _pack_bytes,
    _multiply_bytes,
    lambda sums, a, b: T.call_pure_extern("int32x16", "ridgemark_dpbusd", sums, a, b),
    _DPBUSD,
    offset=128,
)

BY_NAME = {arithmetic.name: arithmetic for arithmetic in (FMA, INTEGER, DPBF16, VNNI)}
