"""NumPy <-> jax, every dtype of the workloads, bit for bit.

Owns the conversion and nothing else. It imports jax: implementations import it inside ``prepare`` (or later), never at
module level. jax arrays are immutable, so what goes in is copied: left to itself ``device_put`` takes a well-aligned
NumPy array without a copy, and whoever rewrites that array later rewrites a jax array under XLA's hands.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from impls.workloads.dtypes import dtype

# Pinned memory is kept for good: a larger array goes without.
_PINNED_BYTES = 512 * 2**20


def jax_dtype(name: str) -> np.dtype:
    """The jax dtype that stores dtype ``name`` of the workloads: jax takes NumPy's and ml_dtypes' own.

    Raises:
        KeyError: no such dtype; the message lists the known names.
    """
    return dtype(name).storage


def to_jax(array: np.ndarray, device: jax.Device | None = None) -> jax.Array:
    """A copy on ``device`` (default: jax's first), complete when this returns.

    ``jnp.array(copy=True)`` is what copies: ``device_put(may_alias=False)`` shares an aligned array's memory all the
    same (seen with jax 0.10.2).

    Raises:
        TypeError: jax would keep another dtype (f64 unless jax_enable_x64 is set).
    """
    copied = jnp.array(array, copy=True, device=device)
    if copied.dtype != array.dtype:
        raise TypeError(f"jax keeps {array.dtype} as {copied.dtype}: set jax_enable_x64, or use another dtype.")
    return copied.block_until_ready()


def to_numpy(array: jax.Array) -> np.ndarray:
    """The array on the host with the same bits: read-only, over the same memory on the CPU, else a copy.

    A GPU's goes through pinned memory, which XLA keeps for the next one: fresh pages would cost ten times the transfer.
    """
    if next(iter(array.devices())).platform == "gpu" and array.nbytes <= _PINNED_BYTES:
        array = jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    return np.asarray(array)
