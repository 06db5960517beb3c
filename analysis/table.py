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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import pandas as pd
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
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
        gexp_per_s: exponentials over the time, in 1e9/s; None for a case without.
        baseline: what the ratio is relative to.
        ratio, ratio_low, ratio_high: its time over the baseline's, paired by round: below 1 is faster.
        speedup: 1 / ratio.
        verdict: ``faster``, ``slower``, ``tie``, ``undecided`` or ``baseline``.
        threshold, q_value: what the verdict rests on.
        aa_ratio: the baseline's second replica over its first.
        sol_fraction, sol_roof, own_roof_fraction, intensity, counted_bytes, counted_intensity, ridge_point, class_ai,
            bound_by: see roofline.Placement.
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
    gexp_per_s: float | None
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
    counted_bytes: float | None
    counted_intensity: float | None
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
    made = tabulate(frame, run=run)[list(COLUMNS)]
    return [Row(*values) for values in zip(*(plain(made[c]) for c in COLUMNS), strict=True)]


def tabulate(frame: Frame, *, run: str | None = None) -> pd.DataFrame:
    """What ``rows`` gives, as a DataFrame indexed like ``frame.results``: what is missing is NaN or None.

    Beside the columns of Row it has ``workload``, ``stack``, ``device_kind``, ``method``, ``complete``, ``config``,
    ``paired_rounds`` and ``dtype`` (whose rate bounds the case).
    """
    results = frame.results
    wanted = _latest(results) if run is None else results["run"] == run
    # A result is compared with its own run's baseline, whether or not a later run has measured the baseline again.
    measured = frame.of(wanted | _baselines_of(results, wanted))
    cells = statistics.compare(measured)
    placed = roofline.placements(measured, cells["time_us"], roofline.ceilings(frame))
    made = results[wanted & ((results["replica"] == 0) | (results["status"] != "ok"))]
    made = made.join(cells.drop(columns="rounds"))

    places = [placed.get(result, _NOWHERE) for result in made.index]
    for name in _PLACED:
        values = [getattr(place, name) for place in places]
        made[name] = pd.Series(values, made.index, dtype="float64" if name in _NUMBERS else "object")
    work = {case: _work(case) for case in made["case"].unique()}
    each = [work[case] for case in made["case"]]
    for name, scale in (("flops", 1e-6), ("compulsory_bytes", 1e-3), ("exps", 1e-3)):
        amount = pd.Series([getattr(w, name, math.nan) for w in each], made.index, dtype="float64")
        rate = amount * scale / made["time_us"]
        made[_RATES[name]] = rate.where((rate > 0) | (name == "compulsory_bytes"))
    made["dtype"] = pd.Series([getattr(w, "dtype", None) for w in each], made.index, dtype="object")
    made["speedup"] = 1 / made["ratio"]

    unmeasured = ((made["status"] == "ok") & (made["rounds"] == 0)).map({True: "No round was measured.", False: None})
    unreadable = [w if isinstance(w, str) and not p.note else None for w, p in zip(each, places, strict=True)]
    reasons = zip(made["reason"], made["verdict_reason"], [p.note for p in places], unreadable, unmeasured, strict=True)
    made["reason"] = pd.Series(
        [" ".join(r for r in every if isinstance(r, str)) or None for every in reasons], made.index, dtype="object"
    )
    made["flags"] = pd.Series(["; ".join(map(str, flags)) for flags in made["flags"]], made.index, dtype="object")
    return _ordered(made)[[*COLUMNS, *_BESIDE]]


_NOWHERE = roofline.Placement()
_NUMBERS = ("sol_fraction", "own_roof_fraction", "intensity", "counted_bytes", "counted_intensity", "ridge_point")
_PLACED = (*_NUMBERS, "sol_roof", "class_ai", "bound_by")
_RATES = {"flops": "tflop_per_s", "compulsory_bytes": "gb_per_s", "exps": "gexp_per_s"}
_BESIDE = ("workload", "stack", "device_kind", "method", "complete", "config", "paired_rounds", "dtype")


def _latest(results: pd.DataFrame) -> pd.Series:
    """Which results belong to the latest run that holds their case and implementation on their device."""
    key = [results[c] for c in ("machine", "device", "threads", "regime", "case", "impl")]
    age = pd.Series(pd.factorize(results["run"], sort=True)[0], results.index)  # Run ids sort by time.
    return age == age.groupby(key, dropna=False, sort=False).transform("max")


