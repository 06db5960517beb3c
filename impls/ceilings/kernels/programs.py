"""The probes as programs: a kernel, a team of threads, and the inputs laid out for them.

Owns what lies between a case's arrays and the kernels' arguments. It does not own the kernels (modules beside it), nor
which cases are supported (the metadata in the package above).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from impls.ceilings.kernels import clock, exp, memory, rate
from impls.ceilings.kernels.instructions import MultiplyAdd, best_instruction
from impls.ceilings.kernels.jit import Native, host_features
from impls.ceilings.kernels.team import Team
from impls.contract import Program, Unsupported
from impls.workloads.ceiling import SHIFTS, TILE, VECTOR, Ceiling

_LEAST = np.iinfo(np.int32).min
_HUGE_PAGE = 2 << 20
_LINE = 64
_CLOCK_READINGS = 5
# arch_prctl(2): ask for the AMX tiles' state, without which their first use is a SIGILL.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def pages(size: int) -> np.ndarray:
    """``size`` zero bytes in pages of their own, huge ones where the system has them; no page exists until touched."""
    area = mmap.mmap(-1, size + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(area, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    return raw[start : start + size]


def locks(count: int) -> np.ndarray:
    """``count`` open spin locks, each on a cache line of its own; the rows' addresses are the locks'."""
    return np.zeros((count, _LINE // 4), np.int32)


class TeamProgram(Program):
    """A program whose kernel runs on a team; its configuration says which threads and at what clock.

    The clock is measured right after a run: the median of the threads' and readings', in GHz.
    """

    def __init__(self, ir: str, threads: int) -> None:
        super().__init__()
        self.native = Native(ir)
        self.team = Team(threads)
        self.artefacts["kernel.s"] = self.native.assembly
        self.config.update(threads=threads, cpus=self.team.cpus)

    def read_clock(self) -> None:
        """Put ``clock_ghz`` into the configuration."""
        chain = Native(clock.clock_ir(platform.machine()))
        readings = []
        for _ in range(_CLOCK_READINGS):
            rows = np.ones((len(self.team.cpus), clock.WORDS), np.int64)
            self.team.run(chain.address("clock"), rows)
            readings.append(clock.clock_ghz(rows))
        self.config["clock_ghz"] = round(float(np.median(readings)), 3)

    def release(self) -> None:
        """End the threads."""
        self.team.stop()


@dataclass
class _Rate:
    """One loaded set: operands as registers, C before and after, the shares of each thread."""

    inputs: Mapping[str, np.ndarray]
    operands: tuple[np.ndarray, np.ndarray]
    start: np.ndarray
    c: np.ndarray
    locks: np.ndarray
    shares: list[np.ndarray]
    arguments: np.ndarray


class RateProgram(TeamProgram):
    """``ceiling:rate``: every thread multiplies its share of the rounds, C is added up under locks."""

    def __init__(self, case: Ceiling, threads: int, instruction: MultiplyAdd | None = None) -> None:
        chosen = instruction or best_instruction(case.dtype, host_features())
        if chosen is None:
            raise Unsupported(f"No multiply-add instruction for {case.dtype} is known on this CPU.")
        if chosen.tiles:
            _allow_tiles()
        super().__init__(rate.rate_ir(chosen), threads)
        self.case, self.instruction = case, chosen
        self.config.update(instruction=chosen.mnemonic, operands=chosen.operand, features=sorted(chosen.features))
        if chosen.operand != case.dtype:
            self.flags.append(f"{case.dtype} is widened to {chosen.operand} when loaded: the CPU has no better")
        if "sve" in host_features():
            self.flags.append("SVE is not used: if its vectors are wider than 128 bits, this ceiling is too low")

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Rate:
        """Lay out the operands, and split the rounds over the threads."""
        down, across = rate.block_shape(self.instruction)
        rows, columns = TILE // down, TILE // across
        operands = rate.packed_a(inputs["A"], self.instruction), rate.packed_b(inputs["B"], self.instruction)
        start = rate.packed_c(rate.start_of_c(inputs["B"], self.instruction, self.case.repeats), self.instruction)
        c, guards = np.empty_like(start), locks(rows * columns)
        split = rate.shares(rows * columns, self.case.repeats // rate.ROUND, len(self.team.cpus))
        shares = [
            np.array(
                [
                    [
                        operands[0][block // columns].ctypes.data,
                        operands[1][block % columns].ctypes.data,
                        c[block // columns, block % columns].ctypes.data,
                        guards[block].ctypes.data,
                        rounds,
                    ]
                    for block, rounds in mine
                ],
                np.int64,
            ).reshape(-1, rate.SHARE_WORDS)
            for mine in split
        ]
        arguments = np.array([[mine.ctypes.data, len(mine)] for mine in shares], np.int64)
        return _Rate(inputs, operands, start, c, guards, shares, arguments)

    def refill(self, loaded: _Rate, inputs: Mapping[str, np.ndarray]) -> _Rate:
        """New operands, at the same place."""
        loaded.operands[0][...] = rate.packed_a(inputs["A"], self.instruction)
        loaded.operands[1][...] = rate.packed_b(inputs["B"], self.instruction)
        excess = rate.start_of_c(inputs["B"], self.instruction, self.case.repeats)
        loaded.start[...] = rate.packed_c(excess, self.instruction)
        loaded.inputs = inputs
        return loaded

    def run(self, loaded: _Rate) -> _Rate:
        """All repeats."""
        np.copyto(loaded.c, loaded.start)
        self.team.run(self.native.address("rate"), loaded.arguments)
        return loaded

    def read_outputs(self, result: _Rate) -> dict[str, np.ndarray]:
        """C modulo 2^31."""
        return {"C": rate.unpacked_c(result.c) & np.int32(0x7FFFFFFF)}

    def read_inputs(self, loaded: _Rate) -> dict[str, np.ndarray]:
        """A and B as they came: the kernel sees packed copies only."""
        return dict(loaded.inputs)

    def poison(self, loaded: _Rate) -> None:
        """The least integer everywhere."""
        loaded.c.fill(_LEAST)


def _allow_tiles() -> None:
    granted = ctypes.CDLL(None).syscall(
        ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XFEATURE_XTILEDATA)
    )
    if granted != 0:
        raise Unsupported("The kernel does not let this process use AMX tiles (arch_prctl ARCH_REQ_XCOMP_PERM).")


@dataclass
class _Exp:
    """One loaded set: X, the f64 sums, Y, the shares of each thread."""

    x: np.ndarray
    sums: np.ndarray
    y: np.ndarray
    locks: np.ndarray
    shares: list[np.ndarray]
    arguments: np.ndarray


class ExpProgram(TeamProgram):
    """``ceiling:exp:f32``: every thread takes its share of the periods of every group of elements."""

    def __init__(self, case: Ceiling, threads: int, method: exp.Exponential | None = None) -> None:
        chosen = method or exp.best_exponential(host_features())
        if chosen is None:
            raise Unsupported("This CPU has no fused multiply-add, which the exponential is made of.")
        super().__init__(exp.exp_ir(chosen), threads)
        self.case, self.method = case, chosen
        self.config.update(method=chosen.method, lanes=chosen.lanes, vectors=chosen.vectors)

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Exp:
        """Split the periods over the threads, no share longer than an f32 accumulator may be."""
        x, sums, y = inputs["X"], np.zeros(VECTOR), np.empty(VECTOR, np.float32)
        groups = VECTOR // self.method.group
        guards = locks(groups)
        shares = []
        for mine in rate.shares(groups, self.case.repeats // SHIFTS, len(self.team.cpus)):
            rows = [
                [
                    x[group * self.method.group :].ctypes.data,
                    sums[group * self.method.group :].ctypes.data,
                    guards[group].ctypes.data,
                    min(exp.MOST_PERIODS, periods - done),
                ]
                for group, periods in mine
                for done in range(0, periods, exp.MOST_PERIODS)
            ]
            shares.append(np.array(rows, np.int64).reshape(-1, exp.SHARE_WORDS))
        arguments = np.array([[mine.ctypes.data, len(mine)] for mine in shares], np.int64)
        return _Exp(x, sums, y, guards, shares, arguments)

    def refill(self, loaded: _Exp, inputs: Mapping[str, np.ndarray]) -> _Exp:
        """Nothing: X is the worker's own array, rewritten in place."""
        return loaded

    def run(self, loaded: _Exp) -> _Exp:
        """All repeats."""
        loaded.sums.fill(0)
        self.team.run(self.native.address("exp"), loaded.arguments)
        np.copyto(loaded.y, loaded.sums, casting="same_kind")
        return loaded

    def read_outputs(self, result: _Exp) -> dict[str, np.ndarray]:
        """Y."""
        return {"Y": result.y}

    def read_inputs(self, loaded: _Exp) -> dict[str, np.ndarray]:
        """X."""
        return {"X": loaded.x}

    def poison(self, loaded: _Exp) -> None:
        """NaN everywhere."""
        loaded.y.fill(np.nan)


