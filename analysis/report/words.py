"""The report in words: figures with their units, and the sentences that answer.

Owns how a number is written and how an answer is phrased; plain text, which the page and the Markdown escape
themselves. It computes nothing but counts and medians of what it names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = Mapping[str, Any]
MISSING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"

#: answer -> what it means, in the order in which a report lists them.
ANSWERS = {
    "leave": "something is faster than the baseline",
    "undecided": "something may be faster: measure more rounds",
    "tie": "something is as fast, within the practical threshold",
    "stay": "nothing that was measured is faster",
    "uncompared": "timed, but without a ratio to the baseline",
    "alone": "only the baseline was timed",
    "no baseline": "the baseline was not timed",
    "nothing": "no implementation was timed",
}


def rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The rows of a table that is given as columns."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


# -- numbers ----------------------------------------------------------------------------------------------------------


def figure(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent from 1e-4 up to 1e6."""
    value = float(f"{value:.{digits - 1}e}")  # Rounded first: 99.96 has one decimal less than 99.4.
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        decimals = 0 if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits - 1}e}"


def scaled(value: float | None, unit: str) -> str:
    """A number with an SI prefix: ``231 GFLOP/s``."""
    if value is None:
        return MISSING
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale * 0.9995:
            return f"{figure(value / scale)} {prefix}{unit}"
    return f"{figure(value)} {unit}"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return MISSING
    for scale, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= scale:
            return f"{figure(value / scale)} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """A time with the unit that suits it."""
    if seconds is None:
        return MISSING
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "\N{MICRO SIGN}s")):
        if seconds >= scale * 0.9995:
            return f"{figure(seconds / scale)} {unit}"
    return f"{figure(seconds / 1e-9)} ns" if seconds else "0 s"


def percent(share: float | None) -> str:
    """A share in percent."""
    return MISSING if share is None else f"{figure(100 * share, 2 if abs(share) < 0.995 else 3)} %"


def _times(value: float) -> str:
    """A ratio: to three decimals where it is near 1."""
    return f"{value:.3f}" if 0.9 < value < 1.1 else figure(value)


def factor(value: float | None) -> str:
    """How many times."""
    return MISSING if value is None else f"{_times(value)}{TIMES}"


def interval(low: float | None, high: float | None) -> str:
    """The two ends of a ratio's interval."""
    return "" if low is None or high is None else f"[{_times(low)}, {_times(high)}]"


def calls(value: float | None) -> str:
    """A number of calls."""
    if value is None:
        return MISSING
    if value < 1:
        return "at once"
    for scale, word in ((1e9, "billion"), (1e6, "million")):
        if value >= scale * 0.9995:
            return f"{figure(value / scale)} {word}"
    return f"{value:,.0f}"


def count(number: int, noun: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(names: Iterable[str], most: int = 4) -> str:
    """Names in a row; the last ones counted where there are many."""
    every = list(names)
    if len(every) > most:
        return ", ".join(every[: most - 1]) + f" and {len(every) - most + 1} more"
    return " and ".join(filter(None, (", ".join(every[:-1]), every[-1]))) if every else ""


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The answers for one workload on one device.

    Attributes:
        workload: its name.
        baseline: what the others are compared with; None where it was never timed.
        cases: how many cases.
        answers: answer -> number of cases, in the order of ANSWERS.
        sentences: the answer in words.
    """

    workload: str
    baseline: str | None
    cases: int
    answers: dict[str, int]
    sentences: list[str]


def summaries(decisions: Sequence[Row], practical: float) -> list[Summary]:
    """One summary for every workload among the decisions of one device."""
    found = []
    for workload in dict.fromkeys(d["workload"] for d in decisions):
        of = [d for d in decisions if d["workload"] == workload]
        counted = Counter(d["answer"] for d in of)
        answers = {answer: counted[answer] for answer in ANSWERS if counted[answer]}
        baseline = next((d["baseline"] for d in of if d["baseline"]), None)
        found.append(Summary(workload, baseline, len(of), answers, _sentences(of, answers, baseline, practical)))
    return found


def _sentences(of: Sequence[Row], answers: Mapping[str, int], baseline: str | None, practical: float) -> list[str]:
    left = [d for d in of if d["answer"] == "leave"]
    compared = sum(answers.get(a, 0) for a in ("leave", "undecided", "tie", "stay"))
    sentences = []
    if left:
        speedups = sorted(d["speedup"] for d in left)
        names = Counter(d["choice"] for d in left)
        who = listed(f"{name} ({number})" for name, number in names.most_common())
        gains = factor(speedups[0]) if len(left) == 1 else f"{factor(speedups[0])} to {factor(speedups[-1])}"
        middle = f", median {factor(median(speedups))}" if len(left) > 2 else ""
        sentences.append(
            f"Leave {baseline} in {len(left)} of {count(compared, 'case')}, for {who}: {gains} as fast{middle}."
        )
    elif compared and answers.get("undecided", 0) == compared:
        sentences.append(
            f"Undecided in {count(compared, 'case')}: nothing is faster than {baseline} for certain. Measure more."
        )
    elif compared:
        sentences.append(f"Keep {baseline}: nothing measured is faster for certain in {count(compared, 'case')}.")
    rest = {
        "tie": f"ties within {percent(practical)} in {{}}",
        "stay": "nothing is faster in {}",
        "undecided": "{} undecided",
    }
    parts = [text.format(answers[name]) for name, text in rest.items() if 0 < answers.get(name, 0) < compared]
    if parts:
        sentences.append(_capital(", ".join(parts)) + ".")
    lost = {a: answers[a] for a in ("uncompared", "alone", "no baseline", "nothing") if a in answers}
    if lost:
        why = " or ".join(ANSWERS[a] + (f" ({number})" if len(lost) > 1 else "") for a, number in lost.items())
        sentences.append(f"{count(sum(lost.values()), 'case')} could not be compared: {why}.")
    shares = sorted(d["sol_fraction"] for d in of if d["sol_fraction"] is not None)
    if shares:
        reach = percent(shares[0]) if len(shares) == 1 else f"{percent(shares[0])} to {percent(shares[-1])}"
        middle = f" (median {percent(median(shares))})" if len(shares) > 2 else ""
        verb = "the choice reaches" if len(shares) == 1 else "the choices reach"
        where = "Where the limit is known, " if len(shares) < len(of) else ""
        sentences.append(_capital(f"{where}{verb} {reach}{middle} of what the measured ceilings allow."))
    return sentences


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def place(of: Row) -> str:
    """A device in words."""
    where = of["device"] if of["machine"] == of["device"] else f"{of['device']} ({of['machine']})"
    threads = f", {of['threads']:g} threads" if isinstance(of["threads"], int | float) else ""
    return f"{where}{threads}, {of['regime']}"
