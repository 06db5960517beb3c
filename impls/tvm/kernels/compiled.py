"""From a scheduled module to a callable, and what the record keeps of it."""

from __future__ import annotations

from typing import Any

import tvm

from impls.tvm.kernels.host import Host


def build(module: tvm.IRModule, host: Host) -> tvm.runtime.Executable:
    """Compile for the host by TVM's pipeline for schedules and LLVM at its highest level."""
    return tvm.compile(module, target=host.target)


def config(host: Host) -> dict[str, Any]:
    """Settings that hold for every program."""
    return {
        "target": str(host.target),
        "threads": int(tvm.get_global_func("runtime.NumThreads")()),
        "llvm": tvm.target.codegen.llvm_version_major(),
    }


def artefacts(module: tvm.IRModule, executable: tvm.runtime.Executable) -> dict[str, str | bytes]:
    """The scheduled module, and the machine code as text."""
    return {"scheduled.py": module.script(), "kernel.s": executable.mod.inspect_source("asm")}
