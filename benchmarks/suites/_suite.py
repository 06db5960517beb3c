"""What a suite is: which cases belong to it, under which parameters asv knows them, and the metrics it follows.

Owns the names that asv and the site show. asv times nothing here: every suite is measured once, by the engine, in
``setup_cache``, and each benchmark is a view of that measurement.

A suite is written as a subclass with a ``title``, its ``workload``, the names of its ``axes`` and ``place``.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from benchmarks.engine import cases as case_files
from benchmarks.engine import machine
from impls import registry
from impls.baselines import baseline_of
from impls.workloads.base import Case

#: The cases that are followed from commit to commit, with the tags cpu and cuda: where they are measured.
CASES = Path(__file__).with_name("cases.toml")
#: Seconds that the measurement of a suite may take. asv's own limit, one minute, is for one benchmark.
MEASUREMENT_S = 3600.0


class Name(str):
    """A parameter that asv shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


#: Where a case stands in its suite: the values of its axes. asv's parameters are an implementation and these.
Place: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Metric:
    """One thing that is followed.

    Attributes:
        name: its benchmark is ``track_<name>``.
        words: the same for people.
        unit: asv's unit; ``seconds`` are shown as ms or us.
        less_is_better: whether a lower value is an improvement. asv takes it for granted; the site asks.
    """

    name: str
    words: str
    unit: str
    less_is_better: bool = True


METRICS = (
    Metric("time", "time", "seconds"),
    Metric("ratio", "time over the baseline's", "x"),
    Metric("sol_fraction", "share of the limit", "of limit", less_is_better=False),
    Metric("error", "error over tolerance", "of tolerance"),
    Metric("compile", "compilation", "seconds"),
)


class Suite(ABC):
    """The cases that one question is asked of."""

    #: Results of another version are dropped by asv: it changes only if a value comes to mean something else.
    version: ClassVar[str] = "1"
    timeout: ClassVar[float] = 60.0

    title: ClassVar[str]
    workload: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        for metric in METRICS:
            setattr(cls, f"track_{metric.name}", _tracker(cls, metric))
        cls.setup_cache = _measurement(cls)  # type: ignore[attr-defined]

    @classmethod
    @abstractmethod
    def place(cls, case: Case) -> Place | None:
        """The values of the axes for ``case``; None where it does not belong to this suite."""

    @classmethod
    def key(cls) -> str:
        """asv's name of the suite: ``gemm.Square``."""
        return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"

    @property
    def param_names(self) -> list[str]:
        """asv's names of the parameters."""
        return ["impl", *self.axes]

    @property
    def params(self) -> list[list[str | int]]:
        """asv's parameters: what can run on this machine's device, and the values that its cases take."""
        return _params(type(self))


def _tracker(suite: type[Suite], metric: Metric) -> Callable[..., Any]:
    """The benchmark of a metric: hands on what was measured; NaN is asv's "n/a", an exception its "failed"."""

    def track(self: Suite, measured: dict[Place, dict[str, Any]], *place: str | int) -> Any:
        values = measured.get(place, {})
        value = values.get(metric.name, math.nan)
        if value is None:
            raise RuntimeError(values["reason"])
        return {"samples": value, "number": 1} if isinstance(value, list) else value

    track.__dict__.update(
        unit=metric.unit, pretty_name=f"{suite.title}: {metric.words}", less_is_better=metric.less_is_better
    )
    return track


def _measurement(suite: type[Suite]) -> Callable[..., Any]:
    """The suite's ``setup_cache``: every (place, metric) that was measured.

    asv tells suites' measurements apart by the module and the line of this function, and shows its source: it takes
    those of ``place``, the rule that sets suites apart.
    """

    @functools.wraps(suite.__dict__["place"].__func__)
    def setup_cache(self: Suite) -> dict[Place, dict[str, Any]]:
        from benchmarks.tracking import measurement  # pandas and SciPy, which asv's discovery can do without

        return measurement.of(suite)

    setup_cache.timeout = MEASUREMENT_S  # type: ignore[attr-defined]
    return setup_cache


@functools.cache
def _params(suite: type[Suite]) -> list[list[Any]]:
    impls = implementations_here(suite)
    places = [place for case in cases_here(suite) if (place := suite.place(case)) is not None]
    return [
        [Name(v) if isinstance(v, str) else v for v in values]
        for values in in_order(suite, impls, *zip(*places, strict=True))
    ]


def implementations_here(suite: type[Suite]) -> list[str]:
    """The implementations of the suite's workload that are timed on this machine's device."""
    kind = machine.default_device().kind
    return [
        i.name
        for i in registry.implementations()
        if i.workload == suite.workload and kind in i.devices and kind not in i.simulated_on
    ]


def cases_here(suite: type[Suite]) -> list[Case]:
    """The cases of ``suite`` that are followed on this machine's device."""
    entries = case_files.load(f"{CASES}:{machine.default_device().kind}")
    return [e.case for e in entries if e.case.workload == suite.workload and suite.place(e.case) is not None]


def in_order(suite: type[Suite], impls: Iterable[str], *axes: Iterable[str | int]) -> list[list[Any]]:
    """Every value of every parameter once: baselines first, numbers ascending, words in alphabetical order."""
    baselines = {baseline_of(suite.workload, kind) for kind in ("cpu", "cuda")}
    return [
        sorted(set(impls), key=lambda name: (name not in baselines, name)),
        *(sorted(set(values), key=lambda v: (isinstance(v, str), v)) for values in axes),
    ]
