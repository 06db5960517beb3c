"""A GEMM of CUTLASS C++ as a program: its library loaded by ctypes, over tensors of torch.

Owns the library's C interface as Python sees it, and the life of a prepared call. torch comes first: it loads the CUDA
runtime that the libraries link against.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from impls.contract import Device, Program, Unsupported
from impls.cutlass import build, cpp_choices
from impls.cutlass.cpp_choices import Choice
from impls.support import machine_code, torch_arrays
from impls.workloads.gemm import Gemm

_RASTER = {"heuristic": 0, "m": 1, "n": 2}
# What the tensor cores multiply in one instruction, and what the schedule is made of, for the record.
_INSTRUCTION_DTYPE = {"tf32": "tf32", "f16": "f16", "bf16": "bf16", "f8e4m3": "e4m3", "i8": "s8"}


class Call(ctypes.Structure):
    """``Call`` of ``cpp_source``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "addend", "d", "group_sizes", "workspace")),
        *((n, ctypes.c_int) for n in ("m", "n", "k", "batch", "raster", "swizzle", "splits", "multiprocessors")),
    ]


class CutlassError(RuntimeError):
    """A call of the library failed; the message says which and with what status."""


class Library:
    """One kernel's library.

    Args:
        path: the file.

    Attributes:
        facts: versions, stages, threads, shared memory and instruction, as compiled.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("prepared_bytes", "workspace_bytes"):
            getattr(self._library, name).restype = ctypes.c_int64
        text = ctypes.create_string_buffer(4096)
        self._library.facts(text, len(text))
        self.facts: dict[str, Any] = json.loads(text.value)

    def workspace_bytes(self, call: Call) -> int:
        """Device memory that a call takes beside its operands."""
        return int(self._library.workspace_bytes(ctypes.byref(call)))

    def can_implement(self, call: Call) -> bool:
        """Whether the kernel takes a call's sizes and alignments; addresses are not looked at."""
        return bool(self._library.can_implement(ctypes.byref(call)))

    def prepare(self, call: Call) -> ctypes.Array[ctypes.c_char]:
        """Host memory that ``run`` takes: tensor maps over the call's operands, and its schedule."""
        # A tensor map lies at a multiple of 64 bytes.
        memory = ctypes.create_string_buffer(int(self._library.prepared_bytes()) + 128)
        offset = -ctypes.addressof(memory) % 128
        prepared = (ctypes.c_char * (len(memory) - 128)).from_buffer(memory, offset)
        if status := self._library.prepare(prepared, ctypes.byref(call)):
            raise CutlassError(f"The call cannot be prepared: CUDA says {status}.")
        return prepared

    def launcher(self, prepared: ctypes.Array[ctypes.c_char], stream: int) -> Any:
        """A function without arguments that launches a prepared call on a stream (its handle)."""
        run, arguments = self._library.run, (ctypes.byref(prepared), ctypes.c_void_p(stream))

        # ``arguments`` points into ``prepared``: the function keeps it alive.
        def launch(_prepared: Any = prepared) -> None:
            if status := run(*arguments):
                raise CutlassError(f"The launch failed: CUDA says {status}.")

        return launch


@cache
def _opened(path: Path) -> Library:
    return Library(path)


@dataclass
class _Loaded:
    """One input set on the device, and the launch over it."""

    inputs: dict[str, torch.Tensor]
    output: torch.Tensor
    workspace: torch.Tensor
    launch: Any


