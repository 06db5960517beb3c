"""Which stacks and implementations conformance tests run, and the workers they run in.

One worker per stack serves all of its tests. A stack whose environment is not there is skipped, once, with the reason.
On a GPU: ``pytest tests/conformance --device cuda --stack cublas``, in several processes at once with pytest-xdist's
``-n`` where many cases are compiled.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from benchmarks.engine import environments, machine
from benchmarks.engine.buffers import Arena
from benchmarks.engine.pool import Pool, Worker, WorkerSpec
from impls import registry
from impls.contract import Device, Implementation
from impls.workloads.base import Case
from tests.conformance import grid

ROOT = Path(__file__).parents[2]
START_S = 120


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--device", default="cpu", choices=environments.FAMILIES, help="what to run on (default: cpu)")
    group.addoption("--stack", action="append", metavar="NAME", help="only this stack's (may be repeated)")
    group.addoption("--impl", default="*", metavar="GLOB", help="only implementations like this: blas.*")
    group.addoption("--whole-grid", action="store_true", help="every case, also of those that compile for seconds each")


class On:
    """The kind of device that was asked for."""

    kind = "cpu"


def pytest_configure(config: pytest.Config) -> None:
    On.kind = config.getoption("--device")
    try:
        device()
    except machine.NoDevice as error:
        raise pytest.UsageError(str(error)) from None


@dataclass(frozen=True)
class Subject:
    """An implementation and a case of the grid; why it refuses the case, or None."""

    implementation: Implementation
    case: Case
    refusal: str | None

    def __str__(self) -> str:
        return f"{self.implementation.name}-{self.case.id}"


@cache
def device() -> Device:
    return machine.device(On.kind)


@cache
def environment(stack: str) -> environments.Environment | str:
    """A stack's environment, or why there is none."""
    try:
        found = environments.find(stack, On.kind)
    except environments.EnvironmentFailure as failure:
        return str(failure)
    return f"{found.reason} {found.remedy}" if isinstance(found, environments.Missing) else found


@cache
def cases() -> list[Case]:
    return grid.cases()


@cache
def subjects(implementation: Implementation, whole: bool) -> list[Subject]:
    of_workload = [case for case in cases() if case.workload == implementation.workload]
    return [
        Subject(implementation, case, registry.refusal(implementation, case, device()))
        for case in (of_workload if whole else grid.thinned(of_workload, implementation.name))
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = {"accepted", "refused", "implementation"} & set(metafunc.fixturenames)
    if not wanted:
        return
    chosen = metafunc.config.getoption("--stack") or list(registry.stacks())
    for stack in chosen:
        if stack not in registry.stacks():
            raise pytest.UsageError(f"there is no stack {stack!r}; known: {', '.join(registry.stacks())}")
    implementations = [
        i
        for i in registry.implementations()
        if i.stack in chosen
        and fnmatch.fnmatchcase(i.name, metafunc.config.getoption("--impl"))
        and On.kind in i.devices
    ]
    [name] = wanted
    values = []
    for stack, of_stack in itertools.groupby(implementations, lambda i: i.stack):
        # Refusals are the harness's to know: they need no environment.
        there = environment(stack) if name == "accepted" else None
        if isinstance(there, str):
            values.append(pytest.param(None, id=stack, marks=pytest.mark.skip(reason=there)))
        elif name == "implementation":
            values += [pytest.param(i, id=f"{i.name}-{i.workload}") for i in of_stack]
        else:
            for i in of_stack:
                # A refusal costs nothing: all are looked at.
                whole = name == "refused" or metafunc.config.getoption("--whole-grid")
                values += [
                    pytest.param(s, id=str(s))
                    for s in subjects(i, whole)
                    if (s.refusal is None) == (name == "accepted")
                ]
    metafunc.parametrize(name, values)


@dataclass
class Workers:
    """A living worker of every stack that was asked for."""

    pool: Pool
    arena: Arena
    running: dict[str, Worker] = field(default_factory=dict)

    def of(self, stack: str) -> Worker:
        worker = self.running.get(stack)
        if worker is None or not worker.alive:
            found = environment(stack)
            assert isinstance(found, environments.Environment)
            worker = self.pool.start(WorkerSpec(stack, found.python, found.environ), deadline_s=START_S)
            self.running[stack] = worker
        return worker


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    pool, arena = Pool(ROOT, device(), device().threads), Arena("conformance")
    try:
        yield Workers(pool, arena)
    finally:
        pool.stop()
        arena.close()
