"""What a report holds, as JSON values: the one model behind the page, the Markdown and ``report.json``.

Owns the model's shape, which ``schema.json`` describes; every number in it comes from the rest of the analysis. Tables
are columns of equal length (``pandas.DataFrame(report["results"])`` reads one), so that 100,000 results stay small.
``place`` is an index into ``places`` (the device that was measured last comes first), ``run`` one into ``runs``,
``config`` one into ``configs``. Numbers are rounded to six significant digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import orjson
import pandas as pd

from analysis import decision, roofline, statistics, table
from analysis.decision import PLACE, Decision
from analysis.frame import Frame
from analysis.report import series
from benchmarks.engine.memory import INPUT_SETS
from impls.workloads.base import parse_case
from impls.workloads.ceiling import Ceiling

SCHEMA = 1
_RESULTS = (
    *("place", "run", "case", "dtype", "impl", "replica", "status", "method", "rounds", "complete"),
    *("time_us", "time_low_us", "time_high_us", "tflop_per_s", "gb_per_s", "gexp_per_s"),
    *("baseline", "ratio", "ratio_low", "ratio_high", "paired_rounds", "verdict", "threshold", "q_value", "aa_ratio"),
    *("sol_fraction", "sol_roof", "own_roof_fraction", "intensity", "counted_bytes", "counted_intensity"),
    *("ridge_point", "class_ai", "bound_by"),
    *("error_worst", "prepare_s", "first_call_s", "peak_memory_bytes", "flags", "reason", "config", "versions"),
)
_DIGITS = 6
_CASES_NAMED = 20
_NOTES = 200


def of(frame: Frame) -> dict[str, Any]:
    """The report of ``frame``: see ``schema.json``."""
    made = table.tabulate(frame)
    decisions = decision.decide(frame, made)
    implementations = decision.implementations(made)
    roofs = roofline.ceilings(frame)
    where = [tuple(map(_plain, key)) for key in zip(*(made[name] for name in PLACE), strict=True)]
    numbers = _order(where, made["run"])
    made = made.assign(place=[numbers[key] for key in where])
    runs, stacks = _runs(frame), _Stacks(frame)
    places = [
        _place(key, of_place, frame, roofs, runs["id"]) for key, of_place in zip(numbers, _split(made), strict=True)
    ]
    results = _results(made, runs["id"], stacks)
    configs, results["config"] = _interned(results["config"])
    return {
        "schema": SCHEMA,
        "generator": f"ridgemark {_version()}",
        "generated": datetime.now(UTC).isoformat(timespec="seconds"),
        "method": {
            "level": statistics.LEVEL,
            "practical": statistics.PRACTICAL,
            "false_discovery": statistics.FALSE_DISCOVERY,
            "least_rounds": statistics.LEAST_ROUNDS,
            "near": roofline.NEAR,
            "input_sets": INPUT_SETS,
        },
        "counts": {
            "results": len(made),
            "timed": int((made["time_us"] > 0).sum()),
            "cases": int(made.loc[made["workload"] != "ceiling", "case"].nunique()),
            "implementations": int(made.loc[made["workload"] != "ceiling", "impl"].nunique()),
            "runs": len(frame.runs),
        },
        "notes": _notes(frame, made, places, decisions),
        "places": places,
        "decisions": _decisions(decisions, numbers),
        "implementations": _columns(_numbered(implementations, numbers)),
        "cases": _cases(made),
        "results": results,
        "configs": configs,
        "series": series.of(made),
        "problems": _problems(made),
        "runs": runs,
        "stacks": stacks.listed,
    }


def _order(where: Sequence[tuple[Any, ...]], runs: Iterable[str]) -> dict[tuple[Any, ...], int]:
    """The places' numbers: the one that was measured last comes first, which is mostly the machine at hand."""
    last: dict[tuple[Any, ...], str] = {}
    for key, run in zip(where, runs, strict=True):
        last[key] = max(last.get(key, ""), run)
    return {key: i for i, key in enumerate(sorted(last, key=last.__getitem__, reverse=True))}


def _version() -> str:
    try:
        return version("ridgemark")
    except PackageNotFoundError:
        return "(not installed)"


# -- values and columns -----------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A plain Python value; None for what is missing or is no finite number."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _rounded(values: np.ndarray) -> np.ndarray:
    """Values to six significant digits."""
    with np.errstate(all="ignore"):
        digits = _DIGITS - 1 - np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** np.abs(digits)
        rounded = np.where(digits >= 0, np.round(values * scale) / scale, np.round(values / scale) * scale)
    return np.where(np.isfinite(rounded), rounded, values)


