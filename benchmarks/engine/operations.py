"""What a worker does: builds cases, holds their inputs, runs blocks of calls.

Owns the operations (docs/architecture.md, "A case in a worker") and the life of a program. It does not own the pipes
(worker), time (timing/), deadlines or memory limits (pool). Standard library, NumPy and ``impls`` only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.engine import buffers, protocol
from impls import registry
from impls.contract import Device, Program, Unsupported
from impls.workloads.base import parse_case

#: Which module takes the times on which kind of device: its ``block`` has the signature of ``timing.cpu.block``.
TIMING = {"cpu": "benchmarks.engine.timing.cpu", "cuda": "benchmarks.engine.timing.cupti"}

#: What a GPU's timing needs beside the clock, device memory in use among it.
GPU = "benchmarks.engine.timing.gpu"


class BadRequest(Exception):
    """A request that does not fit what is there; the message is one sentence."""


class Residency:
    """Growth of the process's resident memory while one program loads inputs and is called.

    What ``prepare`` takes is left out: the first program of a process would be charged with its library's code.

    Attributes:
        peak_bytes: the largest growth so far; None where the kernel does not tell.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = 0
        self._held = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Around an operation of the program."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark: proc_pid_clear_refs(5)
            before = _status_bytes("VmRSS")
        except (OSError, LookupError):
            self.peak_bytes = None
        yield
        if self.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes, self._held + _status_bytes("VmHWM") - before)
            self._held += _status_bytes("VmRSS") - before

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Around what happens within such an operation and is not the program's."""
        before = _status_bytes("VmRSS") if self.peak_bytes is not None else 0
        yield
        if self.peak_bytes is not None:
            self._held -= _status_bytes("VmRSS") - before


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise LookupError(key)


@dataclass
class _Loaded:
    """One input set: the arrays that a CPU program may have wrapped, and what ``load`` made of them."""

    arrays: dict[str, np.ndarray]
    value: Any


@dataclass
class _Built:
    """One prepared program."""

    program: Program
    timing: ModuleType
    gpu: ModuleType | None
    residency: Residency
    sets: dict[int, _Loaded] = field(default_factory=dict)
    mapped: set[str] = field(default_factory=set)  # keys of the shared arrays that it was given or gave into


