"""A case as StableHLO: one portable artefact that every compiler takes from the same bytes.

Owns the export and the artefact's version. What is exported is in ``jax_cases``. It imports jax: implementations import
it inside ``prepare``.

The artefact is written for the oldest version that today's StableHLO still writes, so that consumers older than the
exporter read it too, and without debug information, so that its bytes and their SHA-256 depend on the case and on jax's
version only: two stacks that record the same hash have compiled the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

import jax
from jax import export as jax_export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.passmanager import PassManager

from impls.support.jax_cases import Computation
from impls.workloads.base import TensorSpec
from impls.workloads.dtypes import dtype


@dataclass(frozen=True)
class Artefact:
    """An exported computation.

    Attributes:
        data: the portable artefact (MLIR bytecode of the VHLO dialect); its entry function is ``main``.
        version: StableHLO version that it is written for.
        exported: jax's handle on the same bytes: ``jax.jit(exported.call)`` compiles them.
    """

    data: bytes
    version: str
    exported: jax_export.Exported

    @property
    def sha256(self) -> str:
        """Of the bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    def config(self) -> dict[str, str]:
        """What a record says about the artefact."""
        return {"stablehlo_sha256": self.sha256, "stablehlo_version": self.version}


def export(computation: Computation, *, symbolic_rows: str | None = None) -> Artefact:
    """Trace a computation once and write it down.

    Args:
        computation: what to export.
        symbolic_rows: an input whose first axis is left open, as is the same axis of the output; None fixes all sizes.
    """

    def spec(name: str, tensor: TensorSpec) -> jax.ShapeDtypeStruct:
        shape: tuple[object, ...] = tensor.shape
        if name == symbolic_rows:
            shape = (*jax_export.symbolic_shape("m"), *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype(tensor.dtype).storage)

    def entry(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return computation.function(*inputs)

    entry.__name__ = computation.name
    # Asked for here, not process-wide, so that every stack writes the same precision into the bytes.
    with jax.default_matmul_precision("highest"):
        # keep_unused: every stack passes every input, those of empty groups too.
        exported = jax_export.export(jax.jit(entry, keep_unused=True), platforms=["cpu"])(
            *(spec(name, tensor) for name, tensor in computation.inputs.items())
        )
    version = stablehlo.get_minimum_version()
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        data = stablehlo.serialize_portable_artifact_str(str(module), version)
    return Artefact(data, version, dataclasses.replace(exported, mlir_module_serialized=data))


def text(data: bytes) -> str:
    """An artefact's StableHLO, as text, upgraded to today's version."""
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        return str(stablehlo.deserialize_portable_artifact(context, data))
