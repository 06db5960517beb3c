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
from typing import Any, cast

import triton

from impls import registry
from impls.support import machine_code
from impls.support.h200 import H200
from impls.triton.gluon_tiles import choose_blocking, choose_tiling
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm


def compiled(case_id: str) -> dict[str, Any]:
    """Facts about the kernel of one case."""
    case = parse_case(case_id)
    implementation = registry.find("triton.gluon", case.workload)
    assert implementation.refuses(case, H200) is None
    if isinstance(case, Gemm):
        choice: Any = choose_tiling(case, H200)[0]
    else:
        assert isinstance(case, Attention)
        choice = choose_blocking(case, H200)[0]
    *_, kernel = cast(Any, implementation).compile_ahead(case, choice, "sm_90")
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
    print(json.dumps({case_id: compiled(case_id) for case_id in sys.argv[1:]}))


if __name__ == "__main__":
    main()
