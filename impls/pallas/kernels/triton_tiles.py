"""Tiles of arrays in global memory for the older GPU lowering, which masks what lies outside of an array.

Nothing is masked along an axis that whole tiles cover. It imports JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class Span:
    """``size`` positions along an axis, from ``start`` on, a multiple of ``size``.

    Args:
        length: of the axis; None: all of the positions are there.
    """

    def __init__(self, start: Any, size: int, length: int | None = None) -> None:
        self.slice = pl.ds(start, size)
        self.size = size
        whole = length is None or length % size == 0
        self.inside = None if whole else start + jnp.arange(size) < length


def load(ref: Any, *at: Any) -> jax.Array:
    """The tile of ``ref`` at these indices and spans, one an axis; zeros where the array has nothing."""
    inside = _mask(at)
    return plt.load(_place(ref, at), mask=inside, other=None if inside is None else 0)


def store(ref: Any, at: tuple[Any, ...], tile: jax.Array) -> None:
    """Write a tile there, as far as the array goes."""
    plt.store(_place(ref, at), tile, mask=_mask(at))


def _place(ref: Any, at: tuple[Any, ...]) -> Any:
    return ref.at[tuple(one.slice if isinstance(one, Span) else one for one in at)]


def _mask(at: tuple[Any, ...]) -> jax.Array | None:
    """Which elements of a tile the array has; None: all."""
    spans = [one for one in at if isinstance(one, Span)]
    shape = tuple(span.size for span in spans)
    found = None
    for axis, span in enumerate(spans):
        if span.inside is not None:
            inside = jax.lax.broadcast_in_dim(span.inside, shape, [axis])
            found = inside if found is None else found & inside
    return found
