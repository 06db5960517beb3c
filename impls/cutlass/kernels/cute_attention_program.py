"""One case of attention over host functions of the CuTe DSL: tensors, and the call.

Owns inputs and outputs on the device, and what the record says of the code. It imports torch.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from impls.contract import Program
from impls.cutlass.cute_attention import DecodeTiles, ForwardTiles, section
from impls.cutlass.kernels import cute_host
from impls.support import machine_code, torch_arrays
from impls.workloads.attention import Attention


@dataclass
class _Loaded:
    """One input set on the device.

    Attributes:
        call: launches over these tensors, on the stream that was current when they were loaded.
        scratch: what the shares of a decode step leave behind, or the counter of tiles.
    """

    inputs: dict[str, torch.Tensor]
    output: torch.Tensor
    scratch: torch.Tensor
    call: Callable[[], None]


class AttentionProgram(Program):
    """Attention forward by the given tiles.

    Args:
        case: the case.
        tiles: what the library was built for.
        shares: of the keys, in a decode step.
        library: the library.
    """

    def __init__(self, case: Attention, tiles: ForwardTiles | DecodeTiles, shares: int, library: Path) -> None:
        super().__init__()
        self._case, self._tiles, self._shares = case, tiles, shares
        self._host = cute_host.Host(library)
        built = json.loads(library.with_suffix(".json").read_text())
        code = machine_code.inspect(library.with_suffix(".cubin").read_bytes(), dynamic_shared_bytes=tiles.shared_bytes)
        self.artefacts |= code.artefacts("attention")
        self.config = {"tiles": asdict(tiles), "shares": shares, "code": code.facts | {"ptx": built["ptx"]}}
        self.config |= {"compiled": {"seconds": built["compile_s"], **built["versions"]}}

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies on the device, a new output, and a call over them."""
        tensors = {name: torch_arrays.to_torch(array).cuda() for name, array in inputs.items()}
        output = torch.empty_like(tensors["Q"])
        rows = self._case.batch * self._case.hq
        # Without shares there is one word: the persistent kernel's counter of tiles, which has to begin at 0.
        words = self._shares * rows * (self._case.d + 2) if self._shares > 1 else 1
        scratch = torch.zeros(words, dtype=torch.float32, device="cuda")
        arguments = self._arguments(*(tensors[name] for name in "QKV"), output, scratch)
        call = self._host.bind(arguments, torch.cuda.current_stream().cuda_stream)
        return _Loaded(tensors, output, scratch, call)

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """In place."""
        for name, tensor in loaded.inputs.items():
            tensor.copy_(torch_arrays.to_torch(inputs[name]))
        return loaded

    def run(self, loaded: _Loaded) -> dict[str, torch.Tensor]:
        """O."""
        loaded.call()
        return {"O": loaded.output}

    def poison(self, loaded: _Loaded) -> None:
        """NaN into the output."""
        torch_arrays.poison(loaded.output)

    def read_outputs(self, result: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """O on the host."""
        return {name: torch_arrays.to_numpy(tensor) for name, tensor in result.items()}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The inputs on the host."""
        return {name: torch_arrays.to_numpy(tensor) for name, tensor in loaded.inputs.items()}

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """Give the memory back to the device: torch would keep it."""
        torch.cuda.empty_cache()

    def _arguments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, scratch: torch.Tensor
    ) -> list[cute_host.Argument]:
        """As the kernels' host functions take them."""
        case = self._case
        scale = ctypes.c_float(math.log2(math.e) / math.sqrt(case.d))
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (q, k, v, o)]
        if isinstance(self._tiles, DecodeTiles):
            sizes = (case.batch, case.sk, case.hq, case.hkv, case.d, case.window, self._shares)
            return [*pointers, ctypes.c_void_p(scratch.data_ptr()), *map(ctypes.c_int32, sizes), scale]
        tiles = case.batch * case.hq * -(-case.sq // self._tiles.rows)
        programs = min(tiles, torch.cuda.get_device_properties(0).multi_processor_count)
        sizes = (case.batch, case.sq, case.sk, case.hq, case.hkv, case.d, case.window, section(case), programs)
        return [*pointers, ctypes.c_void_p(scratch.data_ptr()), *map(ctypes.c_int32, sizes), scale]
