"""The honest implementation, and the base of the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program
from impls.workloads.base import Case


@dataclass
class Loaded:
    """One input set with its preallocated output."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray


class HonestProgram(Program):
    """C = A B into a preallocated output. Subclasses override what they do wrong."""

    def load(self, inputs: Mapping[str, np.ndarray]) -> Loaded:
        a, b = inputs["A"], inputs["B"]
        return Loaded(a, b, np.empty((a.shape[0], b.shape[1]), np.float32))

    def refill(self, loaded: Loaded, inputs: Mapping[str, np.ndarray]) -> Loaded:
        return loaded

    def run(self, loaded: Loaded) -> Loaded:
        np.matmul(loaded.a, loaded.b, out=loaded.c)
        return loaded

    def read_outputs(self, result: Loaded) -> dict[str, np.ndarray]:
        return {"C": result.c}

    def read_inputs(self, loaded: Loaded) -> dict[str, np.ndarray]:
        return {"A": loaded.a, "B": loaded.b}

    def poison(self, loaded: Loaded) -> None:
        loaded.c.fill(np.nan)


class Adversary(Implementation):
    """Plain f32 GEMM on a CPU, run by ``program``."""

    workload = "gemm"
    devices = ("cpu",)
    program: ClassVar[type[Program]]

    def refuses(self, case: Case, device: Device) -> str | None:
        if not re.fullmatch(r"gemm:\d+x\d+x\d+:f32", case.id):
            return "The adversaries know plain f32 GEMM only."
        return None

    def prepare(self, case: Case, device: Device) -> Program:
        return self.program()


class Honest(Adversary):
    name = "cheats.honest"
    summary = "does what it should"
    program = HonestProgram
