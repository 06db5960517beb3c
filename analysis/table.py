"""The table of results: one row per case and implementation, with everything the analysis says about it.

Owns the columns, their order, and their forms as JSON, CSV and a terminal table. It computes nothing but rates: times
and verdicts come from ``analysis.statistics``, classes from ``analysis.roofline``.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from analysis import roofline, statistics
from analysis.frame import Frame, from_lines
from benchmarks.engine.records import Loaded
from impls.workloads.base import CaseError


@dataclass(frozen=True)
class Row:
    """One result. Fields are None where there is nothing to say; ``reason`` says why.

    Attributes:
        machine, device, threads, regime: where and how it ran.
        case, impl, replica: what ran; replicas above 0 appear only where they failed.
        run, when: which run it comes from: the latest that holds it.
        status: ``ok``, ``checked``, ``unsupported``, ``wrong``, ``failed``, ``crashed`` or ``timeout``.
        rounds: rounds that were timed.
        time_us, time_low_us, time_high_us: median over rounds of the blocks' medians, and its 95 % interval.
        tflop_per_s: nominal FLOPs (for i8: integer operations) over the time, in 1e12/s.
        gb_per_s: compulsory bytes over the time, in 1e9/s.
        baseline: what the ratio is relative to.
        ratio, ratio_low, ratio_high: its time over the baseline's, paired by round: below 1 is faster.
        speedup: 1 / ratio.
        verdict: ``faster``, ``slower``, ``tie``, ``undecided`` or ``baseline``.
        threshold, q_value: what the verdict rests on.
        aa_ratio: the baseline's second replica over its first.
        sol_fraction, sol_roof, own_roof_fraction, intensity, ridge_point, class_ai, bound_by: see roofline.Placement.
        error_worst: largest error over its tolerance; at most 1 where the output is right.
        prepare_s, first_call_s, peak_memory_bytes: what it costs beside time.
        flags: the record's remarks.
        reason: why a field is empty or a verdict open, in sentences.
    """

    machine: str
    device: str
    threads: int | None
    regime: str
    case: str
    impl: str
    replica: int
    run: str
    when: str | None
    status: str
    rounds: int
    time_us: float | None
    time_low_us: float | None
    time_high_us: float | None
    tflop_per_s: float | None
    gb_per_s: float | None
    baseline: str | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    speedup: float | None
    verdict: str | None
    threshold: float | None
    q_value: float | None
    aa_ratio: float | None
    sol_fraction: float | None
    sol_roof: str | None
    own_roof_fraction: float | None
    intensity: float | None
    ridge_point: float | None
    class_ai: str | None
    bound_by: str | None
    error_worst: float | None
    prepare_s: float | None
    first_call_s: float | None
    peak_memory_bytes: float | None
    flags: str
    reason: str | None


COLUMNS = tuple(field.name for field in fields(Row))


def rows(records: Loaded | Frame, *, run: str | None = None) -> list[Row]:
    """The rows of ``records``: per machine, device, regime, case and implementation the latest run's result.

    Ratios are taken within a run, never across. Ceilings are the best of all the machine's runs.

    Args:
        run: only this run's results.
    """
    frame = records if isinstance(records, Frame) else from_lines(records.lines)
    shown = frame.of(_latest(frame.results) if run is None else frame.results["run"] == run)
    cells = statistics.compare(shown)
    placed = roofline.placements(shown, cells["time_us"], roofline.ceilings(frame))
    table = shown.results.join(cells.drop(columns="rounds"))
    made = [
        _row(record, placed.get(record["result"]))
        for record in table.reset_index().to_dict(orient="records")
        if record["replica"] == 0 or record["status"] != "ok"
    ]
    return _ordered(made)


def _latest(results: pd.DataFrame) -> pd.Series:
    """Which results belong to the latest run that holds their case and implementation on their device."""
    key = [results[c] for c in ("machine", "device", "threads", "regime", "case", "impl")]
    newest = results["run"].groupby(key, dropna=False).transform("max")  # Run ids sort by time.
    return results["run"] == newest


def _row(record: dict[Any, Any], placement: roofline.Placement | None) -> Row:
    place = placement or roofline.Placement()
    rate = dict.fromkeys(("tflop_per_s", "gb_per_s"))
    time_us, trouble = _value(record["time_us"]), None
    if time_us:
        try:
            work = roofline.work(record["case"])
            rate = {
                "tflop_per_s": work.flops / time_us * 1e-6 or None,
                "gb_per_s": work.compulsory_bytes / time_us * 1e-3,
            }
        except CaseError as error:
            trouble = None if place.missing else f"This case cannot be read here: {error}."
    reasons = [record["reason"], record["verdict_reason"], place.missing, trouble]
    if record["status"] == "ok" and not record["rounds"]:
        reasons.append("No round was measured.")
    own = {
        "sol_fraction": place.sol_fraction,
        "sol_roof": place.sol_roof,
        "own_roof_fraction": place.own_roof_fraction,
        "intensity": place.intensity,
        "ridge_point": place.ridge_point,
        "class_ai": place.class_ai,
        "bound_by": place.bound_by,
        "speedup": 1 / record["ratio"],
        "flags": "; ".join(record["flags"]),
        "reason": " ".join(r for r in reasons if isinstance(r, str)) or None,
    }
    return Row(**{name: _value((own | rate).get(name, record.get(name))) for name in COLUMNS})


def _value(value: Any) -> Any:
    """A plain Python value; None for what is missing."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return None
    return value.item() if hasattr(value, "item") else value


