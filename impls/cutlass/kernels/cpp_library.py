"""The C interface of a kernel's library, by ctypes.

Owns ``Call`` as Python lays it out, and the life of a prepared call. The CUDA runtime that the libraries link against
must have been loaded: importing torch does.
"""

from __future__ import annotations

import ctypes
import json
from functools import cache
from pathlib import Path
from typing import Any


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
def opened(path: Path) -> Library:
    """The library in this file, loaded once."""
    return Library(path)
