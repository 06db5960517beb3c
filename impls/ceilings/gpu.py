"""Ceilings of an NVIDIA GPU: tensor-core and FMA rates, exponentials, read and copy bandwidth, the least launch.

Owns which probes run on which GPU. The kernels are in ``cuda``: CUDA C++ compiled at run time by NVRTC, so that a node
needs no compiler of its own.
"""

from __future__ import annotations

from typing import ClassVar

from impls.contract import Device, Implementation, Program
from impls.workloads.base import Case
from impls.workloads.ceiling import Ceiling

RATES = ("f32", "tf32", "f16", "bf16", "f8e4m3", "i8")


class Gpu(Implementation):
    """Every probe; each has one kernel."""

    name: ClassVar[str] = "ceilings.gpu"
    workload: ClassVar[str] = "ceiling"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "wgmma, FFMA and ex2 from registers and shared memory; streams over memory; a bare launch"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other architectures than sm_90, whose tensor cores take other instructions; dtypes without a kernel."""
        assert isinstance(case, Ceiling)
        if device.arch != "sm_90":
            return f"The tensor-core probe is written for sm_90; {device.name} is {device.arch}."
        if case.probe == "rate" and case.dtype not in RATES:
            return f"No kernel measures the rate of {case.dtype} on a GPU; there are {', '.join(RATES)}."
        if case.probe == "exp" and case.dtype != "f32":
            return f"A softmax takes {case.dtype} exponentials in f32 here: ask for ceiling:exp:f32."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        """Compile."""
        from impls.ceilings.cuda.programs import program

        return program(case)
