"""Seeded inputs: every tensor draws from a stream of its own, so that one tensor's size never moves another's values.

Owns the generator and the rounding to a dtype; which distribution a tensor has belongs to its workload.
"""

from __future__ import annotations

import math

import numpy as np

from impls.workloads.dtypes import dtype, rounded

# Elements drawn at a time: what is held beside the result stays under 128 MiB.
_CHUNK = 1 << 24


def stream(seed: int, tensor: str) -> np.random.Generator:
    """The random stream of the tensor called ``tensor``: a function of both arguments only."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, *tensor.encode()])))


def normals(seed: int, tensor: str, shape: tuple[int, ...], dtype_name: str, scale: float = 1.0) -> np.ndarray:
    """N(0, scale^2), rounded to the dtype. Normals, since zeros draw less power and run faster than real data."""
    generator = stream(seed, tensor)
    drawn = np.empty(math.prod(shape), dtype(dtype_name).storage)
    for start in range(0, drawn.size, _CHUNK):
        part = drawn[start : start + _CHUNK]
        values = generator.standard_normal(part.size, dtype=np.float32)
        if scale != 1.0:
            values *= np.float32(scale)
        part[...] = rounded(values, dtype_name)
    return drawn.reshape(shape)


def integers(seed: int, tensor: str, shape: tuple[int, ...], dtype_name: str, bound: int) -> np.ndarray:
    """Whole numbers, uniform in [-bound, bound], in the dtype (which must represent them: they are not checked)."""
    generator = stream(seed, tensor)
    drawn = np.empty(math.prod(shape), dtype(dtype_name).storage)
    for start in range(0, drawn.size, _CHUNK):
        part = drawn[start : start + _CHUNK]
        part[...] = generator.integers(-bound, bound, part.size, dtype=np.int32, endpoint=True).astype(drawn.dtype)
    return drawn.reshape(shape)