def _column(values: pd.Series) -> list[Any]:
    """A column as JSON values; None for what is missing."""
    if values.dtype.kind == "f":
        numbers = _rounded(values.to_numpy(float))
        finite = np.isfinite(numbers)
        if finite.all():
            return list(numbers.tolist())
        made = numbers.astype(object)
        made[~finite] = None
        return list(made.tolist())
    return table.plain(values)


def _columns(data: pd.DataFrame) -> dict[str, list[Any]]:
    return {str(name): _column(data[name]) for name in data}


def _number(value: float | None) -> float | None:
    """One number to six significant digits."""
    return None if value is None or not np.isfinite(value) else float(_rounded(np.array(float(value))))


def _numbered(data: pd.DataFrame, numbers: Mapping[tuple[Any, ...], int]) -> pd.DataFrame:
    """``data`` with the number of its place instead of the place."""
    key = zip(*(data[name] for name in PLACE), strict=True)
    place = pd.Series([numbers[tuple(map(_plain, k))] for k in key], data.index, dtype="int64")
    data = data.drop(columns=list(PLACE))
    data.insert(0, "place", place)
    return data


def _split(made: pd.DataFrame) -> Iterator[pd.DataFrame]:
    return (of for _, of in made.groupby("place", sort=True))


def _interned(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """The different values, and for every value its number among them."""
    known: dict[bytes, int] = {}
    numbers = [known.setdefault(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), len(known)) for value in values]
    return [orjson.loads(value) for value in known], numbers


# -- tables -----------------------------------------------------------------------------------------------------------


def _results(made: pd.DataFrame, runs: Sequence[str], stacks: _Stacks) -> dict[str, list[Any]]:
    number = {run: i for i, run in enumerate(runs)}
    about = made.assign(
        run=[number[run] for run in made["run"]],
        versions=pd.Series(
            [stacks.number.get(key) for key in zip(made["run"], made["stack"], strict=True)], made.index, dtype="object"
        ),
        complete=made["complete"].astype(bool),
        paired_rounds=made["paired_rounds"].fillna(0).astype("int64"),
    )
    return _columns(about[list(_RESULTS)])


def _decisions(decisions: Iterable[Decision], numbers: Mapping[tuple[Any, ...], int]) -> dict[str, list[Any]]:
    rows = [[getattr(d, name) for name in decision.COLUMNS] for d in decisions]
    data = {
        name: pd.Series([row[i] for row in rows], dtype="object" if name not in _DECIDED else "float64")
        for i, name in enumerate(decision.COLUMNS)
    }
    frame = pd.DataFrame(data)
    return _columns(_numbered(frame, numbers))


_DECIDED = frozenset(name for name, kind in Decision.__annotations__.items() if kind == "float | None")


def _cases(made: pd.DataFrame) -> dict[str, list[Any]]:
    """The work of every case that can be read."""
    columns: dict[str, list[Any]] = {name: [] for name in ("case", *(f.name for f in fields(roofline.Work)))}
    for case in made["case"].unique():
        try:
            work = asdict(roofline.work(case))
        except ValueError:
            continue
        columns["case"].append(case)
        for name, value in work.items():
            columns[name].append(value)
    return columns


def _problems(made: pd.DataFrame) -> list[dict[str, Any]]:
    """What was refused, wrong or failed, by device, status, implementation and reason."""
    bad = made[~made["status"].isin(["ok", "checked"])]
    reason = bad["reason"].astype(object).where(bad["reason"].notna(), None)
    severity = {name: i for i, name in enumerate(("wrong", "crashed", "timeout", "failed", "unsupported"))}
    found = [
        {
            "place": int(place),
            "status": status,
            "impl": impl,
            "reason": _plain(why),
            "count": len(cases),
            "cases": list(dict.fromkeys(cases))[:_CASES_NAMED],
        }
        for (place, status, impl, why), cases in bad["case"].groupby(
            [bad["place"], bad["status"], bad["impl"], reason], sort=False, dropna=False
        )
    ]
    return sorted(found, key=lambda p: (p["place"], severity.get(p["status"], 9), p["impl"], -p["count"]))


# -- devices and runs -------------------------------------------------------------------------------------------------


def _place(
    key: tuple[Any, ...],
    made: pd.DataFrame,
    frame: Frame,
    roofs: Mapping[roofline.Key, roofline.Ceilings],
    runs: Sequence[str],
) -> dict[str, Any]:
    machine, device, threads, regime = key
    held = frame.runs.loc[made["run"].unique()]
    newest = held.loc[held.index.max()]
    facts = newest["machine_facts"] if isinstance(newest["machine_facts"], Mapping) else {}
    floor = statistics.noise_floor(made.drop_duplicates(["run", "case", "regime", "method"]))
    below = next((c for k, c in roofs.items() if tuple(map(_plain, k)) == key), None)
    return {
        "machine": machine,
        "device": device,
        "threads": threads,
        "regime": regime,
        "device_kind": newest["device_kind"],
        "arch": newest["arch"],
        "facts": facts,
        "runs": [runs.index(run) for run in held.index],
        "noise_floor": _number(floor),
        "ceilings": None if below is None else _ceilings(below, facts, threads),
    }


