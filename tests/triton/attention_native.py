"""What the attention kernels compile to, on a machine without a GPU; run in the Triton stack's environment.

``python -m tests.triton.attention_native ARCH [IMPLEMENTATION CASE] ...`` prints one JSON list, one object for each
pair: kernel name -> instruction families, shared memory, bytes of stack.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from impls import registry
from impls.contract import Device
from impls.support import machine_code
from impls.triton.attention_tiles import Choice, choose
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case


def compiled(arch: str, name: str, case_id: str) -> dict[str, dict[str, Any]]:
    """Facts about the kernels of one case, with the tiles that a device of this kind is given."""
    case = parse_case(case_id)
    implementation: Any = registry.find(name, "attention")
    assert isinstance(case, Attention)
    device = Device("cuda", "", arch, 1, 0)
    choice = Choice(tuple((kernel, choose(kernel, case, device)[0]) for kernel in implementation._kernels(case)))
    facts: dict[str, dict[str, Any]] = {}
    for kernel in implementation.compile_ahead(case, choice, arch):
        if "amdgcn" in kernel.asm:
            read = machine_code.of_amdgcn(kernel.asm["amdgcn"])
        else:
            code = machine_code.inspect(kernel.asm["cubin"], ptx=kernel.asm["ptx"]).facts
            [read] = code["kernels"].values()
        facts[kernel.name] = {
            "instructions": read["instructions"],
            "stack_bytes": read.get("stack_bytes"),
            "shared_bytes": kernel.metadata.shared,
        }
    return facts


def main() -> None:
    """Compile what was asked for."""
    arch, *rest = sys.argv[1:]
    print(json.dumps([compiled(arch, *pair) for pair in zip(rest[::2], rest[1::2], strict=True)]))


if __name__ == "__main__":
    main()
