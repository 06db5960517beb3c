"""Wrong numbers, from the first call on."""

from __future__ import annotations

import numpy as np

from tests.adversaries.cheats.honest import Adversary, HonestProgram, Loaded

TILE = 64


class Zeros(Adversary):
    name = "cheats.zeros"
    summary = "writes zeros"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            loaded.c.fill(0)
            return loaded


class FirstTile(Adversary):
    name = "cheats.first_tile"
    summary = "is right in the first tile only"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            loaded.c.fill(0)
            loaded.c[:TILE, :TILE] = loaded.a[:TILE] @ loaded.b[:, :TILE]
            return loaded


class SampledRows(Adversary):
    name = "cheats.sampled_rows"
    summary = "is right on every 64th row and the last, where a lazy judge would look"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            loaded.c.fill(0)
            loaded.c[::TILE] = loaded.a[::TILE] @ loaded.b
            loaded.c[-1] = loaded.a[-1] @ loaded.b
            return loaded


class LowerPrecision(Adversary):
    name = "cheats.lower_precision"
    summary = "rounds its inputs to f16 first"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            a, b = (x.astype(np.float16).astype(np.float32) for x in (loaded.a, loaded.b))
            np.matmul(a, b, out=loaded.c)
            return loaded


class Unwritten(Adversary):
    name = "cheats.unwritten"
    summary = "leaves the last element unwritten"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            loaded.c[:-1] = loaded.a[:-1] @ loaded.b
            loaded.c[-1, :-1] = loaded.a[-1] @ loaded.b[:, :-1]
            return loaded


class WritesInputs(Adversary):
    name = "cheats.writes_inputs"
    summary = "is right and then halves its input A"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            super().run(loaded)
            loaded.a *= 0.5
            return loaded


class WrongShape(Adversary):
    name = "cheats.wrong_shape"
    summary = "returns the transpose"

    class program(HonestProgram):
        def read_outputs(self, result: Loaded) -> dict[str, np.ndarray]:
            return {"C": result.c.T}


class WrongDtype(Adversary):
    name = "cheats.wrong_dtype"
    summary = "returns f64"

    class program(HonestProgram):
        def read_outputs(self, result: Loaded) -> dict[str, np.ndarray]:
            return {"C": result.c.astype(np.float64)}


class NoOutput(Adversary):
    name = "cheats.no_output"
    summary = "returns nothing"

    class program(HonestProgram):
        def read_outputs(self, result: Loaded) -> dict[str, np.ndarray]:
            return {}
