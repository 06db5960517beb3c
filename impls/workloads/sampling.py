"""Which coordinates of an output are compared where the full reference costs too much.

Owns the choice along one axis, and its division into pieces that fit the memory; how axes combine (an open mesh)
belongs to ``base.Expected``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

# Kernels tile their outputs by multiples of 16 to 256, most by 64 and 128: a wrong tile of 64 or more, wherever it
# starts, holds chosen coordinates.
TILE = 64


def tile_sample(size: int, generator: np.random.Generator, starts: Iterable[int] = (0,)) -> np.ndarray:
    """Coordinates of an axis: the first, the last and one at random of every 64-wide tile; all where size <= 64.

    Args:
        size: length of the axis.
        generator: decides the random ones.
        starts: where tiles begin anew (the first row of each group); 0 is always one of them.

    Returns:
        Increasing integers in [0, size).
    """
    if size <= TILE:
        return np.arange(size)
    bounds = np.array(sorted({0, size, *starts}))
    first = np.concatenate([np.arange(a, b, TILE) for a, b in pairwise(bounds.tolist())])
    last = np.append(first[1:], size) - 1
    return np.unique(np.concatenate([first, last, generator.integers(first, last + 1)]))


def pieces(start: int, stop: int, step: int) -> Iterator[slice]:
    """Slices of at most ``step`` that cover [start, stop)."""
    for at in range(start, stop, step):
        yield slice(at, min(at + step, stop))
