"""The report as one HTML page that needs nothing beside itself.

Owns the page's static part (what is read first, and what is read without JavaScript) and the packing of what its
script draws from: the report's own JSON, and plotly.js out of the plotly package, each compressed once. Jinja escapes
whatever comes from the report; the compressed data holds no markup by construction.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from analysis.report import words

_TEMPLATES = files("analysis.report") / "templates"
#: How many rows the static tables show; everything is in the report's data.
MOST_LEAVING = 12
MOST_PROBLEMS = 200
#: What the logarithmic axis of the interval graphics may reach: 1.21, for example, from 1/1.21 to 1.21.
REACHES = (1.21, 4.0, 16.0)


def render(report: Mapping[str, Any], data: bytes) -> bytes:
    """The page of ``report``; ``data`` is the report as JSON."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals.update(
        {name: getattr(words, name) for name in ("count", "duration", "factor", "figure", "interval", "listed")},
        scaled=words.scaled, percent=words.percent, size=words.size, calls=words.calls,
        span=_span, axis=_axis, flat=_flat, ANSWERS=words.ANSWERS,
    )  # fmt: skip
    text = environment.get_template("page.html.j2").render(
        report=report,
        places=_places(report),
        problems=report["problems"][:MOST_PROBLEMS],
        problems_left_out=max(0, len(report["problems"]) - MOST_PROBLEMS),
        runs=words.rows(report["runs"]),
        css=_asset("report.css"),
        js=_asset("report.js"),
        data=_packed(data, 6),
        plotly=_plotly(),
    )
    return text.encode()


def _source(name: str) -> str:
    return (_TEMPLATES / name).read_text()


def _asset(name: str) -> Markup:
    """Our own style or script, which must not be escaped."""
    return Markup(_source(name))


def _packed(data: bytes, level: int) -> str:
    """Compressed, and in an alphabet that HTML leaves alone."""
    return base64.b64encode(gzip.compress(data, level, mtime=0)).decode()


@cache
def _plotly() -> str:
    return _packed((files("plotly") / "package_data" / "plotly.min.js").read_bytes(), 9)


def _places(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every device with its answers in words, the cases to leave the baseline in, and its implementations."""
    decisions: list[list[dict[str, Any]]] = [[] for _ in report["places"]]
    for decision in words.rows(report["decisions"]):
        decisions[decision["place"]].append(decision)
    implementations: list[list[dict[str, Any]]] = [[] for _ in report["places"]]
    for row in words.rows(report["implementations"]):
        implementations[row["place"]].append(row)
    shown = []
    facts = [place["facts"] for place in report["places"]]
    for number, place in enumerate(report["places"]):
        leave = sorted(
            (d for d in decisions[number] if d["answer"] == "leave"), key=lambda d: d["speedup"], reverse=True
        )
        shown.append(
            place
            | {
                "number": number,
                "same_machine": facts.index(place["facts"]) if place["facts"] in facts[:number] else None,
                "title": words.place(place),
                "summaries": words.summaries(decisions[number], report["method"]["practical"]),
                "leave": leave[:MOST_LEAVING],
                "reach": _reach(leave[:MOST_LEAVING]),
                "leave_left_out": max(0, len(leave) - MOST_LEAVING),
                "implementations": _by_merit(implementations[number]),
            }
        )
    return shown


def _by_merit(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By workload; the baseline first, then those with the best mean; those without any last."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        speedup = row["geomean_speedup"]
        return (workloads.index(row["workload"]), not row["baseline"], speedup is None, -(speedup or 0.0), row["impl"])

    return sorted(rows, key=key)


def _reach(leave: Sequence[Mapping[str, Any]]) -> float:
    """How far the interval graphics' axis reaches, either way from 1: the least that shows nearly all of them."""
    ends = sorted(abs(math.log(d[name])) for d in leave for name in ("speedup_low", "speedup_high") if d[name])
    most = ends[int(0.9 * (len(ends) - 1))] if ends else 0.0
    return next((reach for reach in REACHES if most <= math.log(reach)), REACHES[-1])


def _span(speedup: float | None, reach: float) -> str:
    """Where a speedup lies on the interval graphics' axis, as a CSS percentage."""
    if speedup is None:
        return "50%"
    return f"{100 * min(1.0, max(0.0, 0.5 + 0.5 * math.log(speedup) / math.log(reach))):.2f}%"


def _axis(reach: float) -> list[str]:
    """The labels of that axis: its two ends and its middle."""
    return [f"{end:.2g}" for end in (1 / reach, 1.0, reach)]


#: How a fact whose name ends so is written.
_UNITS: dict[str, Callable[[float], str]] = {
    "_bytes": words.size,
    "_bytes_per_s": lambda value: words.scaled(value, "B/s"),
    "_hz": lambda value: words.scaled(value, "Hz"),
    "_w": lambda value: words.scaled(value, "W"),
}


def _flat(facts: Any) -> list[tuple[str, str]]:
    """Nested facts as (name, text) pairs, whatever they hold."""
    if not isinstance(facts, Mapping):
        return []
    pairs = []
    for name, value in facts.items():
        end = next((end for end in _UNITS if str(name).endswith(end)), "")
        label = str(name).removesuffix(end).replace("_", " ")
        if value is None or value == [] or value == {}:
            continue
        if end and isinstance(value, int | float):
            pairs.append((label, _UNITS[end](value)))
        elif name == "caches" and isinstance(value, Sequence) and all(isinstance(v, Mapping) for v in value):
            pairs += [(f"L{c.get('level')} {c.get('kind')}", _cache(c)) for c in value]
        elif isinstance(value, str | int | float):
            pairs.append((label, str(value)))
        elif isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
            pairs.append((label, ", ".join(map(str, value))))
        elif isinstance(value, Mapping):
            pairs += [(f"{label} {inner}", text) for inner, text in _flat(value)]
        elif isinstance(value, list) and all(isinstance(v, Mapping) for v in value):
            pairs += [(f"{label} {inner}", text) for v in value for inner, text in _flat(v)]
        else:
            pairs.append((label, json.dumps(value)))
    return pairs


def _cache(of: Mapping[str, Any]) -> str:
    bytes_ = of.get("bytes")
    each = words.size(bytes_) if isinstance(bytes_, int | float) else str(bytes_)
    return f"{of.get('instances')} {words.TIMES} {each}"
