"""Seeded inputs: every tensor draws from streams of its own, so that one tensor's size never moves another's values.

Owns the generators and the rounding to a dtype; which distribution a tensor has belongs to its workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from impls.workloads.dtypes import dtype, rounded
from impls.workloads.parallel import each
from impls.workloads.sampling import pieces

# Elements of a tensor that share a stream: 4 MiB of f32, which the allocator hands out again without new pages.
_CHUNK = 1 << 20


def normals(seed: int, tensor: str, shape: tuple[int, ...], dtype_name: str, scale: float = 1.0) -> np.ndarray:
    """N(0, scale^2), rounded to the dtype. Normals, since zeros draw less power and run faster than real data."""

    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        values = generator.standard_normal(count, dtype=np.float32)
        return rounded(values if scale == 1.0 else values * np.float32(scale), dtype_name)

    return _drawn(seed, tensor, shape, dtype_name, draw)


def integers(seed: int, tensor: str, shape: tuple[int, ...], dtype_name: str, bound: int) -> np.ndarray:
    """Whole numbers, uniform in [-bound, bound], in the dtype (which must represent them: they are not checked)."""

    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        values = generator.integers(-bound, bound, count, dtype=np.int32, endpoint=True)
        return values.astype(dtype(dtype_name).storage)

    return _drawn(seed, tensor, shape, dtype_name, draw)


def _drawn(
    seed: int,
    tensor: str,
    shape: tuple[int, ...],
    dtype_name: str,
    draw: Callable[[np.random.Generator, int], np.ndarray],
) -> np.ndarray:
    """A tensor drawn in chunks, each from a stream of (seed, chunk, name): threads share the work, not the values."""
    values = np.empty(math.prod(shape), dtype(dtype_name).storage)

    def fill(part: slice) -> None:
        entropy = np.random.SeedSequence([seed, part.start // _CHUNK, *tensor.encode()])
        values[part] = draw(np.random.Generator(np.random.SFC64(entropy)), part.stop - part.start)

    for _ in each(fill, list(pieces(0, values.size, _CHUNK))):
        pass
    return values.reshape(shape)
