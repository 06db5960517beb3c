"""The probes as programs: buffers and launch shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from impls.ceilings.cuda import driver, sources
from impls.ceilings.cuda.layout import layout, unlayout
from impls.contract import Program
from impls.workloads.base import Case
from impls.workloads.ceiling import SHIFTS, TILE, VECTOR, Ceiling
from impls.workloads.dtypes import dtype


@dataclass
class _Loaded:
    """One input set: device buffers by name, and the launch over them."""

    buffers: dict[str, driver.Buffer]
    call: Callable[[], None]


class Probe(Program):
    """What all probes have in common: inputs in buffers, one kernel, one output."""

    def __init__(self, case: Ceiling) -> None:
        super().__init__()
        driver.device()
        self.case = case
        self._sms = driver.multiprocessors()
        [(self._output, self._spec)] = case.output_specs().items()
        self._totals = driver.Buffer(8 * TILE * TILE)
        self._ticket = driver.Buffer(8)
        self._totals.fill(0)
        self._ticket.fill(0)

    def bind(self, buffers: Mapping[str, driver.Buffer]) -> Callable[[], None]:
        """The launch over these inputs and the output."""
        raise NotImplementedError

    def image(self, name: str, array: np.ndarray) -> np.ndarray:
        """An input as the kernel wants it."""
        return array

    def plain(self, name: str, image: np.ndarray) -> np.ndarray:
        """The input back from its image."""
        return image

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Buffers with the inputs' images, and one for the output."""
        buffers = {}
        for name, array in inputs.items():
            image = self.image(name, array)
            buffers[name] = driver.Buffer(image.nbytes)
            buffers[name].write(image)
        buffers[self._output] = driver.Buffer(self._spec.nbytes)
        return _Loaded(buffers, self.bind(buffers))

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """In place."""
        for name, array in inputs.items():
            loaded.buffers[name].write(self.image(name, array))
        return loaded

    def run(self, loaded: _Loaded) -> _Loaded:
        """One launch."""
        loaded.call()
        return loaded

    def poison(self, loaded: _Loaded) -> None:
        """NaN, or the least integer."""
        loaded.buffers[self._output].fill(-(2**31) if self._spec.dtype == "i32" else 0x7FC00000)

    def synchronize(self) -> None:
        """Wait for the device."""
        driver.synchronize()

    def read_outputs(self, result: _Loaded) -> dict[str, np.ndarray]:
        """The output on the host."""
        array = np.empty(self._spec.shape, dtype(self._spec.dtype).storage)
        return {self._output: result.buffers[self._output].read(array)}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The inputs, out of their images."""
        found = {}
        for name, spec in self.case.input_specs().items():
            buffer = loaded.buffers[name]
            raw = buffer.read(np.empty(buffer.nbytes, np.uint8))
            found[name] = self.plain(name, raw).view(dtype(spec.dtype).storage).reshape(spec.shape)
        return found


class Wgmma(Probe):
    """``ceiling:rate`` on the tensor cores."""

    def __init__(self, case: Ceiling) -> None:
        super().__init__(case)
        self._shape = sources.WGMMA[case.dtype]
        source = sources.wgmma(self._shape)
        self._kernel = driver.Kernel(source, "rate", "sm_90a", self._shape.shared_bytes)
        instruction = f"wgmma m64n{self._shape.columns}{self._shape.name}"
        self.config = {"instruction": instruction, "warpgroups": self._shape.warpgroups * self._sms}
        self.artefacts["rate.cu"] = source

    def image(self, name: str, array: np.ndarray) -> np.ndarray:
        """K last, swizzled; B's columns as often as the instruction takes them."""
        operand, rows = (array, 64) if name == "A" else (array.T, self._shape.columns)
        return layout(operand, rows, self._shape.copies)

    def plain(self, name: str, image: np.ndarray) -> np.ndarray:
        """Undo ``image``."""
        storage = dtype(self.case.dtype).storage
        operand = unlayout(image, storage.itemsize).view(storage)
        return np.ascontiguousarray(operand if name == "A" else operand.T)

    def bind(self, buffers: Mapping[str, driver.Buffer]) -> Callable[[], None]:
        """One block for every multiprocessor."""
        iterations = self.case.repeats // self._shape.repeats
        arguments = [buffers["A"], buffers["B"], self._totals, self._ticket, buffers["C"]]
        call: Callable[[], None] = self._kernel.bound(
            self._sms, 128 * self._shape.warpgroups, [*(a.address for a in arguments), iterations]
        )
        return call


