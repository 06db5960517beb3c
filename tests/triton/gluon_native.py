"""What the Gluon kernels compile to for sm_90, on a machine without a GPU; run in the Triton stack's environment.

Prints one JSON object: case id -> what the machine code holds, and what ptxas remarks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from impls.contract import Device
from impls.support import machine_code, torch_arrays
from impls.triton.gluon import GluonAttention, GluonGemm, attention_blocking, gemm_tiling
from impls.triton.kernels import gluon_attention, gluon_gemm
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm

HOPPER = Device("cuda", "NVIDIA H200", "sm_90", 1, 140 * 2**30)


class Absent:
    """A driver for a GPU that is not there: it says what to compile for, and launches nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def compiled(case_id: str) -> dict[str, Any]:
    """Facts about the kernel of one case."""
    case = parse_case(case_id)
    specs = case.input_specs() | case.output_specs()
    tensors = {n: torch.empty(s.shape, dtype=torch_arrays.torch_dtype(s.dtype)) for n, s in specs.items()}
    if isinstance(case, Gemm):
        assert GluonGemm().refuses(case, HOPPER) is None
        launch = gluon_gemm.launch(case, tensors, gluon_gemm.Tiling(**gemm_tiling(case)))
    else:
        assert isinstance(case, Attention)
        assert GluonAttention().refuses(case, HOPPER) is None
        launch = gluon_attention.launch(case, tensors, gluon_attention.Blocking(**attention_blocking(case)))
    kernel = launch.compiled
    code = machine_code.inspect(kernel.asm["cubin"], ptx=kernel.asm["ptx"])
    return {
        "ptxas": remarks(kernel.asm["ptx"]),
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "instructions": next(iter(code.facts["kernels"].values()))["instructions"],
        "shapes": code.facts["ptx"]["shapes"],
    }


def remarks(ptx: str) -> dict[str, Any]:
    """Codes of ptxas' performance remarks, and bytes that it spills."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", said)]
    return {"codes": re.findall(r"\(C\d+\)", said), "spills": sum(spills)}


def main() -> None:
    """Compile the cases that were asked for."""
    driver.set_active(Absent())
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132)
    print(json.dumps({case_id: compiled(case_id) for case_id in sys.argv[1:]}))


if __name__ == "__main__":
    main()
