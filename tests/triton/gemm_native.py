"""What the GEMM kernels compile to, on a machine without a GPU; run in the Triton stack's environment.

``python -m tests.triton.gemm_native ARCH [IMPLEMENTATION CASE] ...`` prints one JSON list, one object for each pair:
instruction families, opcodes in full where they are tensor cores', and how many f32 additions the kernel has.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

from impls import registry
from impls.support import machine_code
from impls.support.h200 import H200
from impls.triton.choices import choose
from impls.triton.gemm import Tiled
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm


def compiled(arch: str, name: str, case_id: str) -> dict[str, Any]:
    """Facts about the kernel of one case, with the tile that the H200 is given."""
    case = parse_case(case_id)
    implementation = registry.find(name, "gemm")
    assert isinstance(case, Gemm)
    assert isinstance(implementation, Tiled)
    tile, _ = choose(name, case, H200.name)
    tile = replace(tile, tma=tile.tma and arch in ("sm_90", "sm_100"), defer=tile.defer and arch == "sm_90")
    *_, kernel = implementation.compile_ahead(case, tile, arch)  # of tf32 an operand may be transposed before
    if "amdgcn" in kernel.asm:
        facts = machine_code.of_amdgcn(kernel.asm["amdgcn"])
        return {"instructions": facts["instructions"], "opcodes": facts["opcodes"]}
    facts = machine_code.inspect(kernel.asm["cubin"], ptx=kernel.asm["ptx"]).facts
    [one] = facts["kernels"].values()
    return {
        "instructions": one["instructions"],
        "opcodes": one["opcodes"],
        "stack_bytes": one["stack_bytes"],
        "shared_bytes": kernel.metadata.shared,
        "additions": len(re.findall(r"\badd(?:\.rn)?(?:\.ftz)?\.f32\b", kernel.asm["ptx"])),
        "accumulators": tile.bm * tile.bn,
    }


def main() -> None:
    """Compile what was asked for."""
    arch, *rest = sys.argv[1:]
    print(json.dumps([compiled(arch, *pair) for pair in zip(rest[::2], rest[1::2], strict=True)]))


if __name__ == "__main__":
    main()
