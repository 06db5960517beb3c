"""jax's process-wide settings, the same for every implementation that runs jax.

Owns precision and dispatch. It imports jax: implementations import it inside ``prepare``, never at module level.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from impls.contract import Device


def configure(device: Device) -> dict[str, Any]:
    """Full f32 precision and calls that run in the caller's thread; what then holds, for a program's ``config``.

    A timed call waits for its result, so handing it to another thread first only adds to it: 8 us of 16 in an 8 x 8
    product on an AMD Zen 4. XLA sizes its thread pool when jax first touches the device, from the affinity or NPROC.
    On a GPU calls return early, as they do for jax's users.
    """
    jax.config.update("jax_default_matmul_precision", "highest")
    if device.kind == "cuda":
        return {"matmul_precision": "highest", "xla_flags": os.environ.get("XLA_FLAGS", "")}
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return {
        "threads": int(os.environ.get("NPROC", len(os.sched_getaffinity(0)))),
        "matmul_precision": "highest",
        "async_dispatch": False,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
