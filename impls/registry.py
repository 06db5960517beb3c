"""Names -> implementations, lazily: importing a stack's modules here imports no stack library.

A stack is a package in ``impls`` that holds an ``env.toml``; every module directly in it is searched for Implementation
subclasses that have a ``name``. Kernels that need the stack's library at module level live in subpackages, which are
not searched.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from impls.contract import Device, Implementation
from impls.workloads.base import Case


class UnknownName(LookupError):
    """No implementation matches; the message suggests the nearest."""


def _roots() -> list[tuple[str, Path]]:
    """(dotted prefix, folder) of every place that stacks live in: this package, and RIDGEMARK_EXTRA_STACKS.

    RIDGEMARK_EXTRA_STACKS is a list of importable packages (separated by commas) whose subpackages are stacks too:
    implementations kept outside this repository, and the tests' adversaries.
    """
    roots = [("impls", Path(__file__).parent)]
    for name in filter(None, os.environ.get("RIDGEMARK_EXTRA_STACKS", "").split(",")):
        package = importlib.import_module(name)
        roots.append((name, Path(next(iter(package.__path__)))))
    return roots


@cache
def stacks() -> dict[str, Path]:
    """Every stack's name and folder, in alphabetical order."""
    return {name: folder for name, (_, folder) in sorted(_packages().items())}


@cache
def _packages() -> dict[str, tuple[str, Path]]:
    """Stack name -> (dotted name of its package, its folder)."""
    return {
        folder.name: (f"{prefix}.{folder.name}", folder)
        for prefix, root in _roots()
        for folder in root.iterdir()
        if (folder / "env.toml").is_file()
    }


@cache
def of_stack(stack: str) -> tuple[Implementation, ...]:
    """The implementations of one stack; no other stack's modules are imported. None where there is no such stack."""
    if stack not in _packages():
        return ()
    package, folder = _packages()[stack]
    found: list[Implementation] = []
    for info in pkgutil.iter_modules([str(folder)]):
        if info.ispkg:
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, Implementation)
                and value.__module__ == module.__name__
                and "name" in vars(value)
            ):
                found.append(value())
    return tuple(found)


def implementations() -> tuple[Implementation, ...]:
    """Every implementation of every stack, by name and workload."""
    return tuple(sorted((i for s in stacks() for i in of_stack(s)), key=lambda i: (i.name, i.workload)))


def refresh() -> None:
    """Forget what was found: RIDGEMARK_EXTRA_STACKS has changed."""
    for found in (stacks, _packages, of_stack):
        found.cache_clear()


def find(name: str, workload: str) -> Implementation:
    """The implementation called ``name`` of ``workload``.

    Raises:
        UnknownName: there is none; the message suggests the nearest.
    """
    for implementation in of_stack(name.partition(".")[0]):
        if implementation.name == name and implementation.workload == workload:
            return implementation
    raise UnknownName(f"no implementation {name!r} of {workload}" + _suggestion(name))


def select(patterns: Iterable[str]) -> tuple[Implementation, ...]:
    """Implementations whose name matches any of the shell patterns (``xla.*``; a stack's name means all its variants).

    Raises:
        UnknownName: a pattern matches nothing; the message suggests the nearest.
    """
    chosen: dict[tuple[str, str], Implementation] = {}
    for pattern in patterns:
        hits = [i for i in implementations() if fnmatch.fnmatchcase(i.name, pattern) or i.stack == pattern]
        if not hits:
            raise UnknownName(f"no implementation matches {pattern!r}" + _suggestion(pattern))
        chosen.update({(i.name, i.workload): i for i in hits})
    return tuple(chosen[key] for key in sorted(chosen))


def refusal(implementation: Implementation, case: Case, device: Device) -> str | None:
    """Why ``implementation`` does not run ``case`` on ``device``, in one sentence; None where it does."""
    if implementation.workload != case.workload:
        return f"{implementation.name} implements {implementation.workload}, not {case.workload}."
    if device.kind not in implementation.devices:
        return f"{implementation.name} runs on {' and '.join(implementation.devices)}, not on {device.kind}."
    return implementation.refuses(case, device)


def _suggestion(name: str) -> str:
    known = sorted({i.name for i in implementations()} | set(stacks()))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; stacks: {', '.join(stacks())}"