def _ceilings(roofs: roofline.Ceilings, facts: Mapping[str, Any], threads: int | None) -> dict[str, Any]:
    probes = sorted(roofs.probes, key=_by_size)
    return {
        "rates": {dtype: _number(rate) for dtype, rate in sorted(roofs.rates.items())},
        "exp_rates": {dtype: _number(rate) for dtype, rate in sorted(roofs.exp_rates.items())},
        "ridge_points": {dtype: _number(roofs.ridge_point(dtype)) for dtype in sorted(roofs.rates)},
        "launch_s": _number(roofs.launch_s),
        "curves": {
            name: {"bytes": list(curve.size), "bytes_per_s": [_number(b) for b in curve.bandwidth]}
            for name, curve in sorted(roofs.curves.items())
        },
        "levels": _levels(roofs, facts, threads),
        "probes": {
            "case": [p.case for p in probes],
            "impl": [p.impl for p in probes],
            "value": [_number(p.value) for p in probes],
            "unit": [_UNITS[p.case.split(":")[1]] for p in probes],
            "clock_mhz": [_number(p.clock_mhz) for p in probes],
        },
    }


def _by_size(probe: roofline.Probe) -> tuple[Any, ...]:
    case = parse_case(probe.case)
    assert isinstance(case, Ceiling)
    return (list(_UNITS).index(case.probe), case.bytes, probe.case)


_UNITS = {"rate": "FLOP/s", "exp": "exp/s", "read": "B/s", "copy": "B/s", "launch": "s"}


