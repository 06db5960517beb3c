"""A TPU kernel as a program on a CPU: interpreted with a look-out for races, the real code compiled beside it.

Owns how the two come together. It imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from impls.contract import Device
from impls.pallas.kernels import tpu_compiling
from impls.pallas.kernels.program import Compiled
from impls.support import jax_arrays
from impls.workloads.base import Case


class Raced(RuntimeError):
    """The interpreter saw two accesses to one place in no order."""


class Simulated(Compiled):
    """``Compiled`` whose calls raise ``Raced`` where the interpreter saw a race."""

    def run(self, loaded: dict[str, jax.Array]) -> Any:
        """The outputs, complete."""
        result = super().run(loaded)
        # There is no public way to ask (JAX 0.11).
        if interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found:
            raise Raced("The TPU interpreter found a race between a copy and another access.")
        return result


def simulated(
    case: Case, device: Device, make: Callable[[Any], Callable[..., Any]], config: Mapping[str, Any]
) -> Simulated:
    """The program of a kernel.

    Args:
        make: the function of the case's inputs, for parameters of the interpreter or, with False, for a TPU.
        config: for the record; what the TPU's compiler says of each generation is added as ``tpu``.
    """
    specs = case.input_specs()
    shapes = {name: jax.ShapeDtypeStruct(s.shape, jax_arrays.jax_dtype(s.dtype)) for name, s in specs.items()}
    program = Simulated(case, device, make(pltpu.InterpretParams(detect_races=True)), config)
    program.artefacts |= tpu_compiling.exported(make(False), shapes)
    program.config["tpu"] = tpu_compiling.compiled(make(False), shapes)
    return program
