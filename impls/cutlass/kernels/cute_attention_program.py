"""One case of attention over host functions of the CuTe DSL: tensors, and the calls.

Owns inputs, outputs and residuals on the device, and what the record says of the code. It imports torch.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from impls.cutlass.cute_attention import ROWS, Built, DecodeTiles, ForwardTiles, section
from impls.cutlass.kernels import cute_host
from impls.support import machine_code, torch_arrays
from impls.support.torch_program import TorchProgram
from impls.workloads.attention import Attention


@dataclass
class _Loaded:
    """One input set on the device.

    Attributes:
        inputs, outputs: the case's.
        residuals: launches that leave what a backward pass starts from.
        calls: the launches of a call, on the stream that was current when the set was loaded.
        scratch: tensors beside those.
    """

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    residuals: list[Callable[[], None]] = field(default_factory=list)
    calls: list[Callable[[], None]] = field(default_factory=list)
    scratch: list[torch.Tensor] = field(default_factory=list)


class AttentionProgram(TorchProgram):
    """Attention by libraries: forward by one, backward by two.

    Args:
        case: the case.
        forward: the forward kernel, or the decode kernels.
        backward: the backward kernels, where the case is backward.
    """

    def __init__(self, case: Attention, forward: Built, backward: Built | None = None) -> None:
        super().__init__()
        self._case, self._forward = case, forward
        self._hosts = [cute_host.Host(built.path) for built in (forward, backward) if built is not None]
        for name, built in (("forward", forward), ("backward", backward)):
            if built is None:
                continue
            made = json.loads(built.path.with_suffix(".json").read_text())
            image = built.path.with_suffix(".cubin").read_bytes()
            code = machine_code.inspect(image, dynamic_shared_bytes=built.tiles.shared_bytes)
            self.artefacts |= code.artefacts(name)
            facts = {"tiles": asdict(built.tiles), "code": code.facts | {"ptx": made["ptx"]}}
            facts["compiled"] = {"seconds": made["compile_s"], **made["versions"]}
            self.config |= facts if case.direction == "fwd" else {name: facts}
        if isinstance(forward.tiles, DecodeTiles):
            self.config["shares"] = forward.shares

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies on the device, new outputs, and launches over both; of a backward pass the residuals."""
        case = self._case
        loaded = _Loaded(
            {name: torch_arrays.to_torch(array).cuda() for name, array in inputs.items()},
            {
                name: torch.empty(spec.shape, dtype=torch_arrays.torch_dtype(spec.dtype), device="cuda")
                for name, spec in case.output_specs().items()
            },
        )
        if case.direction == "fwd":
            loaded.calls.append(self._attend(loaded, loaded.outputs["O"], None))
            return loaded
        o = loaded.outputs["O"] if case.direction == "fwdbwd" else torch.empty_like(loaded.inputs["Q"])
        rows = case.batch * case.hq * -(-case.sq // ROWS) * ROWS
        # Queries beyond the last have no probabilities; the forward kernel leaves their places alone.
        lse = torch.full((rows,), math.inf, dtype=torch.float32, device="cuda")
        forward = self._attend(loaded, o, lse)
        (loaded.calls if case.direction == "fwdbwd" else loaded.residuals).append(forward)
        loaded.calls.append(self._differentiate(loaded, o, lse))
        self._leave(loaded)
        return loaded

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """In place; residuals are made anew."""
        super().refill(loaded, inputs)
        self._leave(loaded)
        return loaded

    def run(self, loaded: _Loaded) -> dict[str, torch.Tensor]:
        """The outputs."""
        for call in loaded.calls:
            call()
        return loaded.outputs

    def _leave(self, loaded: _Loaded) -> None:
        for call in loaded.residuals:
            call()

    def _attend(self, loaded: _Loaded, o: torch.Tensor, lse: torch.Tensor | None) -> Callable[[], None]:
        """The forward launch, as the kernels' host functions take it."""
        case, tiles = self._case, self._forward.tiles
        pointers = [*(loaded.inputs[name] for name in "QKV"), o]
        sizes: tuple[int, ...]
        if isinstance(tiles, DecodeTiles):
            shares = self._forward.shares
            parts = shares * case.batch * case.hq * (case.d + 2) if shares > 1 else 0
            pointers.append(torch.empty(parts, dtype=torch.float32, device="cuda"))
            sizes = (case.batch, case.sk, case.hq, case.hkv, case.d, case.window, shares)
        else:
            assert isinstance(tiles, ForwardTiles)
            # The persistent kernel's counter of tiles begins at 0.
            counter = torch.zeros(1, dtype=torch.int32, device="cuda")
            pointers += [counter, counter if lse is None else lse]
            count = case.batch * case.hq * -(-case.sq // tiles.rows)
            programs = min(count, torch.cuda.get_device_properties(0).multi_processor_count)
            sizes = (case.batch, case.sq, case.sk, case.hq, case.hkv, case.d, case.window, section(case), programs)
        return self._bound(0, loaded, pointers, sizes, [math.log2(math.e) / math.sqrt(case.d)])

    def _differentiate(self, loaded: _Loaded, o: torch.Tensor, lse: torch.Tensor) -> Callable[[], None]:
        """The backward launches."""
        case = self._case
        head = -(-case.d // 64) * 64
        delta, sums = torch.empty_like(lse), torch.empty(lse.numel() * head, dtype=torch.float32, device="cuda")
        gradients = [loaded.outputs[name] for name in ("dQ", "dK", "dV")]
        pointers = [*(loaded.inputs[n] for n in "QKV"), o, loaded.inputs["dO"], *gradients, lse, delta, sums]
        sizes = (case.batch, case.sq, case.sk, case.hq, case.hkv, case.d, case.window)
        scale = 1 / math.sqrt(case.d)
        return self._bound(1, loaded, pointers, sizes, [scale * math.log2(math.e), scale])

    def _bound(
        self,
        host: int,
        loaded: _Loaded,
        tensors: list[torch.Tensor],
        sizes: tuple[int, ...],
        factors: list[float],
    ) -> Callable[[], None]:
        loaded.scratch += tensors
        arguments = [
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
            *map(ctypes.c_int32, sizes),
            *map(ctypes.c_float, factors),
        ]
        return self._hosts[host].bind(arguments, torch.cuda.current_stream().cuda_stream)
