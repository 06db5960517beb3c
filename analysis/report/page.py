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
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from analysis.report import words

_TEMPLATES = files("analysis.report") / "templates"
#: How many rows the static tables show; everything is in the report's data.
MOST_LEAVING = 12
MOST_PROBLEMS = 200
#: The interval graphics span speedups from 1/4 to 4, logarithmically.
_SPAN = math.log(4)


def render(report: Mapping[str, Any], data: bytes) -> bytes:
    """The page of ``report``; ``data`` is the report as JSON."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals.update(
        {name: getattr(words, name) for name in ("count", "duration", "factor", "figure", "interval", "listed")},
        scaled=words.scaled, percent=words.percent, size=words.size, calls=words.calls,
        span=_span, flat=_flat, ANSWERS=words.ANSWERS,
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


def _asset(name: str) -> Any:
    """Our own style or script, which must not be escaped."""
    from markupsafe import Markup

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
    for number, place in enumerate(report["places"]):
        leave = sorted(
            (d for d in decisions[number] if d["answer"] == "leave"), key=lambda d: d["speedup"], reverse=True
        )
        shown.append(
            place
            | {
                "number": number,
                "title": words.place(place),
                "summaries": words.summaries(decisions[number], report["method"]["practical"]),
                "leave": leave[:MOST_LEAVING],
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


def _span(speedup: float | None) -> str:
    """Where a speedup lies on the interval graphics' axis, as a CSS percentage."""
    if speedup is None:
        return "50%"
    return f"{100 * min(1.0, max(0.0, 0.5 + 0.5 * math.log(speedup) / _SPAN)):.2f}%"


def _flat(facts: Any) -> list[tuple[str, str]]:
    """Nested facts as (name, text) pairs, whatever they hold."""
    if not isinstance(facts, Mapping):
        return []
    pairs = []
    for name, value in facts.items():
        label = str(name).removesuffix("_bytes").replace("_", " ")
        if value is None or value == [] or value == {}:
            continue
        if str(name).endswith("_bytes") and isinstance(value, int | float):
            pairs.append((label, words.size(value)))
        elif name == "caches" and isinstance(value, Sequence) and all(isinstance(v, Mapping) for v in value):
            pairs += [(f"L{c.get('level')} {c.get('kind')}", _cache(c)) for c in value]
        elif isinstance(value, str | int | float):
            pairs.append((label, str(value)))
        elif isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
            pairs.append((label, ", ".join(map(str, value))))
        else:
            pairs.append((label, json.dumps(value)))
    return pairs


def _cache(of: Mapping[str, Any]) -> str:
    bytes_ = of.get("bytes")
    each = words.size(bytes_) if isinstance(bytes_, int | float) else str(bytes_)
    return f"{of.get('instances')} {words.TIMES} {each}"
