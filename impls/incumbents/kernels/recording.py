"""What a library's host code launches for one case, written down: its buffers, its fills, its launches.

Owns the recording's form and how it is launched again. FlashAttention-4 and QuACK decide on the host (tiles, splits,
scratch, which kernels in which order) and compile with CUTLASS' CuTe DSL: half a gigabyte that a GPU node need not
have. ``recorder`` runs that host code where the DSL is, without a GPU, and keeps what it did; here the same launches
are made with the same arguments, from the compiled libraries alone. A recording is JSON:

    {"choice": {...} | null, "kernels": [{"library", "class", "attributes"}],
     "buffers": [{"name": "Q" | null, "bytes": n}],
     "before": [step ...], "steps": [step ...]}

A step is ``{"zero": tensor}`` or ``{"launch": index of a kernel, "arguments": [...]}``; an argument is None, a number,
a list of arguments, or a tensor ``{"buffer": index, "dtype": "bf16", "shape": [...], "strides": [...], "offset": n}``
(elements). Buffers without a name are the library's scratch. ``before`` is what runs once per set of inputs: the
forward pass, where only the backward is the case.

It imports neither torch nor TVM FFI at module level.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impls.contract import Unsupported
from impls.support.h200 import H200
from impls.workloads.base import Case

if TYPE_CHECKING:
    import torch

Step = dict[str, Any]
#: The function's name in every library that the DSL exports here.
FUNCTION = "launch"
#: What is compiled for.
ARCH = H200.arch


def folder() -> Path:
    """Where compiled libraries and recordings lie: ``incumbents`` in RIDGEMARK_CACHE, or in the user's cache folder."""
    named = os.environ.get("RIDGEMARK_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgemark"
    return base.absolute() / "incumbents"


def library(name: str) -> Path:
    """The file of a compiled library."""
    return folder() / f"{name}.so"


def file(implementation: str, case: Case) -> Path:
    """The recordings of a case by an implementation. The name ends in a hash: ids may be longer than file names."""
    words = case.id.replace(":", "_").replace("+", "_")
    digest = hashlib.sha256(case.id.encode()).hexdigest()[:8]
    return folder() / implementation / f"{words[:80]}-{digest}.json"


@dataclass(frozen=True)
class Recording:
    """The launches of one case by one choice; see the module for the form of steps and buffers."""

    choice: dict[str, Any] | None
    kernels: list[dict[str, Any]]
    buffers: list[dict[str, Any]]
    before: list[Step]
    steps: list[Step]

    def scratch_bytes(self) -> int:
        """Bytes of the buffers that are neither input nor output."""
        return sum(buffer["bytes"] for buffer in self.buffers if buffer["name"] is None)


@dataclass(frozen=True)
class Recorded:
    """All recordings of one case by one implementation, as one file holds them.

    Attributes:
        versions: distributions that compiled it, by name.
        sms: multiprocessors of the device that the host code was told of: grids and splits follow from it.
        compile_s: seconds that compiling took, by library (a library serves many cases).
        recordings: one per choice.
    """

    versions: dict[str, str]
    sms: int
    compile_s: dict[str, float]
    recordings: list[Recording]

    @classmethod
    def read(cls, file: Path) -> Recorded:
        """The file's contents.

        Raises:
            OSError: there is no such file.
        """
        fields = json.loads(file.read_text())
        return cls(**{**fields, "recordings": [Recording(**r) for r in fields["recordings"]]})

    def write(self, file: Path) -> None:
        """Replace the file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        fields = {**vars(self), "recordings": [vars(r) for r in self.recordings]}
        new.write_text(json.dumps(fields, separators=(",", ":")) + "\n")
        new.replace(file)


def recorded(implementation: str, case: Case) -> Recorded:
    """What was recorded of the case by an implementation.

    Raises:
        Unsupported: nothing was.
    """
    try:
        return Recorded.read(file(implementation, case))
    except FileNotFoundError:
        raise Unsupported(
            "Its kernels were not compiled beforehand for this case: python -m impls.incumbents.kernels.record "
            f"{case.id} where CUTLASS' CuTe DSL is installed; then bring {folder()} here."
        ) from None


def scratch_bytes(implementation: str, case: Case) -> int:
    """The most scratch of any recording of the case; none where it was not recorded."""
    try:
        found = recorded(implementation, case)
    except Unsupported:
        return 0
    return max(one.scratch_bytes() for one in found.recordings)


@cache
def _function(library: Path) -> Callable[..., Any]:
    import tvm_ffi

    # torch has loaded the CUDA runtime that the library links against, and tvm_ffi its own.
    function: Callable[..., Any] = tvm_ffi.load_module(str(library)).get_function(FUNCTION)
    return function


def bind(
    recording: Recording, named: Mapping[str, torch.Tensor]
) -> tuple[list[Callable[[], Any]], list[Callable[[], Any]]]:
    """The launches over these tensors, scratch allocated: ``before`` and ``steps``.

    Args:
        recording: the recording.
        named: inputs and outputs on the device, contiguous, by the names of the recording's buffers.

    Raises:
        ValueError: a tensor does not have the size that was recorded.
    """
    import torch

    flat: list[torch.Tensor] = []
    for buffer in recording.buffers:
        if buffer["name"] is None:
            flat.append(torch.empty(buffer["bytes"], dtype=torch.uint8, device="cuda"))
            continue
        tensor = named[buffer["name"]].detach()
        if tensor.numel() * tensor.element_size() != buffer["bytes"] or not tensor.is_contiguous():
            raise ValueError(
                f"{buffer['name']} is not the tensor that was recorded: {buffer['bytes']} bytes, contiguous."
            )
        flat.append(tensor.view(-1).view(torch.uint8))
    functions = [_function(library(kernel["library"])) for kernel in recording.kernels]

    def value(argument: Any) -> Any:
        from impls.support.torch_arrays import torch_dtype

        if isinstance(argument, list):
            return tuple(value(a) for a in argument)
        if isinstance(argument, dict):
            typed = flat[argument["buffer"]].view(torch_dtype(argument["dtype"]))
            return typed.as_strided(argument["shape"], argument["strides"], argument["offset"])
        return argument

    def bound(step: Step) -> Callable[[], Any]:
        if "zero" in step:
            zero: Callable[[], Any] = value(step["zero"]).zero_
            return zero
        function, arguments = functions[step["launch"]], tuple(value(a) for a in step["arguments"])
        return lambda: function(*arguments)

    return [bound(step) for step in recording.before], [bound(step) for step in recording.steps]
