"""Verdicts on outputs that were kept: given at once on a CPU, meanwhile on a GPU.

Owns the shared arrays that a worker copies kept outputs into, and when each may be used again: not before its verdict.
What is right is the judge's to say, and what a verdict does to an implementation the trial's.

On a GPU the host's cores are free while the next block runs: outputs are judged in threads of the harness. On a CPU
those would take their cores from what is measured.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from benchmarks.engine.buffers import Arena, Descriptor
from benchmarks.engine.judge import Verdict
from benchmarks.engine.reference import NICE
from impls.workloads.base import TensorSpec

#: Threads that judge: a look at 134 MB takes one 0.05 s (AMD Zen 4), and a call has them on the host in 0.02 s.
JUDGES = 8

#: One set of outputs: name -> its array and descriptor.
Slot = dict[str, tuple[np.ndarray, Descriptor]]


def _step_back() -> None:
    """This thread leaves its core to whoever launches what is timed (Linux: a thread has a priority of its own)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Verdicts:
    """The slots of one case, and the verdicts that are awaited. For one thread, which all of ``heard`` run in.

    Args:
        judge: gives the verdict on the outputs of a call, by the variant of its inputs.
        specs: the case's outputs.
        slots: how many sets of outputs may wait.
        meanwhile: judge in threads.

    Raises:
        NoRoom: the slots fit nowhere.
    """

    def __init__(
        self,
        judge: Callable[[int, Mapping[str, np.ndarray]], Verdict],
        specs: Mapping[str, TensorSpec],
        slots: int,
        arena: Arena,
        meanwhile: bool,
    ) -> None:
        self._judge, self._arena = judge, arena
        self._threads = ThreadPoolExecutor(JUDGES, "ridgemark-judge", _step_back) if meanwhile else None
        self._all: list[Slot] = []
        for _ in range(slots):
            self._all.append({n: arena.array(s.shape, s.dtype) for n, s in specs.items()})
        self._free = deque(self._all)
        self._awaited: dict[Future[Verdict], tuple[Slot, Callable[[Verdict], None]]] = {}

    @property
    def descriptors(self) -> list[Descriptor]:
        """Of all arrays of all slots."""
        return [descriptor for slot in self._all for _, descriptor in slot.values()]

    @property
    def room(self) -> int:
        """How many slots there are."""
        return len(self._all)

    def slot(self) -> Slot:
        """A free slot; where there is none, the next verdict is waited for."""
        while not self._free:
            wait(self._awaited, return_when=FIRST_COMPLETED)
            self.collect()
        return self._free.popleft()

    def back(self, slot: Slot) -> None:
        """Return a slot that was not used."""
        self._free.append(slot)

    def ask(self, variant: int, slot: Slot, heard: Callable[[Verdict], None]) -> None:
        """Have the outputs in ``slot`` judged, whose inputs were ``variant``; ``heard`` takes the verdict."""
        outputs = {name: array for name, (array, _) in slot.items()}
        if self._threads is not None:
            self._awaited[self._threads.submit(self._judge, variant, outputs)] = slot, heard
            return
        verdict = self._judge(variant, outputs)
        self._free.append(slot)
        heard(verdict)

    def collect(self) -> None:
        """Hear the verdicts that have been given."""
        for future in [f for f in self._awaited if f.done()]:
            self._hear(future)

    def settle(self) -> None:
        """Wait for all verdicts, and hear them."""
        while self._awaited:
            self._hear(next(iter(self._awaited)))

    def close(self) -> None:
        """Wait for the threads and free the slots; verdicts that nobody heard are lost."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for descriptor in self.descriptors:
            self._arena.free(descriptor)

    def _hear(self, future: Future[Verdict]) -> None:
        slot, heard = self._awaited.pop(future)
        verdict = future.result()
        self._free.append(slot)
        heard(verdict)