def _levels(roofs: roofline.Ceilings, facts: Mapping[str, Any], threads: int | None) -> list[dict[str, Any]]:
    """The best bandwidth in every memory level that was probed, the nearest level first.

    A working set counts for the smallest cache that holds it all; caches of cores count as many times as the device's
    threads reach. Cold calls (on a GPU), and machines whose caches are not known, have main memory only.
    """
    sizes = sorted({size for curve in roofs.curves.values() for size in curve.size})
    if not sizes:
        return []
    holds: dict[str, float] = {}
    for cache in facts.get("caches") or () if roofs.regime == roofline.WARM else ():
        try:
            if cache["kind"] in ("data", "unified"):
                copies = min(cache["instances"], max(1, (threads or 1) // max(1, cache["shared_by"])))
                holds[f"L{cache['level']}"] = float(cache["bytes"] * copies)
        except (KeyError, TypeError):
            continue
    levels: dict[str, dict[str, Any]] = {}
    for size in sizes:
        name = next((n for n, bytes_ in sorted(holds.items(), key=lambda h: h[1]) if size <= bytes_), "memory")
        bandwidth = roofs.bandwidth(size)
        if bandwidth is not None and bandwidth > levels.get(name, {"bytes_per_s": 0.0})["bytes_per_s"]:
            levels[name] = {"name": name, "bytes": size, "bytes_per_s": bandwidth}
    if not holds:
        levels = {"memory": {"name": "memory", "bytes": sizes[-1], "bytes_per_s": roofs.memory_bandwidth()}}
    return [level | {"bytes_per_s": _number(level["bytes_per_s"])} for level in levels.values()]


def _runs(frame: Frame) -> dict[str, list[Any]]:
    runs = frame.runs.sort_index()
    results = frame.results["run"].value_counts()
    plans = [len(p.get("cases") or ()) if isinstance(p, Mapping) else None for p in runs["plan"]]
    return {
        "id": [str(run) for run in runs.index],
        **{name: [_plain(v) for v in table.plain(runs[name])] for name in ("machine", "device", "threads", "started")},
        **{name: [_plain(v) for v in table.plain(runs[name])] for name in ("commit", "dirty", "interrupted")},
        "seed": [_plain(v) for v in table.plain(runs["run_seed"])],
        "planned_cases": plans,
        "results": [int(results.get(run, 0)) for run in runs.index],
        "harness": [h if isinstance(h, Mapping) else {} for h in runs["harness"]],
    }


class _Stacks:
    """The environments that stacks ran in: each once, with the runs that used it."""

    def __init__(self, frame: Frame) -> None:
        self.listed: list[dict[str, Any]] = []
        self.number: dict[tuple[str, str], int] = {}
        known: dict[bytes, int] = {}
        about = frame.results.drop_duplicates(["run", "stack"])
        for row in about[["run", "stack", "versions", "lock", "python"]].itertuples(index=False):
            if not isinstance(row.versions, Mapping):
                continue
            one = {"stack": row.stack, "versions": dict(row.versions), "lock": row.lock, "python": row.python}
            number = known.setdefault(orjson.dumps(one, option=orjson.OPT_SORT_KEYS), len(known))
            if number == len(self.listed):
                self.listed.append(one | {"runs": []})
            self.listed[number]["runs"].append(row.run)
            self.number[row.run, row.stack] = number


# -- what is missing --------------------------------------------------------------------------------------------------


def _notes(
    frame: Frame, made: pd.DataFrame, places: Sequence[Mapping[str, Any]], decisions: Sequence[Decision]
) -> list[str]:
    """What is missing or must be known to read the numbers, the gravest first."""
    notes: list[str] = []
    if made.empty:
        notes.append("There is nothing to decide. Measure some cases with: ridgemark compare")
    if len(places) > 1:
        notes.append("There are several devices or regimes. Times are compared within one of them, never across.")
    for number, place in enumerate(places):
        here = made[(made["place"] == number) & (made["workload"] != "ceiling")]
        of = [d for d in decisions if tuple(getattr(d, name) for name in PLACE) == tuple(place[p] for p in PLACE)]
        notes += _notes_of(_where(place, places), place, here, of)
    for run, dirty in frame.runs["dirty"].items():
        if dirty is True:
            notes.append(f"Run {run} was measured on a checkout with changes that no commit holds.")
    for run, interrupted in frame.runs["interrupted"].items():
        if interrupted:
            notes.append(f"Run {run} did not come to its end: what it had finished is shown.")
    notes += [note for note in frame.notes if note != "There is no result in these records." or not frame.results.size]
    notes = list(dict.fromkeys(notes))
    left_out = len(notes) - _NOTES
    return notes if left_out <= 0 else [*notes[:_NOTES], f"{left_out} more notes of this kind are left out."]


def _where(place: Mapping[str, Any], places: Sequence[Any]) -> str:
    """Which device a note speaks of; nothing where there is only one."""
    if len(places) == 1:
        return ""
    threads = f", {place['threads']} threads" if place["threads"] else ""
    return f"{place['device']} ({place['machine']}{threads}, {place['regime']}): "


def _counted(number: int, one: str, several: str) -> str:
    """``1 result is``, ``2 results are``."""
    return f"{number:,} {one if number == 1 else several}"


def _notes_of(where: str, place: Mapping[str, Any], made: pd.DataFrame, decisions: Sequence[Decision]) -> list[str]:
    if made.empty:
        return [f"{where}Only ceilings were measured."]
    notes = []
    roofs = place["ceilings"]
    if roofs is None:
        notes.append(f"{where}No ceilings were measured: there is no roofline and no share of the limit.")
    else:
        lacking = sorted({d for d in made["dtype"].dropna().unique() if d not in roofs["rates"]})
        if lacking:
            notes.append(f"{where}No rate was measured for {', '.join(lacking)}: these cases have no roof.")
        if not roofs["levels"]:
            notes.append(f"{where}No bandwidth was measured: nothing can be placed below the roofs.")
        beyond = int((made["sol_fraction"] > 1).sum())
        if beyond:
            notes.append(
                f"{where}{_counted(beyond, 'result is', 'results are')} faster than the ceilings (more than 100 % of "
                "the limit): the ceilings were measured while the machine was busy or slower. Measure them again."
            )
    if made["impl"].nunique() == 1:
        notes.append(f"{where}Only {made['impl'].iloc[0]} was measured: there is nothing to compare it with.")
    without = [d.case for d in decisions if d.answer == "no baseline"]
    if without:
        named = ", ".join(without[:3]) + (" ..." if len(without) > 3 else "")
        notes.append(
            f"{where}{_counted(len(without), 'case has', 'cases have')} no time of the baseline, so no ratio: {named}."
        )
    if place["noise_floor"] is None:
        notes.append(
            f"{where}No A/A pair was measured (the baseline in a second process): the noise between processes is "
            "unknown, and a difference beyond the practical threshold may be noise."
        )
    if made["run"].nunique() > 1:
        notes.append(
            f"{where}Results come from {made['run'].nunique()} runs. A ratio is always taken within one run; times of "
            "different runs stand beside each other."
        )
    incomplete = int((~made["complete"].astype(bool)).sum())
    if incomplete:
        notes.append(
            f"{where}{_counted(incomplete, 'result has', 'results have')} fewer rounds than the run had planned."
        )
    methods = sorted({m for m in made.loc[made["rounds"] > 0, "method"] if isinstance(m, str)})
    if len(methods) > 1:
        notes.append(f"{where}Times were taken by {' and '.join(methods)}; these are never compared.")
    unreadable = made.loc[made["dtype"].isna(), "case"].nunique()
    if unreadable:
        notes.append(f"{where}{_counted(unreadable, 'case id', 'case ids')} cannot be read here: the work is unknown.")
    return notes
