"""The right numbers, but the work is not done between the two clock readings."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np

from tests.adversaries.cheats.honest import Adversary, HonestProgram, Loaded

# The work is slow, so that it cannot be over by accident before somebody looks.
WORK_SECONDS = 0.05


class Early(Adversary):
    name = "cheats.early"
    summary = "returns while a thread does the work"

    class program(HonestProgram):
        thread: threading.Thread | None = None

        def run(self, loaded: Loaded) -> Loaded:
            self.thread = threading.Thread(target=self.work, args=(loaded,), daemon=True)
            self.thread.start()
            return loaded

        def work(self, loaded: Loaded) -> None:
            time.sleep(WORK_SECONDS)
            np.matmul(loaded.a, loaded.b, out=loaded.c)


class Deferred(Adversary):
    name = "cheats.deferred"
    summary = "returns while a thread does the work, and waits for it where its outputs are read"

    class program(Early.program):
        def read_outputs(self, result: Loaded) -> dict[str, np.ndarray]:
            assert self.thread is not None
            self.thread.join()
            return super().read_outputs(result)


class Beforehand(Adversary):
    name = "cheats.beforehand"
    summary = "computes when it is given its inputs; a call only copies"

    class program(HonestProgram):
        def __init__(self) -> None:
            super().__init__()
            self.ready: dict[int, np.ndarray] = {}

        def load(self, inputs: Mapping[str, np.ndarray]) -> Loaded:
            return self.refill(super().load(inputs), inputs)

        def refill(self, loaded: Loaded, inputs: Mapping[str, np.ndarray]) -> Loaded:
            self.ready[id(loaded)] = loaded.a @ loaded.b
            return loaded

        def run(self, loaded: Loaded) -> Loaded:
            loaded.c[...] = self.ready[id(loaded)]
            return loaded
