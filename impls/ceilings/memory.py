"""Bandwidth ceilings of a CPU's memory levels, with stores through the caches and past them.

Owns which probes run here. One level's best is the better of the two kinds of store: past the caches in main memory,
as a line is then not read before it is overwritten; through them in a cache.
"""

from __future__ import annotations

from typing import ClassVar

from impls.ceilings.host import refusal
from impls.contract import Device, Implementation, Program
from impls.workloads.base import Case
from impls.workloads.ceiling import Ceiling

# Copies from here on leave a core's own caches; of smaller ones, stores around the caches are never the better kind.
NONTEMPORAL_BYTES = 2**20


class _Memory(Implementation):
    """What both kinds of store have in common."""

    workload: ClassVar[str] = "ceiling"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    probes: ClassVar[tuple[str, ...]]
    nontemporal: ClassVar[bool]

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other probes."""
        assert isinstance(case, Ceiling)
        if case.probe not in self.probes:
            mine = " and ".join(f"ceiling:{probe}" for probe in self.probes)
            return f"{self.name} runs {mine}, not ceiling:{case.probe}."
        return refusal(device)

    def workspace_bytes(self, case: Case) -> int:
        """The buffer, copied to where its thread's core is nearest."""
        assert isinstance(case, Ceiling)
        return case.bytes

    def prepare(self, case: Case, device: Device) -> Program:
        """Compile for the host."""
        from impls.ceilings.kernels.programs import MemoryProgram

        assert isinstance(case, Ceiling)
        program = MemoryProgram(case, device.threads, nontemporal=self.nontemporal)
        program.read_clock()
        return program


class Memory(_Memory):
    """``ceiling:read`` and ``ceiling:copy`` through the caches."""

    name: ClassVar[str] = "ceilings.memory"
    summary: ClassVar[str] = "reads and copies of a buffer, every core its own slice"
    probes: ClassVar[tuple[str, ...]] = ("read", "copy")
    nontemporal: ClassVar[bool] = False


class MemoryNontemporal(_Memory):
    """``ceiling:copy`` with stores that go past the caches."""

    name: ClassVar[str] = "ceilings.memory_nontemporal"
    summary: ClassVar[str] = "copies of a buffer with non-temporal stores, every core its own slice"
    probes: ClassVar[tuple[str, ...]] = ("copy",)
    nontemporal: ClassVar[bool] = True

    def refuses(self, case: Case, device: Device) -> str | None:
        """What a cache holds, too: the stores go around the caches."""
        assert isinstance(case, Ceiling)
        if case.probe == "copy" and case.bytes < NONTEMPORAL_BYTES:
            return f"{self.name} is for copies beyond a core's own caches, from {NONTEMPORAL_BYTES >> 20} MiB on."
        return super().refuses(case, device)
