"""Run by the interpreter of the torch.compile stack: what programs say of their compilation. JSON on stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from impls import registry
from impls.contract import Device, Program
from impls.workloads.base import parse_case

CPU = Device("cpu", "", "x86_64", 2, 1 << 34, frozenset({"avx2"}))


def built(impl: str, case_id: str) -> tuple[Program, Any, Mapping[str, np.ndarray]]:
    """A program with one input set loaded, and the set's arrays."""
    case = parse_case(case_id)
    program = registry.find(impl, case.workload).prepare(case, CPU)
    inputs = case.inputs(3)
    return program, program.load(inputs), inputs


def known(program: Program) -> dict[str, Any]:
    """What goes into the record."""
    return {"config": program.config, "artefacts": {name: str(text) for name, text in program.artefacts.items()}}


def main() -> None:
    """Programs alive at once, called in turn: a recompilation by any of them would raise."""
    chosen = {
        "epilogue": ("torch_compile.default", "gemm:24x40x32:f32:bias+gelu"),
        "another shape": ("torch_compile.default", "gemm:48x40x32:f32:bias+gelu"),
        "control": ("torch_compile.aot_eager", "gemm:24x40x32:f32:bias+gelu"),
        "backward": ("torch_compile.default", "attention:b1h2s24d64:f32:causal:bwd"),
        "raced": ("torch_compile.max_autotune", "gemm:24x40x32:f32"),
    }
    alive = {name: built(*one) for name, one in chosen.items()}
    for _ in range(2):
        for program, loaded, _ in alive.values():
            program.read_outputs(program.run(loaded))
    found = {name: known(program) for name, (program, _, _) in alive.items()}
    # A call with other shapes is compiled again, and reading its outputs must not hide that.
    program, loaded, inputs = alive["epilogue"]
    other = program.load({n: np.ascontiguousarray(a[:12]) if n == "A" else a for n, a in inputs.items()})
    try:
        program.read_outputs(program.run(other))
        found["recompiled"] = "unnoticed"
    except RuntimeError as error:
        found["recompiled"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
