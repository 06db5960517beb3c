"""A jitted function of a case's inputs, by name, as a program of the contract.

Owns compiling, and inputs and outputs on the device. It imports JAX.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from impls.contract import Device, Program
from impls.pallas.kernels import mosaic_code
from impls.support import jax_arrays, jax_setup
from impls.workloads.base import Case

# Simulated warpgroups wait for one another, each in a thread of XLA's pool, whose size JAX reads here when it first
# touches the CPU: in a pool of two the third would never start. On a GPU it means nothing.
os.environ["NPROC"] = "16"
# Blocks of the interpreter: two, so that work is dealt out and clusters have two sides; each costs it threads.
_SIMULATED_BLOCKS = 2


def multiprocessors() -> int:
    """How many the device has; as many as are simulated on a CPU."""
    return getattr(jax.devices()[0], "core_count", None) or _SIMULATED_BLOCKS


class Compiled(Program):
    """One case, compiled ahead of its first call.

    Args:
        function: the outputs, an array or a tuple of them in the case's order, of the inputs by name.
        config: for the record.
        before: what a call also takes, by name, as a function of the inputs: made whenever inputs are loaded.
    """

    def __init__(
        self,
        case: Case,
        device: Device,
        function: Callable[..., Any],
        config: Mapping[str, Any],
        before: Callable[..., dict[str, jax.Array]] | None = None,
    ) -> None:
        super().__init__()
        self.config = {**jax_setup.configure(device), **config}
        self._blocks = device.kind == "cpu"
        self._names = list(case.output_specs())
        self._last: Any = None
        specs = case.input_specs()
        shapes = {name: jax.ShapeDtypeStruct(s.shape, jax_arrays.jax_dtype(s.dtype)) for name, s in specs.items()}
        more = {} if before is None else jax.eval_shape(before, **shapes)
        self._before = None if before is None else jax.jit(before).lower(**shapes).compile()
        lowered = jax.jit(function).lower(**shapes, **more)
        if self._blocks:
            self._call = lowered.compile()
        else:
            with mosaic_code.dumped() as code:
                self._call = lowered.compile()
            self.config["code"] = code.facts
            self.artefacts |= code.artefacts
        self._inputs = list(shapes)

    def load(self, inputs: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Copies: jax's arrays must not change under its hands when the worker rewrites its own."""
        loaded = {name: jax_arrays.to_jax(array) for name, array in inputs.items()}
        return loaded if self._before is None else loaded | jax.block_until_ready(self._before(**loaded))

    def refill(self, loaded: dict[str, jax.Array], inputs: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """New copies: jax's arrays are immutable."""
        return self.load(inputs)

    def over(self, loaded: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """A set that another program of the case has loaded: it holds nothing of a program's own."""
        return loaded

    def run(self, loaded: dict[str, jax.Array]) -> Any:
        """The outputs; on a CPU complete."""
        result = self._call(**loaded)
        if self._blocks:
            return jax.block_until_ready(result)
        self._last = result
        return result

    def synchronize(self) -> None:
        """Wait for the last call: XLA runs calls in their order."""
        if self._last is not None:
            jax.block_until_ready(self._last)
            self._last = None

    def read_outputs(self, result: Any) -> dict[str, np.ndarray]:
        """The outputs on the host."""
        arrays = result if isinstance(result, tuple) else (result,)
        return {name: jax_arrays.to_numpy(x) for name, x in zip(self._names, arrays, strict=True)}

    def read_inputs(self, loaded: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        """The copies."""
        return {name: jax_arrays.to_numpy(loaded[name]) for name in self._inputs}