def _baselines_of(results: pd.DataFrame, wanted: pd.Series) -> pd.Series:
    """Which results are of the baseline, in the same run and of the same case as a wanted one."""
    about = ["run", "case", "regime"]
    shared = pd.MultiIndex.from_frame(results[about]).isin(pd.MultiIndex.from_frame(results.loc[wanted, about]))
    return (results["impl"] == statistics.baselines(results)) & shared


def _work(case: str) -> roofline.Work | str:
    """The work of a case, or why its id cannot be read."""
    try:
        return roofline.work(case)
    except CaseError as error:
        return f"This case cannot be read here: {error}."


def plain(column: pd.Series) -> list[Any]:
    """A column's values as plain Python values; None for what is missing."""
    missing = column.isna()
    values: list[Any] = column.to_numpy(dtype=object).tolist()
    if not missing.any():
        return values
    return [None if gone else value for gone, value in zip(missing, values, strict=True)]


def _ordered(made: pd.DataFrame) -> pd.DataFrame:
    """By machine and regime; cases in their order of appearance; the baseline first, then by time."""
    key = pd.DataFrame(
        {
            "threads": pd.to_numeric(made["threads"], errors="coerce").fillna(0),
            "last": made["workload"] == "ceiling",
            "case": pd.factorize(made["case"])[0],
            "second": made["verdict"] != "baseline",
        }
    )
    order = [made["machine"], made["device"], key["threads"], made["regime"], key["last"], key["case"], key["second"]]
    order += [made["time_us"], made["impl"], made["replica"]]
    wanted = pd.concat(order, axis=1, keys=range(len(order))).sort_values(list(range(len(order))), kind="stable")
    return made.loc[wanted.index]


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
# Heading -> how soon the column is left out on a narrow terminal (0: never).
_HEADINGS = {
    "implementation": 0,
    "time": 0,
    "": 5,  # half-width of the time's interval
    "rate": 4,
    "ratio": 0,
    "its interval": 1,
    "verdict": 0,
    "of limit": 0,
    "class": 3,
    "bound by": 2,
    "error": 6,
    "note": 0,
}
_LEFT = ("implementation", "verdict", "class", "bound by")


def rich_table(table: Sequence[Row]) -> RenderableType:
    """The rows for a terminal: one table per device and regime, one section per case, notes, and how to read it."""
    if not table:
        return Text("No results.")
    by_device = itertools.groupby(table, key=lambda r: (r.machine, r.device, r.threads, r.regime))
    return Group(*(_DeviceTable(list(of)) for _, of in by_device))


