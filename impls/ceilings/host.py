"""Which hosts the CPU probes run on."""

from __future__ import annotations

import sys

from impls.contract import Device

ARCHITECTURES = ("x86_64", "aarch64")


def refusal(device: Device) -> str | None:
    """Why no CPU probe runs here, in one sentence; None where they do."""
    if not sys.platform.startswith("linux"):
        return "The CPU's ceilings are measured on Linux only, where threads can be pinned and woken by a futex."
    if device.arch not in ARCHITECTURES:
        return f"No instructions of {device.arch} are known to the ceilings; they know {' and '.join(ARCHITECTURES)}."
    return None
