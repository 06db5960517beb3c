"""What IREE compiles for: the targets, their flags, and the compiler's call.

Owns names and flags of targets and one function that compiles; which flags suit a case belongs to the implementations,
and running to ``runtime``. Imports IREE inside its function only.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from impls.contract import Unsupported


@dataclass(frozen=True)
class Target:
    """One machine, or kind of machine, that code is made for.

    Attributes:
        name: ``host``, ``aarch64``, ``vulkan-spirv``, ...
        flags: of iree-compile.
        driver: of IREE's runtime, which runs the code here; empty where nothing here can.
    """

    name: str
    flags: tuple[str, ...]
    driver: str = ""


_LOCAL = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu")


def _cpu(triple: str, *more: str) -> tuple[str, ...]:
    return (*_LOCAL, f"--iree-llvmcpu-target-triple={triple}", *more)


HOST = Target("host", (*_LOCAL, "--iree-llvmcpu-target-cpu=host"), "local-task")
VMVX = Target("vmvx", ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=vmvx"), "local-task")
# Mesa's software device: code for the default target gives wrong results there in all types narrower than f32.
VULKAN = Target("vulkan-spirv", ("--iree-hal-target-device=vulkan", "--iree-vulkan-target=llvmpipe"), "vulkan")

#: Where the same bytes should go. CPUs other than the host with the vectors they commonly have: NEON, RVV, SIMD128.
TARGETS = (
    HOST,
    Target("aarch64", _cpu("aarch64-unknown-linux-gnu", "--iree-llvmcpu-target-cpu-features=+neon")),
    Target(
        "riscv64",
        _cpu(
            "riscv64-unknown-linux-gnu",
            "--iree-llvmcpu-target-cpu=generic-rv64",
            "--iree-llvmcpu-target-abi=lp64d",
            "--iree-llvmcpu-target-cpu-features=+m,+a,+f,+d,+c,+v,+zvl256b",
        ),
    ),
    Target("wasm32", _cpu("wasm32-unknown-unknown", "--iree-llvmcpu-target-cpu-features=+simd128")),
    VMVX,
    Target("cuda", ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_80")),
    Target("rocm", ("--iree-hal-target-device=hip", "--iree-rocm-target=gfx942")),
    VULKAN,
    Target("metal-spirv", ("--iree-hal-target-device=metal",)),
)


@dataclass(frozen=True)
class Compiled:
    """A module for IREE's runtime.

    Attributes:
        module: the VM flatbuffer, executables inside.
        statistics: ``dispatches`` per call, ``transient_bytes`` of intermediates, ``module_bytes``.
    """

    module: bytes
    statistics: dict[str, Any]


class CompilerRefusal(Unsupported):
    """iree-compile does not compile it; the message is one sentence with its first error."""


def compile_module(
    source: bytes | str, target: Target, flags: Sequence[str] = (), *, form: Literal["stablehlo", "none"] = "stablehlo"
) -> Compiled:
    """Compile for a target.

    Args:
        source: a StableHLO artefact, or (form ``none``) MLIR text in IREE's own dialects.
        target: what for.
        flags: of iree-compile, beside the target's.
        form: what ``source`` is.

    Raises:
        CompilerRefusal: iree-compile ends with an error.
    """
    from iree.compiler import CompilerToolError, compile_str

    with tempfile.TemporaryDirectory(prefix="ridgemark-iree-") as scratch:
        report = Path(scratch) / "statistics.json"
        told = ("--iree-scheduling-dump-statistics-format=json", f"--iree-scheduling-dump-statistics-file={report}")
        try:
            module = compile_str(source, input_type=form, extra_args=[*target.flags, *flags, *told])
        except CompilerToolError as error:
            raise CompilerRefusal(_first_error(str(error), target)) from None
        counts = json.loads(report.read_text())["stream-aggregate"]["execution"]
    statistics = {
        "dispatches": counts["dispatch-count"],
        "transient_bytes": counts["transient-memory-size"],
        "module_bytes": len(module),
    }
    return Compiled(module, statistics)


def _first_error(told: str, target: Target) -> str:
    """A sentence with the compiler's first error; the operation that it prints after the message is left out."""
    found = re.search(r"error: (.+)", told)
    line = re.split(r": %|: \"", found.group(1))[0].strip().rstrip(".:") if found else "it crashed without a message"
    return f"iree-compile refuses this for {target.name}: {line[:200]}."


# VMVX ran a 256^3 product in f32 at 0.14 GFLOP/s on two Zen 4 cores: more than this takes seconds a call.
VMVX_FLOPS = 10**8


def too_long_for_vmvx(flops: int) -> str | None:
    """Why VMVX does not take a case that computes so much, in one sentence; None where it does."""
    if flops <= VMVX_FLOPS:
        return None
    return f"VMVX interprets, at about 0.1 GFLOP/s: it takes up to {VMVX_FLOPS / 1e9:.1f} GFLOP, masked scores counted."
