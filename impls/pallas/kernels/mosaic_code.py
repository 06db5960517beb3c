"""What a Mosaic GPU kernel became: PTX, and the cubin that is loaded, as they pass by while it is compiled.

Mosaic's compiler writes PTX to a folder and hands the finished cubin to ``nvdisasm`` in the CUDA toolkit that it was
told of. Here that toolkit is the real one, but for an ``nvdisasm`` that keeps the cubin.

Owns the asking for these files. What counts in them is ``impls.support.machine_code``'s.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from impls.support import machine_code

# jaxlib/mosaic/gpu/dump.cc; where the toolkit is comes from jax/experimental/mosaic/gpu/core.py.
_FOLDER, _TOOLKIT = "MOSAIC_GPU_DUMP_TO", "MOSAIC_GPU_CUDA_ROOT"
_WANTED = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS")
# Called as `nvdisasm -ndf -c FILE [-hex]`; FILE has a folder of its own in /tmp, which nothing else takes away.
_KEEP = '#!/bin/sh\nmv "$3" "${3%/*}.cubin" && rmdir "${3%/*}" && mv "${3%/*}.cubin" "$MOSAIC_GPU_DUMP_TO"\n'
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass
class Dumped:
    """Facts for a record's ``config["code"]``, and texts to keep."""

    facts: dict[str, Any] = field(default_factory=dict)
    artefacts: dict[str, str | bytes] = field(default_factory=dict)


@contextmanager
def dumped() -> Iterator[Dumped]:
    """What is compiled inside the ``with`` block, known when it ends; a sentence under ``unread`` where nothing is."""
    result = Dumped()
    toolkit = Path(os.environ.get(_TOOLKIT) or "/usr/local/cuda")
    with tempfile.TemporaryDirectory(prefix="ridgemark-mosaic-") as name:
        folder, stand_in = Path(name) / "dump", Path(name) / "toolkit"
        folder.mkdir()
        _stand_in(toolkit, stand_in)
        before = os.environ.get(_TOOLKIT)
        os.environ |= {_FOLDER: str(folder), _TOOLKIT: str(stand_in)} | dict.fromkeys(_WANTED, "1")
        try:
            yield result
        finally:
            for variable in (_FOLDER, _TOOLKIT, *_WANTED):
                os.environ.pop(variable, None)
            if before is not None:
                os.environ[_TOOLKIT] = before
        _read(folder, result)


def _stand_in(toolkit: Path, folder: Path) -> None:
    """A toolkit in ``folder`` that is ``toolkit``, but for its nvdisasm."""
    tools = folder / "bin"
    tools.mkdir(parents=True)
    for here, there in ((folder, toolkit), (tools, toolkit / "bin")):
        for one in there.iterdir() if there.is_dir() else ():
            if one.name not in ("bin", "nvdisasm"):
                (here / one.name).symlink_to(one)
    disassembler = tools / "nvdisasm"
    disassembler.write_text(_KEEP)
    disassembler.chmod(0o700)


def _read(folder: Path, result: Dumped) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    ptx = "\n".join(path.read_text(errors="replace") for path in files if path.suffix == ".ptx") or None
    reports = "\n".join(path.read_text(errors="replace") for path in files if "ptxas" in path.name)
    cubins = [path.read_bytes() for path in files if path.suffix == ".cubin"]
    if not cubins:
        result.facts["unread"] = "The compiler handed on no cubin."
        if ptx is not None:
            result.facts["ptx"] = machine_code.of_ptx(ptx)
            result.artefacts["mosaic.ptx"] = ptx
    for number, cubin in enumerate(cubins):
        code = machine_code.inspect(cubin, ptx=ptx if number == 0 else None)
        kernels = {**result.facts.get("kernels", {}), **code.facts.get("kernels", {})}
        result.facts |= code.facts
        if kernels:
            result.facts["kernels"] = kernels
        result.artefacts |= code.artefacts("mosaic" if number == 0 else f"mosaic-{number}")
    if spills := _SPILLS.findall(reports):
        result.facts["spill_bytes"] = max(int(stores) + int(loads) for stores, loads in spills)