@dataclass
class _Memory:
    """One loaded set: the buffer, where the result goes, and each thread's slice."""

    x: np.ndarray
    y: np.ndarray
    arguments: np.ndarray


class MemoryProgram(TeamProgram):
    """``ceiling:read`` and ``ceiling:copy``: every thread goes over its own slice, as often as is asked.

    The buffer is a copy of the input that each thread made of its own slice: so its pages lie in the memory nearest to
    that thread's core (Linux places a page where it is first touched), and are huge ones where the system has them.
    """

    def __init__(self, case: Ceiling, threads: int, *, nontemporal: bool) -> None:
        width = memory.vector_bytes(host_features())
        kernel = memory.read_ir(width) if case.probe == "read" else ""
        if case.probe == "copy":
            kernel = memory.copy_ir("copy", width, nontemporal=nontemporal)
        super().__init__(kernel, threads)
        self._place = Native(memory.copy_ir("place", width))
        self.case = case
        self.config.update(vector_bytes=width, nontemporal=nontemporal)

    def _arguments(self, source: np.ndarray, destination: int, step: int, repeats: int) -> np.ndarray:
        """Every thread's row; ``step`` is how far the destination moves with the source: 1, or 0 for a sum."""
        threads = len(self.team.cpus)
        bounds = [self.case.bytes // memory.BLOCK * t // threads * memory.BLOCK for t in range(threads + 1)]
        return np.array(
            [
                [source.ctypes.data + low, destination + step * low, high - low, repeats]
                for low, high in pairwise(bounds)
            ],
            np.int64,
        )

    def _copied(self, source: np.ndarray, destination: np.ndarray) -> None:
        self.team.run(self._place.address("place"), self._arguments(source, destination.ctypes.data, 1, 1))

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Memory:
        """Place the buffers, slice by slice."""
        x = pages(self.case.bytes).view(np.int32)
        self._copied(inputs["X"], x)
        if self.case.probe == "read":
            y = np.zeros(1, np.int32)
            return _Memory(x, y, self._arguments(x, y.ctypes.data, 0, self.case.repeats))
        y = pages(self.case.bytes).view(np.int32)
        self._copied(x, y)
        y.fill(_LEAST)
        return _Memory(x, y, self._arguments(x, y.ctypes.data, 1, self.case.repeats))

    def refill(self, loaded: _Memory, inputs: Mapping[str, np.ndarray]) -> _Memory:
        """New contents, in the same place."""
        self._copied(inputs["X"], loaded.x)
        return loaded

    def run(self, loaded: _Memory) -> _Memory:
        """All repeats."""
        if self.case.probe == "read":
            loaded.y[0] = 0
        self.team.run(self.native.address(self.case.probe), loaded.arguments)
        return loaded

    def read_outputs(self, result: _Memory) -> dict[str, np.ndarray]:
        """The sum modulo 2^31, or the copy."""
        return {"Y": result.y & np.int32(0x7FFFFFFF) if self.case.probe == "read" else result.y}

    def read_inputs(self, loaded: _Memory) -> dict[str, np.ndarray]:
        """The buffer."""
        return {"X": loaded.x}

    def poison(self, loaded: _Memory) -> None:
        """The least integer everywhere."""
        loaded.y.fill(_LEAST)


_LAUNCH_IR = """
define void @launch(ptr %y, ptr %x) {
  %value = load i32, ptr %x
  store i32 %value, ptr %y
  ret void
}
"""


class LaunchProgram(Program):
    """``ceiling:launch``: one foreign call from Python into native code, on the calling thread."""

    def __init__(self) -> None:
        super().__init__()
        self._native = Native(_LAUNCH_IR)
        self._launch = self._native.function("launch", ctypes.c_void_p, ctypes.c_void_p)

    def load(self, inputs: Mapping[str, np.ndarray]) -> Any:
        """Both arrays and their addresses."""
        x, y = inputs["X"], np.zeros(1, np.int32)
        return x, y, (y.ctypes.data, x.ctypes.data)

    def refill(self, loaded: Any, inputs: Mapping[str, np.ndarray]) -> Any:
        """Nothing: X is the worker's own array, rewritten in place."""
        return loaded

    def run(self, loaded: Any) -> Any:
        """The call."""
        self._launch(*loaded[2])
        return loaded

    def read_outputs(self, result: Any) -> dict[str, np.ndarray]:
        """Y."""
        return {"Y": result[1]}

    def read_inputs(self, loaded: Any) -> dict[str, np.ndarray]:
        """X."""
        return {"X": loaded[0]}

    def poison(self, loaded: Any) -> None:
        """The least integer."""
        loaded[1].fill(_LEAST)
