"""Seeded inputs: every tensor draws from streams of its own, so that one tensor's size never moves another's values.

Owns the generators and the rounding to a dtype; which distribution a tensor has belongs to its workload.
"""

from __future__ import annotations

import math
from collections import OrderedDict
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

    return _shelf.get(("normals", seed, tensor, shape, dtype_name, scale), draw)


def integers(seed: int, tensor: str, shape: tuple[int, ...], dtype_name: str, bound: int) -> np.ndarray:
    """Whole numbers, uniform in [-bound, bound], in the dtype (which must represent them: they are not checked)."""

    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        values = generator.integers(-bound, bound, count, dtype=np.int32, endpoint=True)
        return values.astype(dtype(dtype_name).storage)

    return _shelf.get(("integers", seed, tensor, shape, dtype_name, bound), draw)


def keep(nbytes: int) -> None:
    """Keep up to so many bytes of what this process drew last, not to be written to: a weight is the same for any
    number of rows, and cases that share one come one after the other. Nothing is kept before."""
    _shelf.room = nbytes
    _shelf.clear()


_Key = tuple[str, int, str, tuple[int, ...], str, float]


class _Shelf:
    """Tensors by what they were drawn from, the last used at the end."""

    def __init__(self) -> None:
        self.room = 0
        self._kept: OrderedDict[_Key, np.ndarray] = OrderedDict()

    def clear(self) -> None:
        self._kept.clear()

    def get(self, key: _Key, draw: Callable[[np.random.Generator, int], np.ndarray]) -> np.ndarray:
        values = self._kept.pop(key, None)
        if values is None:
            _, seed, tensor, shape, dtype_name, _ = key
            values = _drawn(seed, tensor, shape, dtype_name, draw)
        if self.room == 0:
            return values
        values.flags.writeable = False
        self._kept[key] = values
        while sum(kept.nbytes for kept in self._kept.values()) > self.room:
            self._kept.popitem(last=False)
        return values


_shelf = _Shelf()


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
