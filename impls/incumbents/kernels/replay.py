"""The program of a recorded case: inputs on the device, the library's launches over them. Imports torch.

Owns loading, calling and reading; what is launched is the recording's.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from impls.contract import Unsupported
from impls.incumbents.kernels import recording
from impls.incumbents.kernels.recording import Recorded, Recording
from impls.support import machine_code, torch_arrays
from impls.support.torch_program import TorchProgram
from impls.workloads.base import Case


@dataclass
class _Loaded:
    """One input set on the device.

    Attributes:
        inputs: by name.
        outputs: by name; what the forward pass left for a backward case is scratch.
        extra: what the library takes beside the case's inputs.
        before: launches that follow a change of the inputs.
        launches: those of one call.
    """

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    extra: dict[str, torch.Tensor]
    before: list[Callable[[], Any]]
    launches: list[Callable[[], Any]]


class Replayed(TorchProgram):
    """One case by one recording.

    Args:
        case: the case.
        found: the file that the recording is of.
        one: the recording.
        config: for the record, beside the recording's own.
        describe: read the machine code for the record.

    Raises:
        Unsupported: it was recorded for a device with another number of multiprocessors.
    """

    def __init__(
        self, case: Case, found: Recorded, one: Recording, config: dict[str, Any], describe: bool = True
    ) -> None:
        super().__init__()
        here = torch.cuda.get_device_properties(0).multi_processor_count
        if here != found.sms:
            raise Unsupported(f"Its launches were recorded for {found.sms} multiprocessors; this device has {here}.")
        self._case, self._recording = case, one
        used = [kernel["library"] for kernel in one.kernels]
        self.config = {
            **config,
            "configuration": one.choice,
            "kernels": one.kernels,
            "scratch_bytes": one.scratch_bytes(),
            "compiled_by": found.versions,
            "compiled_beforehand_s": round(sum(found.compile_s[library] for library in used), 2),
        }
        codes = []
        for kernel in one.kernels if describe else ():
            code = machine_code.inspect(_cubin(recording.library(kernel["library"]).read_bytes()))
            codes.append(code.facts)
            self.artefacts |= code.artefacts(f"{kernel['class']}-{kernel['library']}")
        if codes:
            self.config["code"] = codes[0] if len(codes) == 1 else {"launches": codes}

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies on the device, new outputs, scratch; for the backward pass alone, the forward pass's residuals."""
        tensors = {name: torch_arrays.to_torch(array).cuda() for name, array in inputs.items()}
        outputs = {
            name: torch.empty(spec.shape, dtype=torch_arrays.torch_dtype(spec.dtype), device="cuda")
            for name, spec in self._case.output_specs().items()
        }
        extra = {"ends": _ends(inputs["group_sizes"])} if "group_sizes" in inputs else {}
        before, launches = recording.bind(self._recording, tensors | outputs | extra)
        for launch in before:
            launch()
        return _Loaded(tensors, outputs, extra, before, launches)

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """In place; what the forward pass left behind is made anew."""
        super().refill(loaded, inputs)
        if loaded.extra:
            loaded.extra["ends"].copy_(_ends(inputs["group_sizes"]))
        for launch in loaded.before:
            launch()
        return loaded

    def run(self, loaded: _Loaded) -> dict[str, torch.Tensor]:
        """The recorded launches."""
        for launch in loaded.launches:
            launch()
        return loaded.outputs


def _ends(sizes: np.ndarray) -> torch.Tensor:
    """First rows of the groups, and the number of rows."""
    return torch.tensor([0, *accumulate(sizes.tolist())], dtype=torch.int32, device="cuda")


def _cubin(library: bytes) -> bytes:
    """The machine code for the GPU in a library of the DSL: the ELF image for CUDA (machine 190) among its data."""
    for start in (found.start() for found in re.finditer(rb"\x7fELF", library)):
        machine, sections, count = (
            struct.unpack_from(form, library, start + at)[0] for form, at in (("<H", 18), ("<Q", 40), ("<H", 60))
        )
        programs, segments = (struct.unpack_from(form, library, start + at)[0] for form, at in (("<Q", 32), ("<H", 56)))
        if machine == 190:
            # It ends with its last table: 64 bytes a section's entry, 56 a segment's (ELF-64 object file format).
            return library[start : start + max(sections + 64 * count, programs + 56 * segments)]
    return b""
