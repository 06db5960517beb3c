"""The answer: case by case whether to leave the baseline, for what, by how much, and what that costs.

Owns the decision. Ratios, intervals and verdicts come from ``analysis.statistics``, speed-of-light fractions from
``analysis.roofline``; what a report looks like is ``analysis.report``.

Rules
    ``leave``: at least one implementation is faster than the baseline (verdict ``faster``). The fastest of these is
    the choice. Others are held against it, paired by round, by the same rules as against the baseline: those that tie
    with it are as good; those that are undecided may be. Where another was measured in another run, there are no
    common rounds: both ratios to the baseline are divided, and the quotient's interval takes the worst ends of both,
    which is wider than 95 %.

    ``undecided``: none is faster for certain, but the interval of at least one reaches beyond the practical threshold.
    ``tie``: none may be faster, and at least one ties with the baseline: staying costs at most the threshold.
    ``stay``: all others are slower, or at best as fast as the threshold allows.
    ``alone``: only the baseline was timed. ``uncompared``: others were timed, without a ratio to the baseline.
    ``no baseline``: the baseline was not timed; the least time is named, and nothing is claimed. ``nothing``: no
    implementation was timed.

What leaving costs
    Start-up is ``prepare_s`` plus what the first call took beyond a usual one. Calls to break even: the choice's
    start-up beyond the baseline's, over the time that it saves on each call; the interval is that of the ratio. The
    first case that a worker prepares also imports the stack's library; records do not tell the two apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from analysis import statistics
from analysis.frame import Frame, rows_of

PLACE = ("machine", "device", "threads", "regime")
ANSWERS = ("leave", "undecided", "tie", "stay", "uncompared", "alone", "no baseline", "nothing")


@dataclass(frozen=True)
class Decision:
    """The answer for one case on one device. Fields are None where there is nothing to say.

    Attributes:
        machine, device, threads, regime, case, workload, dtype: where and what.
        answer: one of ANSWERS.
        baseline: what the others are compared with.
        choice: what to run: the fastest for ``leave``, the baseline for ``tie`` and ``stay``.
        best: the implementation, other than the baseline, that the answer rests on.
        verdict: its verdict against the baseline.
        speedup, speedup_low, speedup_high: the baseline's time over its time; above 1 it is faster.
        as_good: implementations that tie with the choice.
        may_be_better: implementations of which that cannot be excluded.
        runner_up: the best of those that are behind the choice (``leave``), which may be the baseline.
        lead, lead_low, lead_high: the runner-up's time over the choice's.
        startup_s, baseline_startup_s: start-up of ``best`` and of the baseline.
        break_even_calls, break_even_low, break_even_high: calls after which leaving pays; 0 where it starts up no
            slower. Only for ``leave``.
        error_worst, baseline_error_worst: largest error over its tolerance.
        peak_memory_bytes, baseline_peak_memory_bytes: beside inputs and outputs.
        sol_fraction: of what runs by this answer: of ``choice``, or of the fastest where there is none.
        aa_ratio: the baseline's second replica over its first.
        compared: how many implementations have a ratio to the baseline.
    """

    machine: str
    device: str
    threads: int | None
    regime: str
    case: str
    workload: str
    dtype: str | None
    answer: str
    baseline: str | None = None
    choice: str | None = None
    best: str | None = None
    verdict: str | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    as_good: tuple[str, ...] = ()
    may_be_better: tuple[str, ...] = ()
    runner_up: str | None = None
    lead: float | None = None
    lead_low: float | None = None
    lead_high: float | None = None
    startup_s: float | None = None
    baseline_startup_s: float | None = None
    break_even_calls: float | None = None
    break_even_low: float | None = None
    break_even_high: float | None = None
    error_worst: float | None = None
    baseline_error_worst: float | None = None
    peak_memory_bytes: float | None = None
    baseline_peak_memory_bytes: float | None = None
    sol_fraction: float | None = None
    aa_ratio: float | None = None
    compared: int = 0


COLUMNS = tuple(field.name for field in fields(Decision))
_USED = (
    *(*PLACE, "case", "workload", "dtype", "impl", "replica", "run", "status", "method", "baseline", "verdict"),
    *("time_us", "ratio", "ratio_low", "ratio_high", "threshold", "aa_ratio", "sol_fraction", "error_worst"),
    *("prepare_s", "first_call_s", "peak_memory_bytes"),
)


@dataclass(frozen=True)
class _Relative:
    """An implementation's time over the choice's."""

    impl: str
    ratio: float
    low: float
    high: float
    verdict: str


def decide(frame: Frame, made: pd.DataFrame) -> list[Decision]:
    """The decision for every case on every device, in the order of ``made``; ceilings have none.

    Args:
        frame: what the records hold.
        made: what ``analysis.table.tabulate`` made of it.
    """
    used = made.loc[made["workload"] != "ceiling", list(_USED)]
    verdict = used["verdict"].astype(object)
    used = used.assign(verdict=verdict.where(verdict.notna(), None), result=used.index)
    rows = rows_of(used, ("result", *_USED))
    key = tuple(_USED.index(name) + 1 for name in (*PLACE, "case"))
    groups = [list(of) for _, of in itertools.groupby(rows, key=lambda r: [_known(r[i]) for i in key])]

    choices = [_choice(group) for group in groups]
    pairs = {
        rival.result: choice.result
        for group, choice in zip(groups, choices, strict=True)
        if choice is not None
        for rival in _rivals(group, choice)
        if (rival.run, rival.method) == (choice.run, choice.method)
    }
    relative = statistics.against(frame, made, pd.Series(pairs, dtype="int64")) if pairs else pd.DataFrame()
    known = {row.Index: row for row in relative.itertuples(name="Pair")}
    return [_decision(group, choice, known) for group, choice in zip(groups, choices, strict=True)]


def _known(value: Any) -> Any:
    """The value; None for NaN, which is unequal to itself."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _timed(group: Iterable[Any]) -> list[Any]:
    return [r for r in group if r.time_us > 0]


