"""What the tests ask of a stack's own environment: run by its interpreter, answers with JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import mhlo, stablehlo
from jaxlib.mlir.passmanager import PassManager

from impls.support import jax_cases
from impls.support import stablehlo as artefacts
from impls.workloads.base import Case, parse_case

SEED = 5


def worst(case: Case, outputs: list[np.ndarray]) -> float:
    """The largest error over its tolerance, against float64; infinite where an output is not finite."""
    found = 0.0
    for output, (name, expected) in zip(outputs, case.expected(case.inputs(SEED)).items(), strict=True):
        del name
        chosen = np.asarray(expected.select(output), np.float64)
        if not np.isfinite(chosen).all():
            return float("inf")
        error = np.abs(chosen - expected.value)
        found = max(found, float((error / np.maximum(expected.tolerance, np.finfo(np.float64).tiny)).max()))
    return found


def run(artefact: artefacts.Artefact, case: Case) -> list[np.ndarray]:
    """XLA's outputs."""
    return [np.asarray(o) for o in jax.jit(artefact.exported.call)(*case.inputs(SEED).values())]


def export(case_id: str) -> dict[str, Any]:
    """Hash and version of a case's artefact."""
    computation = jax_cases.computation(parse_case(case_id))
    one = artefacts.export(computation)
    again = artefacts.export(computation)
    return {
        "sha256": one.sha256,
        "again": again.sha256,
        "version": one.version,
        "magic": one.data[:24].decode("latin1"),
        "names_a_file": b".py" in one.data,
    }


def open_rows(case_id: str) -> dict[str, Any]:
    """Hash of a case's family, M left open, and XLA's outputs for the case from it."""
    case = parse_case(case_id)
    artefact = artefacts.export(jax_cases.computation(case), symbolic_rows="A")
    return {"sha256": artefact.sha256, "worst": worst(case, run(artefact, case))}


def read_back(case_id: str) -> dict[str, Any]:
    """The artefact, read back and executed, beside the same function that was never written down."""
    import dataclasses

    case = parse_case(case_id)
    computation = jax_cases.computation(case)
    artefact = artefacts.export(computation)
    current = stablehlo.serialize_portable_artifact_str(artefacts.text(artefact.data), stablehlo.get_current_version())
    newest = dataclasses.replace(
        artefact, exported=dataclasses.replace(artefact.exported, mlir_module_serialized=current)
    )
    jax.config.update("jax_default_matmul_precision", "highest")
    direct = [np.asarray(o) for o in jax.jit(computation.function)(*case.inputs(SEED).values())]
    outputs = run(artefact, case)
    return {
        "equal_to_newest": all((a == b).all() for a, b in zip(outputs, run(newest, case), strict=True)),
        "equal_to_direct": all((a == b).all() for a, b in zip(outputs, direct, strict=True)),
        "worst": worst(case, outputs),
    }


def versions() -> dict[str, Any]:
    """StableHLO's oldest version, and whether one before it can be written."""
    text = artefacts.text(artefacts.export(jax_cases.computation(parse_case("gemm:2x2x2:f32"))).data)
    try:
        stablehlo.serialize_portable_artifact_str(text, "0.8.0")
    except ValueError:
        older = False
    else:
        older = True
    return {"oldest": stablehlo.get_minimum_version(), "older_is_written": older}


def through_mhlo(case_id: str) -> dict[str, Any]:
    """StableHLO to MHLO and back, executed before and after."""
    import dataclasses

    case = parse_case(case_id)
    artefact = artefacts.export(jax_cases.computation(case))
    mhlo.register_mhlo_passes()
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        mhlo.register_mhlo_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, artefact.data)
        PassManager.parse("builtin.module(stablehlo-legalize-to-hlo)").run(module.operation)
        legalized = str(module)
        PassManager.parse("builtin.module(hlo-legalize-to-stablehlo)").run(module.operation)
        data = stablehlo.serialize_portable_artifact_str(str(module), artefact.version)
    back = dataclasses.replace(
        artefact, data=data, exported=dataclasses.replace(artefact.exported, mlir_module_serialized=data)
    )
    outputs = zip(run(artefact, case), run(back, case), strict=True)
    return {
        "mhlo_dots": legalized.count("mhlo.dot"),
        "stablehlo_left": legalized.count("stablehlo."),
        "same_text": artefacts.text(data) == artefacts.text(artefact.data),
        "equal": all((a == b).all() for a, b in outputs),
    }


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f for f in (export, open_rows, read_back, versions, through_mhlo)
}

if __name__ == "__main__":
    json.dump(ANSWERS[sys.argv[1]](*sys.argv[2:]), sys.stdout)