class Operations:
    """The operations of one worker, and the programs it holds."""

    def __init__(self) -> None:
        self._programs: dict[str, _Built] = {}
        self._mapped: dict[str, np.ndarray] = {}
        self._pinned: dict[str, ModuleType] = {}
        self._gpu: ModuleType | None = None
        self._named: dict[str, Callable[..., dict[str, Any]]] = {
            "prepare": self.prepare,
            "attach": self.attach,
            "load": self.load,
            "refill": self.refill,
            "block": self.block,
            "sustain": self.sustain,
            "probe": self.probe,
            "changed": self.changed,
            "release": self.release,
            "shutdown": lambda: {},
        }

    def reply(self, message: protocol.Message) -> protocol.Message:
        """Do what a request asks, and say how it ended. Raises nothing: ``exit`` and the like go through."""
        number, op = message["id"], message["op"]
        args = {name: value for name, value in message.items() if name not in ("id", "op")}
        if op not in self._named:
            return protocol.error(number, "protocol", f"There is no operation {op!r}.", "")
        operation = self._named[op]
        try:
            inspect.signature(operation).bind(**args)
        except TypeError as error:
            return protocol.error(number, "protocol", f"{op}: {_sentence(error)}", "")
        try:
            return protocol.result(number, operation(**args))
        except BadRequest as error:
            return protocol.error(number, "protocol", _sentence(error), traceback.format_exc())
        except Unsupported as error:
            return protocol.error(number, "unsupported", _sentence(error), traceback.format_exc())
        except buffers.WrongArrays as error:
            return protocol.error(number, "failed", _sentence(error), traceback.format_exc())
        except Exception as error:
            told = f"{op} raised {type(error).__name__}: {_sentence(error)}"
            return protocol.error(number, "failed", told, traceback.format_exc())

    def prepare(self, program: str, impl: str, case: str, device: Mapping[str, Any]) -> dict[str, Any]:
        """Build a case; ``program`` names it from now on. ``prepare_s`` includes the import of the stack's library."""
        if program in self._programs:
            raise BadRequest(f"Program {program!r} is there already.")
        target = Device(**{**device, "features": frozenset(device["features"])})
        timing = importlib.import_module(TIMING[target.kind])
        gpu = self._gpu = None if target.kind == "cpu" else importlib.import_module(GPU)
        wanted = parse_case(case)
        implementation = registry.find(impl, wanted.workload)
        start = time.perf_counter()
        built = implementation.prepare(wanted, target)
        seconds = time.perf_counter() - start
        # On a GPU it is the device's memory that counts.
        self._programs[program] = _Built(built, timing, gpu, Residency() if gpu is None else gpu.Residency())
        return {"prepare_s": seconds, "config": built.config, "flags": built.flags, "artefacts": built.artefacts}

    def attach(
        self, program: str, given: Sequence[buffers.Descriptor], taken: Sequence[buffers.Descriptor]
    ) -> dict[str, Any]:
        """Map shared arrays, of inputs and of outputs, before they are needed: a second for some GiB, in all workers
        at the same time."""
        built = self._get(program)
        for arrays, gpu in ((given, built.gpu), (taken, None)):
            self._views(built, {str(number): descriptor for number, descriptor in enumerate(arrays)}, gpu)
        return {}

    def load(self, program: str, set: int, inputs: Mapping[str, buffers.Descriptor]) -> dict[str, Any]:
        """Give inputs to the program: on a CPU copies of its own, on a GPU the shared buffers to copy to the device."""
        built = self._get(program)
        built.sets.pop(set, None)
        shared = self._views(built, inputs, built.gpu)
        with built.residency.watch():
            arrays = shared if built.gpu else {name: buffers.own_copy(array) for name, array in shared.items()}
            start = time.perf_counter()
            value = built.program.load(arrays)
            built.program.synchronize()
            seconds = time.perf_counter() - start
        built.sets[set] = _Loaded(arrays, value)
        return {"load_s": seconds}

    def refill(self, program: str, set: int, inputs: Mapping[str, buffers.Descriptor]) -> dict[str, Any]:
        """New contents for a loaded set, at the same place."""
        self._refill(self._get(program), set, inputs)
        return {}

    def _renew(self, built: _Built, set: int, inputs: Mapping[str, buffers.Descriptor]) -> Any:
        """New contents within a block: the memory that they take is not the program's."""
        with built.residency.apart():
            return self._refill(built, set, inputs)

    def _refill(self, built: _Built, set: int, inputs: Mapping[str, buffers.Descriptor]) -> Any:
        loaded = self._loaded(built, set)
        shared = self._views(built, inputs, built.gpu)
        try:
            buffers.alike(loaded.arrays, shared)
        except buffers.WrongArrays:
            raise BadRequest(
                "A set is refilled with inputs of the names, shapes and dtypes it was loaded with."
            ) from None
        if built.gpu:
            loaded.arrays = shared
        else:
            buffers.copy_into(loaded.arrays, shared)
        loaded.value = built.program.refill(loaded.value, loaded.arrays)
        built.program.synchronize()
        return loaded.value

    def block(
        self,
        program: str,
        sets: Sequence[int],
        keep: Mapping[str, Mapping[str, buffers.Descriptor]],
        poison: bool,
        renew: Mapping[str, Mapping[str, buffers.Descriptor]] | None = None,
    ) -> dict[str, Any]:
        """A block of calls, by the timing module of the program's device.

        ``renew``: index of a call -> what its set is refilled with before it.
        """
        built = self._get(program)
        loaded = {which: self._loaded(built, which).value for which in sets}
        copies = {int(index): self._views(built, into, None) for index, into in keep.items()}
        indices = [*copies, *map(int, renew or {})]
        if not all(0 <= index < len(sets) for index in indices):
            raise BadRequest(f"A block of {len(sets)} calls has no call {max(indices)}.")
        renewed = {
            int(index): partial(self._renew, built, sets[int(index)], inputs) for index, inputs in (renew or {}).items()
        }
        with built.residency.watch():
            answer: dict[str, Any] = built.timing.block(built.program, loaded, sets, copies, poison, renewed)
        return answer

    def probe(self) -> dict[str, Any]:
        """Whether the device still answers: on a GPU an illegal access by one program ends the work of all."""
        if self._gpu is not None:
            self._gpu.gpu().synchronize()
        return {}

    def sustain(
        self, program: str, sets: Sequence[int], keep: Mapping[str, buffers.Descriptor], hot: bool
    ) -> dict[str, Any]:
        """Calls back to back until power is steady; the outputs of the last one, which takes the last set, are kept."""
        built = self._get(program)
        if not hasattr(built.timing, "sustain"):
            raise BadRequest("Only on a GPU are calls sustained.")
        loaded = {which: self._loaded(built, which).value for which in sets}
        copies = self._views(built, keep, None)
        with built.residency.watch():
            answer: dict[str, Any] = built.timing.sustain(built.program, loaded, sets, copies, hot)
        return answer

    def changed(self, program: str, set: int, inputs: Mapping[str, buffers.Descriptor]) -> dict[str, Any]:
        """How many bytes of each input that a set holds differ from ``inputs``, which it was given."""
        built = self._get(program)
        given = self._views(built, inputs, built.gpu)
        now = built.program.read_inputs(self._loaded(built, set).value)
        buffers.alike(given, now)
        copiers = buffers.copiers() if built.gpu else None
        return {"bytes": {name: buffers.differing(array, now[name], copiers) for name, array in given.items()}}

    def release(self, program: str) -> dict[str, Any]:
        """Forget a program and free what it holds. ``peak_memory_bytes`` is the growth of host (GPU: device) memory."""
        built = self._get(program)
        del self._programs[program]
        peak = built.residency.peak_bytes
        built.sets.clear()
        for key in built.mapped.difference(*(other.mapped for other in self._programs.values())):
            array = self._mapped.pop(key)
            if key in self._pinned:
                self._pinned.pop(key).unpin(array)
        built.program.release()
        del built
        gc.collect()
        if not self._programs:
            gc.freeze()  # a library's objects, which are many, are not looked through again
        return {"peak_memory_bytes": peak}

    def _get(self, program: str) -> _Built:
        if program not in self._programs:
            raise BadRequest(f"There is no program {program!r} here.")
        return self._programs[program]

    def _views(
        self, built: _Built, described: Mapping[str, buffers.Descriptor], gpu: ModuleType | None
    ) -> dict[str, np.ndarray]:
        """Shared arrays by name. Mapped once (half a second for a GiB) and kept until the last program that had them
        is released.

        With ``gpu``, as inputs are on a GPU, they are pinned meanwhile: the device copies from them by itself. Outputs
        come through pinned memory that the stacks' libraries keep.
        """
        found = {}
        for name, descriptor in described.items():
            key = repr(sorted(descriptor.items()))
            built.mapped.add(key)
            if key not in self._mapped:
                array = self._mapped[key] = buffers.view(descriptor)
                if gpu is not None and gpu.pin(array):
                    self._pinned[key] = gpu
            found[name] = self._mapped[key]
        return found

    @staticmethod
    def _loaded(built: _Built, which: int) -> _Loaded:
        if which not in built.sets:
            raise BadRequest(f"Input set {which} is not loaded.")
        return built.sets[which]


def _sentence(error: Exception) -> str:
    """The first line of what an exception says, at most 300 characters, with a full stop."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    if len(text) > 300:
        text = text[:297] + "..."
    return text if text.endswith((".", "!", "?")) else text + "."
