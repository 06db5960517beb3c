"""Every implementation of a stack over the same awkward grid, in the stack's own environment and worker.

What it computes must be right by the float64 reference, on the first inputs and on those that replace them, with every
element written, its inputs left alone. What it refuses it must refuse in a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from benchmarks.engine.buffers import view
from benchmarks.engine.judge import Judge
from benchmarks.engine.pool import Worker, WorkerError
from impls.contract import Implementation
from impls.workloads.base import Case, TensorSpec, parse_case
from tests.conformance.conftest import Subject, Workers, subjects

# Inputs of set 0, of set 1, and those that replace set 0's.
SEEDS = (11, 12, 13)
DEADLINE_S = 120


@lru_cache(maxsize=4)
def reference(case_id: str) -> tuple[list[dict[str, np.ndarray]], Judge]:
    """Inputs of every seed, and their judge."""
    case = parse_case(case_id)
    inputs = [case.inputs(seed) for seed in SEEDS]
    return inputs, Judge(case, list(inputs), [case.expected(i) for i in inputs], SEEDS[0])


@contextmanager
def shared(
    workers: Workers, specs: Mapping[str, TensorSpec], arrays: Mapping[str, np.ndarray]
) -> Iterator[dict[str, Any]]:
    """Descriptors of arrays in shared memory, by name: copies of ``arrays``."""
    made = {}
    try:
        for name, spec in specs.items():
            made[name] = workers.arena.put(arrays[name], spec.dtype)
        yield made
    finally:
        for descriptor in made.values():
            workers.arena.free(descriptor)


class Run:
    """One program in a worker, asked as the harness asks."""

    def __init__(self, workers: Workers, worker: Worker, subject: Subject) -> None:
        self.workers, self.worker, self.case = workers, worker, subject.case
        self.inputs, self.judge = reference(subject.case.id)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        return self.worker.call(op, DEADLINE_S, program="conformance", **arguments)

    def give(self, op: str, which: int, variant: int) -> None:
        with shared(self.workers, self.case.input_specs(), self.inputs[variant]) as given:
            self.ask(op, set=which, inputs=given)

    def assert_right(self, sets: list[int], variants: list[int]) -> None:
        """A block of one call per set: each call's outputs are right for the variant that the set holds."""
        specs = self.case.output_specs()
        keep: dict[int, dict[str, Any]] = {}
        try:
            for call in range(len(sets)):
                keep[call] = {n: self.workers.arena.array(s.shape, s.dtype)[1] for n, s in specs.items()}
            self.ask("block", sets=sets, keep=keep, poison=True)
            copies = [{n: view(d).copy() for n, d in keep[call].items()} for call in range(len(sets))]
        finally:
            for kept in keep.values():
                for descriptor in kept.values():
                    self.workers.arena.free(descriptor)
        for call, (variant, outputs) in enumerate(zip(variants, copies, strict=True)):
            verdict = self.judge.outputs(variant, outputs)
            assert verdict.right, f"call {call} of {sets}: {verdict.reason}"

    def assert_inputs_unchanged(self, which: int, variant: int) -> None:
        with shared(self.workers, self.case.input_specs(), self.inputs[variant]) as given:
            changed = self.ask("changed", set=which, inputs=given)["bytes"]
        assert not any(changed.values()), f"wrote to its inputs (bytes: {changed})"


def test_computes(accepted: Subject, workers: Workers) -> None:
    worker = workers.of(accepted.implementation.stack)
    run = Run(workers, worker, accepted)
    try:
        run.ask("prepare", impl=accepted.implementation.name, case=accepted.case.id)
    except WorkerError as error:
        if error.kind != "unsupported":
            raise AssertionError(f"{error.kind}: {error.message}\n{error.detail}") from None
        assert_sentence(error.message)
        pytest.skip(f"the stack refuses: {error.message}")
    try:
        run.give("load", 0, 0)
        run.give("load", 1, 1)
        run.assert_right([0, 1, 0], [0, 1, 0])
        run.assert_inputs_unchanged(0, 0)
        run.give("refill", 0, 2)
        run.assert_right([0, 1], [2, 1])
        run.assert_inputs_unchanged(0, 2)
        run.assert_inputs_unchanged(1, 1)
    except WorkerError as error:
        raise AssertionError(f"{error.kind}: {error.message}\n{error.detail}") from None
    finally:
        if worker.alive:
            run.ask("release")


def test_refuses_in_a_sentence(refused: Subject) -> None:
    assert refused.refusal is not None
    assert_sentence(refused.refusal)


def test_serves_part_of_the_grid(implementation: Implementation) -> None:
    """A refusal of everything would pass the other tests."""
    assert any(s.refusal is None for s in subjects(implementation, whole=True))


def test_plans_its_memory(implementation: Implementation) -> None:
    for subject in subjects(implementation, whole=True):
        if subject.refusal is None:
            case: Case = subject.case
            assert implementation.workspace_bytes(case) >= 0, case.id
            assert implementation.traffic_bytes(case) >= case.compulsory_bytes(), case.id


def assert_sentence(text: str) -> None:
    """Begins with a name or a capital, ends with a full stop, says something, on one line."""
    assert text == text.strip()
    assert text.endswith("."), text
    assert len(text.split()) >= 4, text
    assert "\n" not in text
