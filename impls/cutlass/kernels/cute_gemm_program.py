"""One GEMM over a host function of the CuTe DSL: tensors, and the call.

Owns inputs and outputs on the device, and what the record says of the code. It imports torch.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from impls.cutlass.cute_gemm import Choice, clusters, sizes, tiles
from impls.cutlass.kernels import cute_host
from impls.support import machine_code, torch_arrays
from impls.support.torch_program import TorchProgram
from impls.workloads.gemm import Gemm


@cache
def _opened(path: Path) -> cute_host.Host:
    return cute_host.Host(path)


@dataclass
class _Loaded:
    """One input set on the device.

    Attributes:
        call: launches over these tensors, on the stream that was current when they were loaded.
    """

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    call: Callable[[], None]


class GemmProgram(TorchProgram):
    """One case, cut by one choice.

    Args:
        case: the case.
        choice: how it is cut.
        library: what was compiled for that.
        origin: where the choice comes from, for the record.
        describe: read the machine code, which takes the disassembler a second: not for a candidate of many.
    """

    def __init__(
        self,
        case: Gemm,
        choice: Choice,
        library: Path,
        origin: str,
        *,
        describe: bool = True,
    ) -> None:
        super().__init__()
        self._case, self._choice = case, choice
        torch.cuda.init()
        self._host = _opened(library)
        self._multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        built = tiles(case, choice)
        self.config: dict[str, Any] = {
            "choice": choice.config(),
            "origin": origin,
            "tiles": asdict(built),
        }
        if describe:
            facts = json.loads(library.with_suffix(".json").read_text())
            cubin = library.with_suffix(".cubin").read_bytes()
            code = machine_code.inspect(cubin, dynamic_shared_bytes=built.shared_bytes)
            self.artefacts |= code.artefacts("gemm")
            self.config["code"] = code.facts | {"ptx": facts["ptx"]}
            self.config["compiled"] = {
                "seconds": facts["compile_s"],
                **facts["versions"],
            }

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies on the device, a new output, and a call over them."""
        tensors = {name: torch_arrays.to_torch(array).cuda() for name, array in inputs.items()}
        spec = self._case.output_specs()["C"]
        return self._bound(
            tensors,
            torch.empty(spec.shape, dtype=torch_arrays.torch_dtype(spec.dtype), device="cuda"),
        )

    def over(self, loaded: _Loaded) -> _Loaded:
        """The inputs and output that another program of the case has loaded, under this one's launch."""
        return self._bound(loaded.inputs, loaded.outputs["C"])

    def _bound(self, tensors: dict[str, torch.Tensor], output: torch.Tensor) -> _Loaded:
        case, choice = self._case, self._choice
        a, b = ("B", "A") if choice.swapped else ("A", "B")
        added = next(
            (tensors[name] for name in ("bias", "residual", "group_sizes") if name in tensors),
            output,
        )
        m, n = sizes(case, choice)
        entries = len(case.groups) if case.groups else case.batch
        # The raster's axis is that of C; the kernel's axes are exchanged where C is computed transposed.
        raster = int((choice.raster == "n") != choice.swapped)
        numbers = (
            m,
            n,
            case.k,
            entries,
            raster,
            choice.band,
            clusters(case, choice, self._multiprocessors),
        )
        pointers = (tensors[a], tensors[b], added, output)
        arguments = [
            *(ctypes.c_void_p(x.data_ptr()) for x in pointers),
            *map(ctypes.c_int32, numbers),
        ]
        call = self._host.bind(arguments, torch.cuda.current_stream().cuda_stream)
        return _Loaded(tensors, {"C": output}, call)

    def run(self, loaded: _Loaded) -> dict[str, torch.Tensor]:
        """C."""
        loaded.call()
        return loaded.outputs
