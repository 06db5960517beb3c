"""Right at first, or while nobody looks; later an answer out of memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.adversaries.cheats.honest import Adversary, HonestProgram, Loaded


class LastOutput(Adversary):
    name = "cheats.last_output"
    summary = "returns the output of the call before"

    class program(HonestProgram):
        last: np.ndarray | None = None

        def run(self, loaded: Loaded) -> Loaded:
            now = loaded.a @ loaded.b
            loaded.c[...] = now if self.last is None else self.last
            self.last = now
            return loaded


class FirstCallOnly(Adversary):
    name = "cheats.first_call_only"
    summary = "computes in its first call, and returns that answer for ever"

    class program(HonestProgram):
        first: np.ndarray | None = None

        def run(self, loaded: Loaded) -> Loaded:
            if self.first is None:
                self.first = loaded.a @ loaded.b
            loaded.c[...] = self.first
            return loaded


class SkipsCalls(Adversary):
    name = "cheats.skips_calls"
    summary = "does nothing in every 5th call"
    period = 5

    class program(HonestProgram):
        calls = 0

        def run(self, loaded: Loaded) -> Loaded:
            self.calls += 1
            return loaded if self.calls % SkipsCalls.period == 0 else super().run(loaded)


class SkipsUnpoisoned(Adversary):
    name = "cheats.skips_unpoisoned"
    summary = "does nothing in every 5th call, and keeps its poison away from its outputs"
    period = 5

    class program(HonestProgram):
        calls = 0

        def poison(self, loaded: Loaded) -> None:
            pass

        def run(self, loaded: Loaded) -> Loaded:
            self.calls += 1
            return loaded if self.calls % SkipsUnpoisoned.period == 0 else super().run(loaded)


class MemoisesPointers(Adversary):
    name = "cheats.memoises_pointers"
    summary = "remembers the answer for inputs at an address it has seen"

    class program(HonestProgram):
        def __init__(self) -> None:
            super().__init__()
            self.known: dict[tuple[int, int], np.ndarray] = {}

        def run(self, loaded: Loaded) -> Loaded:
            key = (loaded.a.ctypes.data, loaded.b.ctypes.data)
            if key not in self.known:
                self.known[key] = loaded.a @ loaded.b
            loaded.c[...] = self.known[key]
            return loaded


class MemoisesUntilRefill(Adversary):
    name = "cheats.memoises_until_refill"
    summary = "remembers the answer of each input set until it is refilled; its outputs are always right, its times not"

    class program(HonestProgram):
        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, np.ndarray] = {}

        def refill(self, loaded: Loaded, inputs: Mapping[str, np.ndarray]) -> Loaded:
            self.known.pop(id(loaded), None)
            return loaded

        def run(self, loaded: Loaded) -> Loaded:
            if id(loaded) not in self.known:
                self.known[id(loaded)] = loaded.a @ loaded.b
            loaded.c[...] = self.known[id(loaded)]
            return loaded
