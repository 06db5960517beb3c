"""Inputs and float64 references of a case, made in a process of their own.

Owns the reference process and the choice between a full and a sampled reference. The inputs go into shared buffers for
the workers; the expectations come back to the harness only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.engine import buffers
from impls.workloads import draws
from impls.workloads.base import Case, Expected, parse_case

# A full float64 reference is computed up to this many operations (a few seconds on two cores), a sampled one beyond.
FULL_REFERENCE_FLOPS = 10**11
#: How far what runs beside timed calls steps back for those who launch them.
NICE = 10
# Share of the host's memory that the last cases' tensors are kept in, on a GPU, whose own is another.
_KEPT_SHARE = 16
# Contents that each case's inputs come in: an answer remembered from the last contents is then a wrong answer.
VARIANTS = 3


@dataclass(frozen=True)
class Question:
    """A case's input variants, in shared buffers, and what is expected of them.

    Attributes:
        descriptors: per variant, input name -> buffer descriptor.
        inputs: per variant, input name -> array over the same buffer.
        expected: per variant, output name -> Expected.
        seed: seed of variant 0; variant v has seed + v.
        sampled: whether the reference covers chosen elements only.
    """

    descriptors: list[dict[str, dict[str, Any]]]
    inputs: list[dict[str, np.ndarray]]
    expected: list[dict[str, Expected]]
    seed: int
    sampled: bool

    def free(self, arena: buffers.Arena) -> None:
        """Give the buffers back."""
        for variant in self.descriptors:
            for descriptor in variant.values():
                arena.free(descriptor)


@dataclass(frozen=True)
class Asked:
    """A question whose answer is being made."""

    case: Case
    descriptors: list[dict[str, dict[str, Any]]]
    expected: Future[list[dict[str, Expected]]]
    seed: int

    def answer(self) -> Question:
        """Wait for the answer.

        Raises:
            concurrent.futures.process.BrokenProcessPool: the process died, of memory most likely.
        """
        expected = self.expected.result()
        inputs = [{name: buffers.view(d) for name, d in variant.items()} for variant in self.descriptors]
        return Question(self.descriptors, inputs, expected, self.seed, _sampled(self.case))


class Reference:
    """The reference process. One question at a time; idle in between, so that it disturbs no timed block.

    Args:
        aside: others are timed meanwhile (on a GPU), and come first where cores are short.
    """

    def __init__(self, *, aside: bool = False) -> None:
        self._process = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_take_place,
            initargs=(aside,),
        )
        self._pid = self._process.submit(os.getpid)

    def ask(self, case: Case, seed: int, arena: buffers.Arena) -> Asked:
        """Start making the inputs (variant v from seed + v) and references of ``case``."""
        descriptors = [
            {name: arena.place(spec.shape, spec.dtype) for name, spec in case.input_specs().items()}
            for _ in range(VARIANTS)
        ]
        return Asked(case, descriptors, self._process.submit(_make, case.id, seed, descriptors), seed)

    def close(self) -> None:
        """End the process, whatever it is at."""
        if self._pid.done() and self._pid.exception() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid.result(), signal.SIGKILL)
        self._process.shutdown(cancel_futures=True)


def _take_place(aside: bool) -> None:
    # Ctrl-C is for the harness, which then ends this process in its own way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if aside:
        os.nice(NICE)
        draws.keep(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _KEPT_SHARE)


def _make(case_id: str, seed: int, descriptors: list[dict[str, dict[str, Any]]]) -> list[dict[str, Expected]]:
    case = parse_case(case_id)
    sample = seed if _sampled(case) else None
    answers = []
    for variant, named in enumerate(descriptors):
        inputs = case.inputs(seed + variant)
        shared = {name: buffers.view(descriptor) for name, descriptor in named.items()}
        buffers.copy_into(shared, inputs, buffers.copiers())
        answers.append(case.expected(inputs, sample=sample))
    return answers


def _sampled(case: Case) -> bool:
    return case.reference_flops() > FULL_REFERENCE_FLOPS