def _choice(group: Sequence[Any]) -> Any | None:
    """The fastest of those that are faster than the baseline; None where none is."""
    return min((r for r in group if r.verdict == "faster"), key=lambda r: r.ratio, default=None)


def _may_be_faster(low: float) -> bool:
    """Whether an interval that begins here reaches to where it would be faster by more than the practical threshold."""
    return low < 1 / (1 + statistics.PRACTICAL)


def _rivals(group: Iterable[Any], choice: Any) -> list[Any]:
    """What else has a ratio to the baseline: whatever might be as good as the choice."""
    return [r for r in _timed(group) if r.result != choice.result and r.verdict not in ("baseline", None)]


def _decision(group: Sequence[Any], choice: Any | None, known: dict[Any, Any]) -> Decision:
    first, timed = group[0], _timed(group)
    base = next((r for r in timed if r.verdict == "baseline"), None)
    others = [r for r in timed if r.verdict != "baseline"]
    compared = sorted((r for r in others if r.verdict is not None), key=lambda r: r.ratio)
    about: dict[str, Any] = {name: _known(getattr(first, name)) for name in (*PLACE, "case", "workload", "dtype")}
    about["baseline"] = next((r.baseline for r in timed if isinstance(r.baseline, str)), None)
    about["compared"] = len(compared)
    if not timed:
        return Decision(**about, answer="nothing")
    if not compared:
        fastest = min(timed, key=lambda r: r.time_us)
        about["answer"] = "no baseline" if base is None else "uncompared" if others else "alone"
        best = fastest.impl if base is None else None
        return Decision(**about, best=best, sol_fraction=_known(fastest.sol_fraction))

    ties = [r for r in compared if r.verdict == "tie"]
    may_be = [r for r in compared if r.verdict == "undecided" and _may_be_faster(r.ratio_low)]
    answer: dict[str, Any]
    if choice is not None:
        relatives = sorted(_relatives(group, choice, base, known), key=lambda r: r.ratio)
        answer = _pays(choice, base) | _lead([r for r in relatives if r.verdict != "tie"])
        answer |= {"answer": "leave", "choice": choice.impl, "sol_fraction": _known(choice.sol_fraction)}
        answer["as_good"] = tuple(r.impl for r in relatives if r.verdict == "tie")
        better = [r for r in relatives if r.verdict == "faster" or (r.verdict == "undecided" and _may_be_faster(r.low))]
        answer["may_be_better"] = tuple(r.impl for r in better)
        return Decision(**about, **_best(choice, base), **answer)
    answer = {"as_good": tuple(r.impl for r in ties), "may_be_better": tuple(r.impl for r in may_be)}
    if may_be:
        fastest = min(timed, key=lambda r: r.time_us)
        answer |= {"answer": "undecided", "sol_fraction": _known(fastest.sol_fraction)}
        return Decision(**about, **_best(may_be[0], base), **answer)
    answer |= {"answer": "tie" if ties else "stay", "choice": about["baseline"]}
    answer["sol_fraction"] = None if base is None else _known(base.sol_fraction)
    return Decision(**about, **_best(ties[0] if ties else compared[0], base), **answer)


def _best(best: Any, base: Any | None) -> dict[str, Any]:
    """The fields that say how ``best`` stands to the baseline."""
    about: dict[str, Any] = {
        "best": best.impl,
        "verdict": best.verdict,
        "speedup": 1 / best.ratio,
        "speedup_low": 1 / best.ratio_high,
        "speedup_high": 1 / best.ratio_low,
        "startup_s": _startup(best),
        "error_worst": _known(best.error_worst),
        "peak_memory_bytes": _known(best.peak_memory_bytes),
        "aa_ratio": _known(best.aa_ratio),
    }
    if base is not None:
        about["baseline_startup_s"] = _startup(base)
        about["baseline_error_worst"] = _known(base.error_worst)
        about["baseline_peak_memory_bytes"] = _known(base.peak_memory_bytes)
    return about