def _ordered(made: Iterable[Row]) -> list[Row]:
    """By machine and regime; cases in their order of appearance; the baseline first, then by time."""
    made = list(made)
    seen = {case: i for i, case in enumerate(dict.fromkeys(row.case for row in made))}

    def place(row: Row) -> tuple[Any, ...]:
        of = (row.machine, row.device, row.threads or 0, row.regime, row.case.startswith("ceiling:"), seen[row.case])
        return (*of, row.verdict != "baseline", row.time_us is None, row.time_us or 0.0, row.impl, row.replica)

    return sorted(made, key=place)


def to_json(table: Sequence[Row]) -> str:
    """The rows as a JSON array of objects with the columns in order; what is missing is null."""
    return json.dumps([asdict(row) for row in table], indent=1, allow_nan=False)


def to_csv(table: Sequence[Row]) -> str:
    """The rows as CSV with a header; what is missing is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in table)
    return out.getvalue()


# -- terminal ---------------------------------------------------------------------------------------------------------

_COLOURS = {"faster": "green", "slower": "red", "tie": "cyan", "undecided": "yellow", "baseline": "bold"}


def rich_table(table: Sequence[Row]) -> RenderableType:
    """The rows for a terminal: one table per device and regime, one section per case, and how to read it."""
    if not table:
        return Text("No results.")
    parts: list[RenderableType] = []
    for (machine, device, threads, regime), of in itertools.groupby(
        table, key=lambda r: (r.machine, r.device, r.threads, r.regime)
    ):
        chosen = list(of)
        title = f"{_plain(device)}" + (f", {threads:g} threads" if threads else "") + f", {_plain(regime)}"
        parts.append(_device_table(chosen, title if machine == device else f"{_plain(machine)}: {title}"))
        parts.append(Text(_legend(chosen), style="dim"))
    return Group(*parts)


def _device_table(chosen: Sequence[Row], title: str) -> Table:
    grid = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    grid.add_column("implementation", no_wrap=True)
    for heading in ("time", "rate", "time / baseline"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    grid.add_column("of limit", justify="right", no_wrap=True)
    for heading in ("bound (class, by)", "error", "reason"):
        grid.add_column(heading, overflow="fold")
    for case, of in itertools.groupby(chosen, key=lambda r: r.case):
        grid.add_section()
        grid.add_row(Text(_plain(case), style="bold"))
        for row in of:
            name = row.impl if row.replica == 0 else f"{row.impl} (replica {row.replica})"
            word = row.verdict or ("" if row.status == "ok" else row.status)
            ratio = "" if row.ratio is None else f"{row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
            bound = ", ".join(filter(None, (row.class_ai and row.class_ai.removesuffix("-bound"), row.bound_by)))
            grid.add_row(
                Text("  " + _plain(name)),
                Text(_time(row)),
                Text(_rate(row)),
                Text(ratio),
                Text(word, style=_COLOURS.get(word, "magenta")),
                Text("" if row.sol_fraction is None else f"{100 * row.sol_fraction:.0f} %"),
                Text(bound),
                Text("" if row.error_worst is None else f"{row.error_worst:.2g}"),
                Text(_plain(" ".join(filter(None, (row.reason, row.flags))))),
            )
    return grid


def _time(row: Row) -> str:
    if row.time_us is None or row.time_low_us is None or row.time_high_us is None:
        return ""
    scale, unit = next((s, u) for s, u in ((1e6, "s"), (1e3, "ms"), (1.0, "us")) if row.time_us >= s or s == 1.0)
    half = 100 * (row.time_high_us - row.time_low_us) / 2 / row.time_us
    return f"{row.time_us / scale:.4g} {unit} ±{half:.1f} %"


def _rate(row: Row) -> str:
    """The rate on the roof that limits the case; operations where no roof is known."""
    moves = row.sol_roof == "memory" or row.case.startswith(("ceiling:read", "ceiling:copy"))
    if row.gb_per_s is not None and (moves or (row.tflop_per_s is None and not row.case.startswith("ceiling:"))):
        return f"{row.gb_per_s:.3g} GB/s"
    if row.tflop_per_s is None:
        return ""
    return f"{row.tflop_per_s:.3g} TFLOP/s" if row.tflop_per_s >= 1 else f"{1e3 * row.tflop_per_s:.3g} GFLOP/s"


def _legend(chosen: Sequence[Row]) -> str:
    lines = []
    if any(row.ratio is not None for row in chosen):
        lines.append(
            "time / baseline: paired by round, with its 95 % interval; faster or slower where all of it is beyond "
            f"{100 * statistics.PRACTICAL:.0f} % (or the baseline's own A/A difference), a tie where all is within."
        )
        departures = sorted(abs(math.log(r.aa_ratio)) for r in chosen if r.verdict == "baseline" and r.aa_ratio)
        if departures:
            lines.append(f"A/A difference of the baseline: at most {100 * math.expm1(departures[-1]):.1f} %.")
        else:
            lines.append("There is no A/A pair: the noise between processes is unknown.")
    if any(row.sol_fraction is not None for row in chosen):
        lines.append("of limit: least possible time by the measured ceilings, over the time.")
    if any(row.error_worst is not None for row in chosen):
        lines.append("error: largest error over its tolerance.")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text from records without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
