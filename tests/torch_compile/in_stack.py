"""Run by the interpreter of a stack with torch: what a GPU's products of the cases named give, without a GPU.

Tensors are fake: torch's own shape functions refuse operands that its operators would refuse. JSON on stdout: by case
``[shape, dtype, contiguous]``.
"""

from __future__ import annotations

import json
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from impls.support.torch_arrays import torch_dtype
from impls.torch_compile import gpu
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm


def main() -> None:
    found = {}
    for name in sys.argv[1:]:
        case = parse_case(name)
        assert isinstance(case, Gemm)
        with FakeTensorMode():
            tensors = [
                torch.empty(s.shape, dtype=torch_dtype(s.dtype), device="cuda") for s in case.input_specs().values()
            ]
            if case.dtype == "f8e4m3":
                tensors.append(torch.ones((), device="cuda"))
            c = gpu.computation(case)(*tensors)
        found[name] = [list(c.shape), str(c.dtype), c.is_contiguous()]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