def _startup(row: Any) -> float | None:
    """Seconds until the first result, beyond a usual call; None where they were not recorded."""
    first = 0.0 if math.isnan(row.first_call_s) else max(0.0, row.first_call_s - row.time_us * 1e-6)
    return None if math.isnan(row.prepare_s) else row.prepare_s + first


def _pays(choice: Any, base: Any | None) -> dict[str, Any]:
    """Calls after which leaving the baseline for ``choice`` pays."""
    mine, theirs = _startup(choice), None if base is None else _startup(base)
    if mine is None or theirs is None:
        return {}
    extra = max(0.0, mine - theirs)

    def calls(ratio: float) -> float | None:
        saved = choice.time_us * 1e-6 * (1 / ratio - 1)
        return extra / saved if saved > 0 else None

    ends = (calls(choice.ratio), calls(choice.ratio_low), calls(choice.ratio_high))
    names = ("break_even_calls", "break_even_low", "break_even_high")
    return {name: value for name, value in zip(names, ends, strict=True) if value is not None}


def _lead(behind: Sequence[_Relative]) -> dict[str, Any]:
    """The fields about the best of those that are behind the choice."""
    if not behind:
        return {}
    next_one = behind[0]
    ends = {"lead": next_one.ratio, "lead_low": next_one.low, "lead_high": next_one.high}
    return {"runner_up": next_one.impl, **ends}


def _relatives(group: Sequence[Any], choice: Any, base: Any | None, known: dict[Any, Any]) -> Iterator[_Relative]:
    """How every other implementation stands to the choice."""
    for rival in _rivals(group, choice):
        pair = known.get(rival.result)
        if pair is not None:
            yield _Relative(rival.impl, pair.ratio, pair.ratio_low, pair.ratio_high, pair.verdict)
            continue
        low, high = rival.ratio_low / choice.ratio_high, rival.ratio_high / choice.ratio_low
        threshold = np.array([max(rival.threshold, choice.threshold)])
        (verdict,) = statistics.verdicts(
            np.array([low]), np.array([high]), np.zeros(1), threshold, statistics.PRACTICAL
        )
        yield _Relative(rival.impl, rival.ratio / choice.ratio, low, high, verdict or "undecided")
    if base is not None:
        yield _Relative(base.impl, 1 / choice.ratio, 1 / choice.ratio_high, 1 / choice.ratio_low, "slower")


def implementations(made: pd.DataFrame) -> pd.DataFrame:
    """What became of every implementation of a workload on a device.

    Args:
        made: what ``analysis.table.tabulate`` made of the records.

    Returns:
        One row per (machine, device, threads, regime, workload, impl), in order of appearance, with

        - ``cases`` and of these ``ok``, ``checked``, ``unsupported``, ``wrong``, and ``failed`` (failed, crashed or
          out of time);
        - ``compared`` and of these ``faster``, ``tie``, ``undecided``, ``slower``; ``baseline``: whether it is one;
        - ``geomean_speedup``: geometric mean over the compared cases (Fleming and Wallace, CACM 29, 1986);
        - ``sol_median``, ``startup_median_s``, ``error_worst``: median share of the limit, median start-up, largest
          error over its tolerance;
        - ``devices``: kinds of devices on which these records show it right, joined by commas.
    """
    shown = made[(made["workload"] != "ceiling") & (made["replica"] == 0)]
    key = [*PLACE, "workload", "impl"]
    timed = shown["time_us"] > 0
    status, verdict = shown["status"], shown["verdict"].where(timed)
    startup = shown["prepare_s"] + (shown["first_call_s"].fillna(0) - shown["time_us"] * 1e-6).clip(lower=0)
    counted = pd.DataFrame(
        {
            "cases": True,
            **{name: status == name for name in ("ok", "checked", "unsupported", "wrong")},
            "failed": status.isin(["failed", "crashed", "timeout"]),
            "compared": shown["ratio"].notna(),
            **{name: verdict == name for name in ("faster", "tie", "undecided", "slower", "baseline")},
        },
        index=shown.index,
    ).astype("int64")
    measured = pd.DataFrame(
        {
            "log_speedup": -np.log(shown["ratio"]),
            "sol_median": shown["sol_fraction"],
            "startup_median_s": startup,
            "error_worst": shown["error_worst"],
        }
    )
    by = [shown[name] for name in key]
    groups = {"sort": False, "dropna": False}
    summary = counted.groupby(by, **groups).sum()
    over = measured.groupby(by, **groups)
    summary["baseline"] = summary["baseline"] > 0
    summary["geomean_speedup"] = np.exp(over["log_speedup"].mean())
    for name in ("sol_median", "startup_median_s"):
        summary[name] = over[name].median()
    summary["error_worst"] = over["error_worst"].max()
    summary = summary.reset_index()
    right = shown[status.isin(["ok", "checked"])]
    kinds = {
        of: ", ".join(sorted(set(kinds)))
        for of, kinds in right.groupby(["workload", "impl"], sort=False)["device_kind"]
    }
    reached = [kinds.get(of, "") for of in zip(summary["workload"], summary["impl"], strict=True)]
    summary["devices"] = pd.Series(reached, summary.index, dtype="object")
    return summary
