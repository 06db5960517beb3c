"""The exp probe's kernel: IR of the vectorised f32 exponential and of the loops around it.

Owns the two ways of taking an exponential, both by range reduction x = k ln2 / n + r. They err by at most 2.2 ulp of
f32 for |x| <= 8, where the probe's arguments lie, by 4 for |x| <= 32 and by 6 wherever the result is a normal number;
neither looks for overflow, infinities or NaN, as a softmax, whose arguments are finite and at most 0, need not:

- ``polynomial``: n = 1, degree 5 in r, then k is added to the exponent's bits. Any vector unit with a fused
  multiply-add.
- ``table``: n = 32, degree 2, times 2^(j/32), j = k mod 32, out of a table that two AVX-512 registers hold (one
  permute), times 2^floor(k/32) (one vscalefps). On Zen 4, a vector of 16 takes 6.9 cycles, by the polynomial 7.6.

Both find k by adding 1.5 * 2^23 / n, whose last bits then hold k, and reduce by one constant, whose error,
1.9e-9 k / n, is what grows with |x|. Text and NumPy only: no library is needed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from impls.workloads.ceiling import SHIFTS

#: Words (int64) of a share: addresses of X, of the sums and their lock; periods of 64 shifts.
SHARE_WORDS = 4
#: Periods that an f32 accumulator may take: 2^14 terms, see the workload.
MOST_PERIODS = 2**14 // SHIFTS
_UNROLL = 4

_MAGIC = 1.5 * 2.0**23
# Coefficients of r, r^2, ... (that of r^0 is 1), minimax in relative error over |r| <= ln2 / (2 n), fitted by
# iteratively reweighted least squares (Lawson 1961) and rounded to f32. Error before rounding: 1.5 x 2^-24 for degree
# 5 and n = 1; 0.9 x 2^-24 for degree 2 and n = 32.
_POLYNOMIAL = (0.9999997019767761, 0.4999915063381195, 0.1666763573884964, 0.04189793020486832, 0.008290315046906471)
_TABLE_POLYNOMIAL = (1.0000146627426147, 0.5000001788139343)
_TABLE = 32
_PERMUTE, _SCALE = "llvm.x86.avx512.vpermi2var.ps.512", "llvm.x86.avx512.mask.scalef.ps.512"
_TABLE_DECLARATIONS = (
    f"declare <16 x float> @{_PERMUTE}(<16 x float>, <16 x i32>, <16 x float>)",
    f"declare <16 x float> @{_SCALE}(<16 x float>, <16 x float>, <16 x float>, i16, i32)",
)


@dataclass(frozen=True)
class Exponential:
    """How exponentials are taken: ``method`` (see the module), ``lanes`` per vector, ``vectors`` in flight."""

    method: str
    lanes: int
    vectors: int

    @property
    def group(self) -> int:
        """Elements of X that are in flight together."""
        return self.lanes * self.vectors


def best_exponential(features: frozenset[str]) -> Exponential | None:
    """The host's best, by LLVM's names of its features; None without a fused multiply-add."""
    if "avx512f" in features:
        return Exponential("table", 16, 4)
    if "fma" in features and "avx2" in features:
        return Exponential("polynomial", 8, 2)
    if "neon" in features:
        return Exponential("polynomial", 4, 4)
    return None


def _constant(value: float) -> str:
    """An f32 constant as LLVM writes it: the bits of the equal f64."""
    return f"0x{struct.unpack('>Q', struct.pack('>d', float(np.float32(value))))[0]:016X}"


def _vector(values: list[str], scalar: str) -> str:
    return "<" + ", ".join(f"{scalar} {value}" for value in values) + ">"


def _exp_lines(method: Exponential, x: str, result: str) -> list[str]:
    """IR that sets ``%<result>`` to exp(``%<x>``); names of temporaries begin with ``%<result>.``."""
    n = method.lanes
    f, i = f"<{n} x float>", f"<{n} x i32>"
    magic = _MAGIC / (_TABLE if method.method == "table" else 1)

    def splat(value: float) -> str:
        return _vector([_constant(value)] * n, "float")

    def fma(name: str, a: str, b: str, c: str) -> str:
        return f"  %{result}{name} = call {f} @llvm.fma.v{n}f32({f} {a}, {f} {b}, {f} {c})"

    r = f"%{result}.r"
    lines = [
        fma(".t", f"%{x}", splat(1 / np.log(2.0)), splat(magic)),
        f"  %{result}.k = fsub {f} %{result}.t, {splat(magic)}",  # k / n
        fma(".r", f"%{result}.k", splat(-np.log(2.0)), f"%{x}"),
        f"  %{result}.bits = bitcast {f} %{result}.t to {i}",
    ]
    if method.method == "table":
        table = [_constant(float(2.0 ** (j / _TABLE))) for j in range(_TABLE)]
        low, high = _vector(table[:16], "float"), _vector(table[16:], "float")
        return [
            *lines,
            f"  %{result}.2 = call {f} @{_PERMUTE}({f} {low}, {i} %{result}.bits, {f} {high})",
            fma(".w", r, splat(_TABLE_POLYNOMIAL[1]), splat(_TABLE_POLYNOMIAL[0])),
            f"  %{result}.m = fmul {f} %{result}.2, {r}",
            fma(".y", f"%{result}.m", f"%{result}.w", f"%{result}.2"),
            # Every lane (mask -1), rounded as usual (4).
            f"  %{result} = call {f} @{_SCALE}({f} %{result}.y, {f} %{result}.k, {f} zeroinitializer, i16 -1, i32 4)",
        ]
    p = splat(_POLYNOMIAL[-1])
    for degree, coefficient in reversed(list(enumerate((1.0, *_POLYNOMIAL[:-1])))):
        lines.append(fma(f".p{degree}", p, r, splat(coefficient)))
        p = f"%{result}.p{degree}"
    return [
        *lines,
        f"  %{result}.e = shl {i} %{result}.bits, {_vector(['23'] * n, 'i32')}",
        f"  %{result}.q = bitcast {f} {p} to {i}",
        f"  %{result}.y = add {i} %{result}.q, %{result}.e",
        f"  %{result} = bitcast {i} %{result}.y to {f}",
    ]


def exp_ir(method: Exponential) -> str:
    """IR of ``@exp``, a thread's shares of the probe, and of ``@exponential``, the same exponential over an array.

    ``@exp``'s argument points to two words: the address of the first share and their number. The f32 sums of a share
    are added to f64 sums under the group's lock. ``@exponential(y, x, count)`` takes f32 arrays; count is a multiple of
    the lanes.
    """
    n, size = method.lanes, 4 * method.lanes
    f, d = f"<{n} x float>", f"<{n} x double>"
    each = range(method.vectors)
    lines = [
        f"declare {f} @llvm.fma.v{n}f32({f}, {f}, {f})",
        *(_TABLE_DECLARATIONS if method.method == "table" else ()),
        "define void @exponential(ptr %y, ptr %x, i64 %count) #0 {",
        "entry:",
        "  br label %next",
        "next:",
        "  %i = phi i64 [ 0, %entry ], [ %i.next, %next ]",
        "  %from = getelementptr float, ptr %x, i64 %i",
        "  %to = getelementptr float, ptr %y, i64 %i",
        f"  %v = load {f}, ptr %from, align 4",
        *_exp_lines(method, "v", "e"),
        f"  store {f} %e, ptr %to, align 4",
        f"  %i.next = add i64 %i, {n}",
        "  %more = icmp ult i64 %i.next, %count",
        "  br i1 %more, label %next, label %leave",
        "leave:",
        "  ret void",
        "}",
        "define void @exp(ptr %arguments) #0 {",
        "entry:",
        "  %share.first = load ptr, ptr %arguments",
        "  %count.slot = getelementptr i64, ptr %arguments, i64 1",
        "  %count = load i64, ptr %count.slot",
        "  br label %next",
        "next:",
        "  %n = phi i64 [ 0, %entry ], [ %n.next, %unlock ]",
        "  %over = icmp eq i64 %n, %count",
        "  br i1 %over, label %leave, label %share",
        "share:",
        f"  %share.words = mul i64 %n, {SHARE_WORDS}",
        "  %x.slot = getelementptr i64, ptr %share.first, i64 %share.words",
        "  %x = load ptr, ptr %x.slot",
    ]
    for number, (name, kind) in enumerate((("sums", "ptr"), ("lock", "ptr"), ("periods", "i64")), 1):
        lines.append(f"  %{name}.slot = getelementptr i64, ptr %x.slot, i64 {number}")
        lines.append(f"  %{name} = load {kind}, ptr %{name}.slot")
    for v in each:
        lines.append(f"  %x.{v}.ptr = getelementptr i8, ptr %x, i64 {v * size}")
        lines.append(f"  %x.{v} = load {f}, ptr %x.{v}.ptr, align 4")
    lines += [
        "  br label %period",
        "period:",
        "  %p = phi i64 [ 0, %share ], [ %p.next, %through ]",
        *[f"  %a.{v} = phi {f} [ zeroinitializer, %share ], [ %s{_UNROLL}.{v}, %through ]" for v in each],
        "  br label %shift",
        "shift:",
        "  %r = phi i64 [ 0, %period ], [ %r.next, %shift ]",
        f"  %shift0 = phi {f} [ zeroinitializer, %period ], [ %shift{_UNROLL}, %shift ]",
        *[f"  %s0.{v} = phi {f} [ %a.{v}, %period ], [ %s{_UNROLL}.{v}, %shift ]" for v in each],
    ]
    step = _vector([_constant(1 / SHIFTS)] * n, "float")
    for u in range(_UNROLL):
        for v in each:
            lines.append(f"  %d{u}.{v} = fsub {f} %x.{v}, %shift{u}")
            lines += _exp_lines(method, f"d{u}.{v}", f"e{u}.{v}")
            lines.append(f"  %s{u + 1}.{v} = fadd {f} %s{u}.{v}, %e{u}.{v}")
        lines.append(f"  %shift{u + 1} = fadd {f} %shift{u}, {step}")
    lines += [
        f"  %r.next = add i64 %r, {_UNROLL}",
        f"  %again = icmp ult i64 %r.next, {SHIFTS}",
        "  br i1 %again, label %shift, label %through",
        "through:",
        "  %p.next = add i64 %p, 1",
        "  %more = icmp ult i64 %p.next, %periods",
        "  br i1 %more, label %period, label %acquire",
        "acquire:",
        "  %held = atomicrmw xchg ptr %lock, i32 1 acquire",
        "  %taken = icmp ne i32 %held, 0",
        "  br i1 %taken, label %acquire, label %unlock",
        "unlock:",
    ]
    for v in each:
        lines += [
            f"  %y.{v}.ptr = getelementptr i8, ptr %sums, i64 {2 * v * size}",
            f"  %y.{v}.old = load {d}, ptr %y.{v}.ptr, align 8",
            f"  %y.{v}.part = fpext {f} %s{_UNROLL}.{v} to {d}",
            f"  %y.{v} = fadd {d} %y.{v}.old, %y.{v}.part",
            f"  store {d} %y.{v}, ptr %y.{v}.ptr, align 8",
        ]
    lines += [
        "  store atomic i32 0, ptr %lock release, align 4",
        "  %n.next = add i64 %n, 1",
        "  br label %next",
        "leave:",
        "  ret void",
        "}",
        'attributes #0 = { "prefer-vector-width"="512" "min-legal-vector-width"="512" }',
    ]
    return "\n".join(lines)
