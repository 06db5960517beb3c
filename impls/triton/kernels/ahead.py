"""Compilation for a GPU that is not there, or not yet to be touched: by the tests, and by tuning in many processes.

Owns a stand-in for Triton's driver that names the target and nothing else. What is compiled lands in Triton's cache,
where a later launch with the same arguments finds it.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class _Driver:
    """A device of the given target, without memory or streams."""

    def __init__(self, arch: str) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        """The target."""
        return TARGETS[self._arch]

    def get_current_device(self) -> int:
        """A number of its own for every target: kernels keep what they compiled by device."""
        return 1000 + list(TARGETS).index(self._arch)

    def get_current_stream(self, device: int) -> int:
        """Any: nothing is launched."""
        return 0


def use(arch: str) -> None:
    """Compile for ``arch``, a name of ``TARGETS``, from here on in this process.

    Raises:
        RuntimeError: Triton was imported to interpret.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("Triton interprets in this process: start one without TRITON_INTERPRET.")
    driver: Any = _Driver(arch)
    triton.runtime.driver.set_active(driver)
