"""The report as Markdown, for a pull request.

Owns what is left of a report where space is short: the answer, where to leave the baseline, every case's best and its
verdict, what went wrong, what is missing. A comment on GitHub holds 65,536 characters: rows are left out, and counted,
before that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.report import words

MOST_CHARACTERS = 60_000
_MOST_ROWS = {"leave": 20, "cases": 120, "problems": 40, "notes": 20}


def render(report: Mapping[str, Any]) -> str:
    """The Markdown of ``report``, at most MOST_CHARACTERS long."""
    for share in (1.0, 0.5, 0.2, 0.05):
        text = _document(report, {name: max(1, int(share * most)) for name, most in _MOST_ROWS.items()})
        if len(text) <= MOST_CHARACTERS:
            return text
    return text[:MOST_CHARACTERS].rsplit("\n", 1)[0] + "\n\nThe rest is in report.json.\n"


def _document(report: Mapping[str, Any], most: Mapping[str, int]) -> str:
    practical = report["method"]["practical"]
    counts = report["counts"]
    parts = [
        "# Ridgemark report\n",
        f"{words.count(counts['cases'], 'case')}, {words.count(counts['implementations'], 'implementation')}, "
        f"{words.count(counts['runs'], 'run')}; {_text(report['generated'])}, {_text(report['generator'])}.\n",
    ]
    if not report["places"]:
        parts.append("**There is no result in these records.**\n")
    decisions = words.rows(report["decisions"])
    for number, place in enumerate(report["places"]):
        here = [d for d in decisions if d["place"] == number]
        parts += _place(place, here, practical, most)
    several = len(report["places"]) > 1
    problems = [_problem(p, report["places"] if several else None) for p in report["problems"]]
    if problems:
        heads = [*(["device"] if several else []), "status", "implementation", "why", "cases"]
        parts += ["## Refused, wrong or failed\n", _table(heads, "l" * len(heads), problems, most["problems"])]
    if report["notes"]:
        shown = report["notes"][: most["notes"]]
        parts.append("## What is missing, and what to know\n")
        parts.append("".join(f"- {_text(note)}\n" for note in shown))
        if len(report["notes"]) > len(shown):
            parts.append(f"\n{len(report['notes']) - len(shown)} more notes are in report.json.\n")
    parts.append(
        "\n<sub>Speedup: the baseline's time over the implementation's, paired by round, with its 95 % interval. "
        f"Tie: all of it within {words.percent(practical)}. Of the limit: the least time that the measured ceilings "
        "allow, over the time. The plots and every number are in index.html and report.json.</sub>\n"
    )
    return "\n".join(parts)


def _place(
    place: Mapping[str, Any], decisions: Sequence[words.Row], practical: float, most: Mapping[str, int]
) -> Iterable[str]:
    yield f"## {_text(words.place(place))}\n"
    for summary in words.summaries(decisions, practical):
        first, *rest = summary.sentences or ["Nothing was timed."]
        yield f"**{_text(summary.workload)}**: **{_text(first)}** {_text(' '.join(rest))}\n"
    if place["noise_floor"] is not None:
        yield f"Noise floor (A/A, 95 % of the cases): {words.percent(place['noise_floor'])}.\n"
    leave = sorted((d for d in decisions if d["answer"] == "leave"), key=lambda d: d["speedup"], reverse=True)
    if leave:
        heads = ["leave the baseline in", "run", "speedup", "of the limit", "start-up (baseline)", "pays after calls"]
        heads += ["error / tolerance (baseline)"]
        yield _table(heads, "llrrrrr", [_leaving(d) for d in leave], most["leave"])
    others = [d for d in decisions if d["answer"] != "leave"]
    if others:
        yield f"<details><summary>{'The other' if leave else 'All'} cases</summary>\n"
        heads = ["case", "answer", "best beside the baseline", "speedup", "of the limit"]
        yield _table(heads, "lllrr", [_staying(d) for d in others], most["cases"])
        yield "</details>\n"


def _leaving(d: words.Row) -> list[str]:
    names = _code(d["choice"])
    if d["as_good"]:
        names += f"; as good: {', '.join(map(_code, d['as_good'][:3]))}"
    errors = [words.MISSING if e is None else words.figure(e, 2) for e in (d["error_worst"], d["baseline_error_worst"])]
    return [
        _code(d["case"]),
        names,
        f"{words.factor(d['speedup'])} {words.interval(d['speedup_low'], d['speedup_high'])}",
        words.percent(d["sol_fraction"]),
        f"{words.duration(d['startup_s'])} ({words.duration(d['baseline_startup_s'])})",
        words.calls(d["break_even_calls"]),
        f"{errors[0]} ({errors[1]})",
    ]


def _staying(d: words.Row) -> list[str]:
    speedup = words.MISSING
    if d["speedup"] is not None:
        speedup = f"{words.factor(d['speedup'])} {words.interval(d['speedup_low'], d['speedup_high'])}"
    best = _code(d["best"]) if d["best"] else words.MISSING
    return [_code(d["case"]), d["answer"], best, speedup, words.percent(d["sol_fraction"])]


def _problem(problem: Mapping[str, Any], places: Sequence[words.Row] | None) -> list[str]:
    where = [] if places is None else [_text(words.place(places[problem["place"]]))]
    why = _text(problem["reason"] or "No reason was recorded.")
    return [*where, problem["status"], _code(problem["impl"]), why, _cases(problem)]


def _cases(problem: Mapping[str, Any]) -> str:
    if problem["count"] == 1:
        return _code(problem["cases"][0])
    return f"{problem['count']:,}"


def _table(heads: Sequence[str], align: str, rows: Sequence[Sequence[str]], most: int) -> str:
    rule = ["--:" if a == "r" else "---" for a in align]
    lines = [_row(heads), _row(rule), *(_row(row) for row in rows[:most])]
    if len(rows) > most:
        lines.append(f"\n{len(rows) - most:,} more are in report.json.")
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(value: Any) -> str:
    """Text from records without any meaning in Markdown or HTML, on one line."""
    text = " ".join(str(value).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = text.replace("://", "&#58;//").replace("www.", "www&#46;")  # GitHub links these by itself.
    return re.sub(r"[\\`*_\[\]#|~@$]", lambda found: f"&#{ord(found[0])};", text)


def _code(value: Any) -> str:
    """A name in monospaced type, whatever characters it has."""
    return f"<code>{_text(value)}</code>"
