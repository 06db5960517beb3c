"""A worker's operations in this process: shared arrays are mapped once, and not longer than a program lives."""

from dataclasses import asdict

import numpy as np
import pytest

from benchmarks.engine import buffers, operations
from benchmarks.engine.buffers import Arena
from impls import registry
from impls.contract import Device, Implementation, Program
from impls.workloads.base import parse_case

CASE = parse_case("gemm:8x8x8:f32")
CPU = Device("cpu", "Made up", "x86_64", 1, 2**30, frozenset())


class Product(Program):
    def load(self, inputs):
        return inputs

    def refill(self, loaded, inputs):
        assert loaded is inputs  # rewritten in place
        return inputs

    def run(self, loaded):
        return loaded["A"] @ loaded["B"]

    def read_outputs(self, result):
        return {"C": result}

    def read_inputs(self, loaded):
        return loaded


class Made(Implementation):
    name, workload, devices, summary = "made.one", "gemm", ("cpu",), "for this test"

    def prepare(self, case, device):
        return Product()


@pytest.fixture
def arena():
    made = Arena("operations")
    yield made
    made.close()


def test_every_shared_array_is_mapped_once_until_the_program_is_released(arena, monkeypatch):
    monkeypatch.setattr(registry, "find", lambda name, workload: Made())
    variants = [{n: arena.put(a, "f32") for n, a in CASE.inputs(seed).items()} for seed in range(2)]
    kept, slot = arena.array((8, 8), "f32")
    worker = operations.Operations()
    mapped = []
    view = buffers.view
    monkeypatch.setattr(buffers, "view", lambda d: mapped.append(d["path"]) or view(d))

    def live():
        worker.prepare("p", "made.one", CASE.id, asdict(CPU))
        worker.load("p", 0, variants[0])
        for number in range(6):
            given = variants[number % 2]
            worker.refill("p", 0, given)
            worker.block("p", [0], {"0": {"C": slot}}, poison=True)
            a, b = (view(given[n]) for n in "AB")
            np.testing.assert_allclose(kept, a @ b, rtol=1e-5)
        worker.release("p")

    live()
    expected = sorted([*(d["path"] for v in variants for d in v.values()), slot["path"]])
    assert sorted(mapped) == expected
    assert worker._mapped == {}
    live()
    assert sorted(mapped) == sorted(2 * expected)


def test_a_block_renews_a_set_before_the_calls_that_ask_for_it(arena, monkeypatch):
    monkeypatch.setattr(registry, "find", lambda name, workload: Made())
    variants = [{n: arena.put(a, "f32") for n, a in CASE.inputs(seed).items()} for seed in range(4)]
    slots = [arena.array((8, 8), "f32") for _ in range(4)]
    worker = operations.Operations()
    worker.prepare("p", "made.one", CASE.id, asdict(CPU))
    worker.load("p", 0, variants[0])
    worker.load("p", 1, variants[1])
    keep = {str(index): {"C": slot} for index, (_, slot) in enumerate(slots)}
    renew = {"1": variants[2], "2": variants[3]}
    worker.block("p", [0, 1, 0, 1], keep, poison=True, renew=renew)
    for (got, _), variant in zip(slots, (0, 2, 3, 2), strict=True):
        a, b = (buffers.view(variants[variant][n]) for n in "AB")
        np.testing.assert_allclose(got, a @ b, rtol=1e-5)
    with pytest.raises(operations.BadRequest, match="no call 4"):
        worker.block("p", [0, 1], {}, poison=True, renew={"4": variants[2]})
