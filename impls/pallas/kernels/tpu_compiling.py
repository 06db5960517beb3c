"""TPU code on a machine without a TPU: exported, read as text, and compiled for every generation that libtpu knows.

Owns the export, the Mosaic module inside it, and what the compiler says of its code. It imports JAX.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
from jax._src.lib import tpu
from jax._src.pallas.mosaic.error_handling import MosaicError
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxlib.mlir import ir

#: Generation -> a topology of it, by libtpu's names.
GENERATIONS = {
    "v2": "v2:2x2",
    "v3": "v3:2x2",
    "v4": "v4:2x2x1",
    "v4 lite": "v4 lite:2x2",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "tpu7x:2x2x1",
}
_BODY = re.compile(r"\\22body\\22: ?\\22([^\\]*)\\22")
# From the compiler's cost analysis. It sees not into a kernel but to its ``cost_estimate``, and adds what surrounds it;
# the seconds are its own estimate, by the generation's rate and bandwidth.
_COSTS = {"flops": "flops", "bytes accessed": "bytes_accessed", "optimal_seconds": "estimated_s"}


def exported(function: Callable[..., Any], shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, str]:
    """The function lowered for a TPU: ``tpu.stablehlo`` and, of each kernel in it, ``tpu-<n>.mosaic.mlir``."""
    module = jax.export.export(jax.jit(function), platforms=["tpu"])(**shapes).mlir_module()
    texts = {"tpu.stablehlo.mlir": module}
    for number, body in enumerate(_BODY.findall(module)):
        texts[f"tpu-{number}.mosaic.mlir"] = _readable(base64.b64decode(body))
    return texts


def _readable(bytecode: bytes) -> str:
    """A Mosaic module's text."""
    with ir.Context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True  # the module's operations are marked as stable
        return str(ir.Module.parse(bytecode))


def compiled(function: Callable[..., Any], shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """What the compiler says, by generation: ``compile_s``, ``code_bytes``, ``temporary_bytes`` and its cost analysis.

    Where it refuses, ``refused`` holds its reason.
    """
    return {name: _compiled(function, shapes, topology) for name, topology in GENERATIONS.items()}


def _compiled(
    function: Callable[..., Any], shapes: Mapping[str, jax.ShapeDtypeStruct], topology: str
) -> dict[str, Any]:
    place = _place(topology)
    if isinstance(place, str):
        return {"refused": place}
    there = {name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place) for name, s in shapes.items()}
    start = time.perf_counter()
    try:
        code = jax.jit(function, out_shardings=place).lower(**there).compile()
    except (jax.errors.JaxRuntimeError, MosaicError) as error:
        return {"refused": _sentence(str(error))}
    seconds = time.perf_counter() - start
    memory, costs = code.memory_analysis(), code.cost_analysis() or {}
    return {
        "compile_s": round(seconds, 3),
        "code_bytes": memory.generated_code_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        **{ours: costs[theirs] for theirs, ours in _COSTS.items() if theirs in costs},
    }


@cache
def _place(topology: str) -> SingleDeviceSharding | str:
    """One device of a topology that is not there, or that libtpu knows no such generation."""
    try:
        return SingleDeviceSharding(topologies.get_topology_desc(topology, "tpu").devices[0])
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):  # libtpu itself is at fault: that says nothing of the kernel
            raise
        return _sentence(str(error))


def _sentence(text: str) -> str:
    """The gist of a compiler's error: its first line, at most 300 characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line[:300]
