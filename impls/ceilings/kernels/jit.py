"""Host compilation: LLVM IR as text -> machine code in this process, and the same code as assembly to look at.

Owns the compiler's settings. It does not own any IR: that is written by the modules beside it, which need no
library. No optimisation pass is run: loops and registers are laid out by hand, and the back end only selects
instructions, allocates registers and schedules, so that what is measured is what was written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # for inline assembly


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of the host's instruction-set features, e.g. ``avx512bf16``, ``amx-int8``, ``dotprod``."""
    _initialize()
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


class Native:
    """One module of IR, compiled for the host.

    Attributes:
        assembly: the module's machine code as assembly text.
    """

    def __init__(self, ir: str) -> None:
        _initialize()
        module = llvm.parse_assembly(ir)
        module.verify()
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
        )
        self.assembly: str = target.emit_assembly(module)
        self._engine = llvm.create_mcjit_compiler(module, target)  # owns the code: as long as this object lives
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Address of the function called ``name``."""
        return int(self._engine.get_function_address(name))

    def function(self, name: str, *arguments: Any) -> Callable[..., None]:
        """The void function called ``name``, with C argument types; a call through it releases the GIL."""
        return ctypes.CFUNCTYPE(None, *arguments)(self.address(name))