class _DeviceTable:
    """The rows of one device and regime. It leaves out columns, least important first, until it fits the terminal."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.notes: dict[str, int] = {}
        self.cells = [self._cells(row) for row in rows]

    def _cells(self, row: Row) -> dict[str, Text]:
        notes = [n for n in (row.reason, row.flags) if n]
        numbers = [str(self.notes.setdefault(note, len(self.notes) + 1)) for note in notes]
        word = row.verdict or ("" if row.status == "ok" else row.status)
        timed = row.time_us is not None
        cells = {
            "implementation": "  " + row.impl + (f" (replica {row.replica})" if row.replica else ""),
            "time": _time(row.time_us) if row.time_us is not None else "",
            "": f"±{_half_width(row):.1f} %" if timed else "",
            "rate": _rate(row),
            "ratio": "" if row.ratio is None else _three(row.ratio),
            "its interval": "" if row.ratio is None else f"[{_three(row.ratio_low)}, {_three(row.ratio_high)}]",
            "verdict": word,
            "of limit": "" if row.sol_fraction is None else f"{100 * row.sol_fraction:.0f} %",
            "class": row.class_ai or "",
            "bound by": row.bound_by or "",
            "error": "" if row.error_worst is None else f"{row.error_worst:.2g}",
            "note": ",".join(numbers),
        }
        return {
            h: Text(printable(c), style=_COLOURS.get(word, "magenta") if h == "verdict" else "")
            for h, c in cells.items()
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = self.rows[0]
        where = first.device if first.machine == first.device else f"{first.machine}: {first.device}"
        threads = f", {first.threads:g} threads" if first.threads else ""
        yield Text(printable(f"{where}{threads}, {first.regime}"), style="bold underline")

        width = {h: max(len(h), *(cells[h].cell_len for cells in self.cells)) for h in _HEADINGS}
        kept = [h for h in _HEADINGS if h == "implementation" or any(cells[h].plain for cells in self.cells)]
        left_out = []
        while sum(width[h] + 2 for h in kept) - 2 > options.max_width and any(_HEADINGS[h] for h in kept):
            least = max(kept, key=_HEADINGS.__getitem__)
            kept.remove(least)
            left_out.append(least or "interval of the time")

        yield self._grid(kept, width, {h: Text(h, style="bold") for h in kept})
        for case, of in itertools.groupby(zip(self.rows, self.cells, strict=True), key=lambda pair: pair[0].case):
            yield Text(printable(case), style="bold", overflow="fold")
            yield self._grid(kept, width, *(cells for _, cells in of))
        yield Text()
        for note, number in self.notes.items():
            yield Text(f"{number}  {printable(note)}")
        lines = _legend(self.rows)
        if left_out:
            lines.append(f"Left out on this narrow terminal: {', '.join(left_out)} (--csv and --json have everything).")
        yield Text("\n".join(lines) + "\n", style="dim")

    @staticmethod
    def _grid(kept: Sequence[str], width: dict[str, int], *rows: dict[str, Text]) -> Table:
        grid = Table.grid(padding=(0, 2, 0, 0))
        for h in kept:
            grid.add_column(width=width[h], no_wrap=True, justify="left" if h in _LEFT else "right")
        for cells in rows:
            grid.add_row(*(cells[h] for h in kept))
        return grid


def _three(ratio: float | None) -> str:
    """A ratio: to three decimals where it is near 1, else to three digits."""
    if ratio is None:
        return ""
    return f"{ratio:.3f}" if 0.1 <= ratio < 2 else f"{ratio:.3g}"


def _time(us: float) -> str:
    scale, unit = next((s, u) for s, u in ((1e6, "s"), (1e3, "ms"), (1.0, "us")) if us >= s or s == 1.0)
    return f"{us / scale:.4g} {unit}"


def _half_width(row: Row) -> float:
    """Half-width of the time's interval, in percent of the time."""
    assert row.time_us and row.time_low_us is not None and row.time_high_us is not None
    return 50 * (row.time_high_us - row.time_low_us) / row.time_us


def _rate(row: Row) -> str:
    """The rate on the roof that limits the case; operations where no roof is known."""
    probe = row.case.split(":")[1] if row.case.startswith("ceiling:") else None
    if row.gb_per_s is not None and (probe in ("read", "copy") or (probe is None and row.sol_roof == "memory")):
        return f"{row.gb_per_s:.3g} GB/s"
    if row.gexp_per_s is not None and probe == "exp":
        return f"{row.gexp_per_s:.3g} Gexp/s"
    if row.tflop_per_s is None:
        return ""
    return f"{row.tflop_per_s:.3g} TFLOP/s" if row.tflop_per_s >= 1 else f"{1e3 * row.tflop_per_s:.3g} GFLOP/s"


def _legend(chosen: Sequence[Row]) -> list[str]:
    lines = []
    if any(row.ratio is not None for row in chosen):
        lines.append(
            "ratio: time over the baseline's, paired by round, and its 95 % interval; a tie where all of it is within "
            f"{100 * statistics.PRACTICAL:.0f} %, faster or slower where all is beyond that and the A/A difference."
        )
        departures = [abs(math.log(r.aa_ratio)) for r in chosen if r.verdict == "baseline" and r.aa_ratio]
        lines.append(
            f"A/A difference of the baseline: at most {100 * math.expm1(max(departures)):.1f} %."
            if departures
            else "There is no A/A pair: the noise between processes is unknown."
        )
    if any(row.sol_fraction is not None for row in chosen):
        lines.append("of limit: the least time that the measured ceilings allow, over the time.")
    if any(row.error_worst is not None for row in chosen):
        lines.append("error: largest error over its tolerance.")
    return lines


def printable(text: str) -> str:
    """Text from records without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