class Fma(Probe):
    """``ceiling:rate:f32`` on the FMA units."""

    def __init__(self, case: Ceiling) -> None:
        super().__init__(case)
        self._kernel = driver.Kernel(sources.FMA, "multiply_add", "sm_90a")
        self.config = {"instruction": "FFMA", "threads": sources.FMA_THREADS * self._sms}

    def bind(self, buffers: Mapping[str, driver.Buffer]) -> Callable[[], None]:
        """One block for every multiprocessor."""
        arguments = [buffers["A"], buffers["B"], self._totals, self._ticket, buffers["C"]]
        call: Callable[[], None] = self._kernel.bound(
            self._sms, sources.FMA_THREADS, [*(a.address for a in arguments), self.case.repeats]
        )
        return call


class Exponentials(Probe):
    """``ceiling:exp:f32`` on the special-function units."""

    def __init__(self, case: Ceiling) -> None:
        super().__init__(case)
        self._kernel = driver.Kernel(sources.EXP, "exponentials", "sm_90a")
        # Every element is taken by equally many threads.
        self._grid = 8 * self._sms // 16 * (VECTOR // sources.EXP_THREADS)
        self.config = {"instruction": "ex2.approx.ftz.f32", "threads": sources.EXP_THREADS * self._grid}

    def bind(self, buffers: Mapping[str, driver.Buffer]) -> Callable[[], None]:
        """Eight blocks for every multiprocessor."""
        arguments = [buffers["X"], self._totals, self._ticket, buffers["Y"]]
        call: Callable[[], None] = self._kernel.bound(
            self._grid, sources.EXP_THREADS, [*(a.address for a in arguments), self.case.repeats // SHIFTS]
        )
        return call


class Stream(Probe):
    """``ceiling:read``, ``ceiling:copy`` and ``ceiling:launch``."""

    def __init__(self, case: Ceiling) -> None:
        super().__init__(case)
        self._kernel = driver.Kernel(sources.STREAM, case.probe, "sm_90a")
        self._words = case.bytes // 16
        each = 8 if case.probe == "read" else 4
        threads = sources.STREAM_THREADS
        self._grid = max(1, min(8 * self._sms, -(-self._words // (threads * each))))
        self.config = {"blocks": self._grid, "bytes_in_flight": self._grid * threads * each * 16}

    def bind(self, buffers: Mapping[str, driver.Buffer]) -> Callable[[], None]:
        """As many blocks as the buffer needs, eight for every multiprocessor at the most."""
        x, y = buffers["X"].address, buffers["Y"].address
        call: Callable[[], None]
        if self.case.probe == "launch":
            call = self._kernel.bound(1, 1, [x, y])
        elif self.case.probe == "read":
            arguments = [x, self._totals.address, self._ticket.address, y, self._words, self.case.repeats]
            call = self._kernel.bound(self._grid, sources.STREAM_THREADS, arguments)
        else:
            call = self._kernel.bound(self._grid, sources.STREAM_THREADS, [x, y, self._words, self.case.repeats])
        return call


def program(case: Case) -> Probe:
    """The program of a probe."""
    assert isinstance(case, Ceiling)
    if case.probe == "rate":
        return Wgmma(case) if case.dtype in sources.WGMMA else Fma(case)
    return Exponentials(case) if case.probe == "exp" else Stream(case)
