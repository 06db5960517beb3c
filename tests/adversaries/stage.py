"""What tests of workers need around an adversary: a device, an interpreter, one small case and its buffers."""

from __future__ import annotations

import itertools
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.buffers import Arena
from benchmarks.engine.pool import Worker, WorkerSpec
from impls.contract import Device

ROOT = Path(__file__).parents[2]
STACKS = "tests.adversaries"
SPEC = WorkerSpec("cheats", Path(sys.executable))
M, N, K = 96, 64, 80
CASE = f"gemm:{M}x{N}x{K}:f32"
THREADS = min(2, len(os.sched_getaffinity(0)))
DEVICE = Device("cpu", "test", platform.machine(), THREADS, 4 * 2**30, frozenset({"avx2"}))


class Act:
    """One adversary in one worker, with two input sets that the harness keeps."""

    _number = itertools.count()

    def __init__(self, worker: Worker, arena: Arena, adversary: str) -> None:
        self.worker, self.arena, self.adversary = worker, arena, f"cheats.{adversary}"
        self.program = f"{adversary} {next(Act._number)}"
        self.given = {which: inputs(which) for which in (0, 1)}

    def prepare(self, deadline_s: float = 30) -> dict[str, Any]:
        return self.worker.call("prepare", deadline_s, program=self.program, impl=self.adversary, case=CASE)

    def load(self, which: int = 0) -> dict[str, Any]:
        return self.worker.call("load", 30, program=self.program, set=which, inputs=self._put(self.given[which]))

    def refill(self, which: int, seed: int) -> dict[str, Any]:
        self.given[which] = inputs(seed)
        return self.worker.call("refill", 30, program=self.program, set=which, inputs=self._put(self.given[which]))

    def begin(self) -> Act:
        self.prepare()
        self.load(0)
        self.load(1)
        return self

    def block(self, sets: list[int], deadline_s: float = 30) -> tuple[dict[str, Any], list[np.ndarray]]:
        """A block that keeps every call; with what it returned, the outputs."""
        slots = [self.arena.array((M, N), "f32") for _ in sets]
        for array, _ in slots:
            array.fill(-1)
        keep = {str(index): {"C": descriptor} for index, (_, descriptor) in enumerate(slots)}
        try:
            answer = self.worker.call("block", deadline_s, program=self.program, sets=sets, keep=keep, poison=True)
        finally:
            for _, descriptor in slots:
                self.arena.free(descriptor)
        return answer, [array for array, _ in slots]

    def changed(self, which: int) -> dict[str, int]:
        given = self._put(self.given[which])
        changed: dict[str, int] = self.worker.call("changed", 30, program=self.program, set=which, inputs=given)[
            "bytes"
        ]
        return changed

    def right(self, which: int, output: np.ndarray) -> np.ndarray:
        """Which elements of an output are right: 80 products in f32 err by less than 1e-3 here, f16 inputs by more."""
        a, b = (self.given[which][name].astype(np.float64) for name in "AB")
        return np.abs(output - a @ b) < 1e-4

    def _put(self, arrays: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
        return {name: self.arena.put(array, "f32") for name, array in arrays.items()}


def inputs(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "A": draw.standard_normal((M, K), dtype=np.float32),
        "B": draw.standard_normal((K, N), dtype=np.float32),
    }
