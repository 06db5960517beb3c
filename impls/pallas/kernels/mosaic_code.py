"""What a Mosaic GPU kernel became: PTX and SASS, as the compiler writes them to files while it compiles.

Owns the asking for these files and their reading. What counts in them is ``impls.support.machine_code``'s.
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

# jaxlib/mosaic/gpu/dump.cc
_FOLDER = "MOSAIC_GPU_DUMP_TO"
_WANTED = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS")
# nvdisasm's heading of a function, in place of cuobjdump's.
_HEADING = re.compile(r"^\s*\.text\.([\w$]+):\s*$", re.MULTILINE)
_REGISTERS = re.compile(r"Used (\d+) registers")
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
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {_FOLDER: folder} | dict.fromkeys(_WANTED, "1")
        try:
            yield result
        finally:
            for name in (_FOLDER, *_WANTED):
                os.environ.pop(name, None)
        _read(Path(folder), result)


def _read(folder: Path, result: Dumped) -> None:
    texts = {path.name: path.read_text(errors="replace") for path in sorted(folder.rglob("*")) if path.is_file()}
    ptx = [text for name, text in texts.items() if name.endswith(".ptx")]
    sass = [text for name, text in texts.items() if name.endswith(".sass")]
    reports = "\n".join(text for name, text in texts.items() if "ptxas" in name)
    if not ptx and not sass:
        result.facts["unread"] = "The compiler wrote no PTX and no SASS."
        return
    if ptx:
        result.facts["ptx"] = machine_code.of_ptx("\n".join(ptx))
        result.artefacts["mosaic.ptx"] = "\n".join(ptx)
    if sass:
        listing = _HEADING.sub(r"\t\tFunction : \1", "\n".join(sass))
        result.facts["kernels"] = machine_code.of_sass(listing)
        result.artefacts["mosaic.sass"] = listing
    registers, spills = _REGISTERS.findall(reports), _SPILLS.findall(reports)
    if registers:
        result.facts["registers"] = max(map(int, registers))
    if spills:
        result.facts["spill_bytes"] = max(int(stores) + int(loads) for stores, loads in spills)
