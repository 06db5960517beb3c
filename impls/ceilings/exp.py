"""The exponential ceiling of a CPU.

Owns which probes run here and which not, and why. How exponentials are taken is in ``kernels.exp``.
"""

from __future__ import annotations

from typing import ClassVar

from impls.ceilings.host import refusal
from impls.contract import Device, Implementation, Program
from impls.workloads.base import Case
from impls.workloads.ceiling import Ceiling


class Exp(Implementation):
    """``ceiling:exp``."""

    name: ClassVar[str] = "ceilings.exp"
    workload: ClassVar[str] = "ceiling"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "vectorised f32 exponentials from registers on every core"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other probes, and narrower dtypes."""
        assert isinstance(case, Ceiling)
        if case.probe != "exp":
            return f"{self.name} runs ceiling:exp, not ceiling:{case.probe}."
        if case.dtype != "f32":
            return f"A CPU's softmax takes {case.dtype} exponentials in f32: ask for ceiling:exp:f32."
        return refusal(device)

    def prepare(self, case: Case, device: Device) -> Program:
        """Compile for the host; measure the clock under this load."""
        from impls.ceilings.kernels.programs import ExpProgram

        assert isinstance(case, Ceiling)
        program = ExpProgram(case, device.threads)
        program.run(program.load(case.inputs(0)))
        program.read_clock()
        return program