class Product(Program):
    """One case, cut by one choice.

    Args:
        case: the case.
        device: where it runs.
        choice: how it is cut.
        origin: where the choice comes from, for the record.
        describe: read the machine code, which takes the disassembler a second: not for a candidate of many.

    Raises:
        Unsupported: the kernel's library is not there and cannot be compiled here, or it refuses the sizes.
    """

    def __init__(self, case: Gemm, device: Device, choice: Choice, origin: str = "", *, describe: bool = True) -> None:
        super().__init__()
        self._case, self._choice = case, choice
        kernel = cpp_choices.kernel(case, choice)
        try:
            path = build.ensure(kernel)
        except build.BuildError as error:
            raise Unsupported(str(error)) from error
        torch.cuda.init()
        self._library = _opened(path)
        self._multiprocessors = int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
        if not self._library.can_implement(self._call({}, None)):
            raise Unsupported("CUTLASS' collectives do not take sizes or strides of this case.")
        self.config = {"choice": choice.config(), "origin": origin, **described(case, choice, self._library.facts)}
        if describe:
            code = machine_code.inspect(path.read_bytes(), dynamic_shared_bytes=self._library.facts["shared_bytes"])
            self.config["code"] = code.facts
            self.artefacts = code.artefacts("gemm")

    def _call(self, tensors: Mapping[str, torch.Tensor], output: torch.Tensor | None) -> Call:
        """The call over these tensors; the workspace is still to be set. Without tensors: its sizes only."""
        case, choice = self._case, self._choice
        address = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        a, b = ("B", "A") if choice.swapped else ("A", "B")
        m, n, k = cpp_choices.sizes(case, choice)
        return Call(
            a=address.get(a),
            b=address.get(b),
            addend=address.get("bias", address.get("residual")),
            d=None if output is None else output.data_ptr(),
            group_sizes=address.get("group_sizes"),
            m=m,
            n=n,
            k=k,
            batch=len(case.groups) if case.groups else case.batch,
            raster=_RASTER[choice.raster],
            swizzle=choice.swizzle,
            splits=choice.splits,
            multiprocessors=self._multiprocessors,
        )

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies on the device, a new output, a prepared call over both."""
        tensors = {name: torch_arrays.to_torch(array).cuda() for name, array in inputs.items()}
        spec = self._case.output_specs()["C"]
        output = torch.empty(spec.shape, dtype=torch_arrays.torch_dtype(spec.dtype), device="cuda")
        return self._bound(tensors, output)

    def over(self, loaded: _Loaded) -> _Loaded:
        """The inputs and output that another program of the case has loaded, under this one's launch."""
        return self._bound(loaded.inputs, loaded.output)

    def _bound(self, tensors: dict[str, torch.Tensor], output: torch.Tensor) -> _Loaded:
        call = self._call(tensors, output)
        workspace = torch.empty(max(16, self._library.workspace_bytes(call)), dtype=torch.uint8, device="cuda")
        call.workspace = workspace.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        return _Loaded(tensors, output, workspace, self._library.launcher(self._library.prepare(call), stream))

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """In place."""
        for name, tensor in loaded.inputs.items():
            tensor.copy_(torch_arrays.to_torch(inputs[name]))
        return loaded

    def run(self, loaded: _Loaded) -> torch.Tensor:
        """C."""
        loaded.launch()
        return loaded.output

    def poison(self, loaded: _Loaded) -> None:
        """NaN into C."""
        torch_arrays.poison(loaded.output)

    def read_outputs(self, result: torch.Tensor) -> dict[str, np.ndarray]:
        """C."""
        return {"C": torch_arrays.to_numpy(result)}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The copies."""
        return {name: torch_arrays.to_numpy(tensor) for name, tensor in loaded.inputs.items()}

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """Give the memory back to the device: torch would keep it."""
        torch.cuda.empty_cache()


def described(case: Gemm, choice: Choice, facts: Mapping[str, Any]) -> dict[str, Any]:
    """How the three levels and the primitives appear in a configuration, for the record.

    Args:
        case: the case.
        choice: how it is cut.
        facts: of the compiled kernel.
    """
    by_tma = choice.schedule != "cp_async"
    clustered = choice.cluster_m * choice.cluster_n > 1
    m, n, k = facts["instruction"]
    who = {
        "cooperative": f"one producer warp; {facts['consumer_warpgroups']} warpgroups multiply a tile together",
        "pingpong": "one producer warp; two warpgroups take turns: one multiplies while the other writes its tile",
        "single": "one producer warp; one warpgroup multiplies",
        "cp_async": f"one producer warpgroup; {facts['consumer_warpgroups']} warpgroups multiply a tile together",
    }[choice.schedule]
    walk = "stream-K" if choice.stream_k else "one block per tile" if choice.schedule == "single" else "persistent"
    primitives = ["wgmma", "mbarrier", *(["TMA load", "TMA store"] if by_tma else ["cp.async"])]
    primitives += ["cluster", "TMA multicast"] if clustered else []
    return {
        "levels": {
            "tile": f"{choice.m}x{choice.n}x{choice.k}, {facts['stages']} stages, "
            f"clusters of {choice.cluster_m}x{choice.cluster_n}, {walk}",
            "warp": who,
            "instruction": f"wgmma m{m}n{n}k{k} {_INSTRUCTION_DTYPE[case.dtype]}",
        },
        "primitives": primitives,
        "built": dict(facts),
    }
