"""Arithmetic ceilings of a CPU: the multiply-add rate of every dtype.

Owns which probes run here and which not, and why. The instructions are chosen in ``kernels.instructions``.
"""

from __future__ import annotations

from typing import ClassVar

from impls.ceilings.host import refusal
from impls.contract import Device, Implementation, Program
from impls.workloads.base import Case
from impls.workloads.ceiling import Ceiling


class Rate(Implementation):
    """``ceiling:rate``."""

    name: ClassVar[str] = "ceilings.rate"
    workload: ClassVar[str] = "ceiling"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "multiply-adds from registers on every core, by the best instruction for the dtype"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other probes, and TF32."""
        assert isinstance(case, Ceiling)
        if case.probe != "rate":
            return f"{self.name} runs ceiling:rate, not ceiling:{case.probe}."
        if case.dtype == "tf32":
            return "TF32 is a format of GPU tensor cores; CPUs multiply in f32: ask for ceiling:rate:f32."
        return refusal(device)

    def prepare(self, case: Case, device: Device) -> Program:
        """Compile for the host; measure the clock under this load."""
        from impls.ceilings.kernels.programs import RateProgram

        assert isinstance(case, Ceiling)
        program = RateProgram(case, device.threads)
        program.run(program.load(case.inputs(0)))
        program.read_clock()
        return program
