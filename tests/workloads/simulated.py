"""Arithmetic of real stacks, simulated in NumPy: orders of summation, truncating tensor cores, fused and unfused steps.

Operands a and b are (M, K) and (K, N) of any dtype; results are f32 unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from impls.workloads.base import Expected
from impls.workloads.dtypes import rounded

F32 = np.float32
Matmul = Callable[[np.ndarray, np.ndarray], np.ndarray]


def worst(expected: Expected, output: np.ndarray) -> float:
    """Largest error over its tolerance, as the judge takes it."""
    error = np.abs(expected.select(output).astype(np.float64) - expected.value)
    share = np.where(error == 0, 0.0, error / np.maximum(expected.tolerance, 1e-300))
    return float(share.max())


def to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to a dtype, then held in f32 again."""
    return rounded(np.asarray(values), dtype).astype(F32)


def sequential(a: np.ndarray, b: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """One product after the other, multiplied and added apart, in f32."""
    a, b = a.astype(F32), b.astype(F32)
    c = np.zeros((a.shape[0], b.shape[1]), F32) if start is None else start
    for k in range(a.shape[1]):
        c = c + a[:, k, None] * b[k]
    return c


def backwards(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """From the last product to the first."""
    return sequential(a[:, ::-1], b[::-1])


def fused(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One fused multiply-add after the other."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    c = np.zeros((a.shape[0], b.shape[1]), F32)
    for k in range(a.shape[1]):
        c = (c + a[:, k, None] * b[k]).astype(F32)
    return c


def split(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Four parts of K, summed apart, then together."""
    return np.asarray(np.sum([sequential(a[:, i::4], b[i::4]) for i in range(4)], axis=0, dtype=F32))


def blas(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whatever this machine's BLAS does in f32."""
    return a.astype(F32) @ b.astype(F32)


def tensor_core(a: np.ndarray, b: np.ndarray, *, group: int = 4, bits: int = 23, promoted: int = 0) -> np.ndarray:
    """Steps of ``group`` products and the accumulator, each cut to ``bits`` fraction bits of the largest, then added.

    Partial sums move to f32 after ``promoted`` products.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    c = np.zeros((a.shape[0], b.shape[1]))
    total = np.zeros(c.shape, F32)
    for k in range(0, a.shape[1], group):
        addends = np.concatenate([c[None], a[:, k : k + group].T[:, :, None] * b[k : k + group][:, None, :]])
        _, exponent = np.frexp(np.abs(addends).max(axis=0))
        quantum = np.ldexp(1.0, exponent - 1 - bits)
        c = (np.trunc(addends / quantum) * quantum).sum(axis=0)
        _, exponent = np.frexp(c)
        quantum = np.ldexp(1.0, exponent - 1 - bits)
        c = np.trunc(c / quantum) * quantum
        if promoted and (k + group) % promoted == 0:
            total, c = total + c.astype(F32), np.zeros_like(c)
    return total + c.astype(F32)


def in_dtype(dtype: str) -> Matmul:
    """One product after the other, with every product and sum rounded to a dtype."""

    def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = a.astype(F32), b.astype(F32)
        c = np.zeros((a.shape[0], b.shape[1]), F32)
        for k in range(a.shape[1]):
            c = to(c + to(a[:, k, None] * b[k], dtype), dtype)
        return c

    return matmul


def inputs_in(dtype: str) -> Matmul:
    """Operands rounded to a dtype first."""
    return lambda a, b: blas(to(a.astype(F32), dtype), to(b.astype(F32), dtype))


def hidden(sq: int, sk: int, mask: str, window: int) -> np.ndarray:
    """(Sq, Sk), True where a query does not see a key."""
    i, j = np.ogrid[:sq, :sk]
    last = i + sk - sq
    if mask == "full":
        return np.zeros((sq, sk), bool)
    return (j > last) | ((j <= last - window) if mask == "window" else False)


def flash(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    dtype: str,
    *,
    matmul: Matmul = blas,
    block: int = 64,
    exp: Callable[[np.ndarray], np.ndarray] = np.exp,
) -> tuple[np.ndarray, np.ndarray]:
    """Online softmax over blocks of keys; P rounded to the dtype unnormalized. Returns (O in the dtype, logsumexp)."""
    scale = F32(1 / np.sqrt(q.shape[1]))
    top = np.full((q.shape[0], 1), -np.inf, F32)
    total, o = np.zeros_like(top), np.zeros((q.shape[0], v.shape[1]), F32)
    for at in range(0, k.shape[0], block):
        s = np.where(mask[:, at : at + block], -np.inf, matmul(q, k[at : at + block].T) * scale).astype(F32)
        new = np.maximum(top, s.max(axis=1, keepdims=True))
        shift = np.where(np.isinf(new), F32(0), new)
        p, fade = exp(s - shift).astype(F32), exp(top - shift).astype(F32)
        total = total * fade + p.sum(axis=1, keepdims=True, dtype=F32)
        o = o * fade + matmul(to(p, dtype), v[at : at + block])
        top = new
    return rounded(o / total, dtype), top + np.log(total)


def unfused(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, dtype: str, *, split_scale: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Every step's result rounded to the dtype; the scale on Q and K, or on the scores. Returns (O, P)."""
    scale = F32(1 / np.sqrt(q.shape[1]))
    if split_scale:
        root = np.sqrt(scale)
        s = to(blas(to(q.astype(F32) * root, dtype), to(k.astype(F32) * root, dtype).T), dtype)
    else:
        s = to(to(blas(q, k.T), dtype) * scale, dtype)
    s = np.where(mask, -np.inf, s).astype(F32)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    p = to(p / p.sum(axis=1, keepdims=True, dtype=F32), dtype)
    return rounded(blas(p, v), dtype), p


def flash_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    mask: np.ndarray,
    dtype: str,
    *,
    matmul: Matmul = blas,
    exact_delta: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P again from the logsumexp, delta from the rounded O; P and dS rounded to the dtype. Returns f32 dQ, dK, dV."""
    scale = F32(1 / np.sqrt(q.shape[1]))
    o, lse = flash(q, k, v, mask, dtype, matmul=matmul)
    p = np.where(mask, F32(0), np.exp(matmul(q, k.T) * scale - lse)).astype(F32)
    delta = (do.astype(F32) * o.astype(F32)).sum(axis=1, keepdims=True, dtype=F32) if exact_delta else F32(0)
    ds = to(p * (matmul(do, v.T) - delta), dtype)
    return matmul(ds, k) * scale, matmul(ds.T, q) * scale, matmul(to(p, dtype).T, do)


def unfused_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, mask: np.ndarray, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every step's result rounded to the dtype, as automatic differentiation of the unfused forward pass does."""
    scale = F32(1 / np.sqrt(q.shape[1]))
    _, p = unfused(q, k, v, mask, dtype)
    dp = to(blas(do, v.T), dtype)
    ds = to(p * (dp - (p * dp).sum(axis=1, keepdims=True, dtype=F32)), dtype)
    ds = to(ds * scale, dtype)
    return blas(ds, k), blas(ds.T, q), blas(p.T, do)
