"""The least call on a CPU: from Python into native code and back."""

from __future__ import annotations

from typing import ClassVar

from impls.ceilings.host import refusal
from impls.contract import Device, Implementation, Program
from impls.workloads.base import Case
from impls.workloads.ceiling import Ceiling


class Launch(Implementation):
    """``ceiling:launch``."""

    name: ClassVar[str] = "ceilings.launch"
    workload: ClassVar[str] = "ceiling"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "one foreign call that copies an integer, on the calling thread"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other probes."""
        assert isinstance(case, Ceiling)
        if case.probe != "launch":
            return f"{self.name} runs ceiling:launch, not ceiling:{case.probe}."
        return refusal(device)

    def prepare(self, case: Case, device: Device) -> Program:
        """Compile for the host."""
        from impls.ceilings.kernels.programs import LaunchProgram

        return LaunchProgram()
