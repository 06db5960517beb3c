"""Tiles in shared memory, laid out as the tensor cores and the copy engine want them.

Owns the choice of swizzle. It imports JAX.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def tiles(shape: tuple[int, ...], dtype: Any) -> plgpu.MemoryRef:
    """Scratch of this shape; its last two axes are tiled by 8 rows and swizzled by as many bytes as a row allows.

    Swizzled rows spread over all 32 banks, whichever way a tile is read (PTX ISA, "Shared memory matrix layout").
    """
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
