"""Records -> tidy DataFrames: one row per result, one per block of samples, one per call whose traffic was counted.

Owns the reading of many record files and the join of results with their run and stack. It derives only what needs no
statistics (a block's median, the worst error of a result); ratios, intervals and classes live elsewhere.
"""

from __future__ import annotations

import gc
import math
import sys
from array import array
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from benchmarks.engine import records

_RESULT_COLUMNS = {
    "run": "str",
    "case": "str",
    "workload": "str",
    "impl": "str",
    "stack": "str",
    "replica": "int64",
    "regime": "str",
    "status": "str",
    "reason": "object",
    "method": "object",
    "complete": "bool",
    "rounds": "int64",
    "prepare_s": "float64",
    "first_call_s": "float64",
    "peak_memory_bytes": "float64",
    "traffic_bytes": "float64",
    "workspace_bytes": "float64",
    "error_worst": "float64",
    "error_max_abs": "float64",
    "flags": "object",
    "config": "object",
    "seed": "object",
    "when": "object",
}
_SUMMARISED_AT_ONCE = 1 << 20
_BLOCK_COLUMNS = {
    "result": "int64",
    "round": "int64",
    "order": "int64",
    "t0": "float64",
    "samples": "int64",
    "median_us": "float64",
    "min_us": "float64",
    "clock_mhz": "float64",
    "power_w": "float64",
}
_PROFILE_COLUMNS = {
    "run": "str",
    "case": "str",
    "impl": "str",
    "counted_bytes": "float64",
    "l2_bytes": "float64",
    "tensor_instructions": "float64",
}
_RUN_COLUMNS = (
    "machine",
    "device_kind",
    "device",
    "arch",
    "threads",
    "started",
    "run_seed",
    "commit",
    "dirty",
    "interrupted",
    "harness",
    "plan",
    "machine_facts",
)
UNKNOWN = "unknown"


@dataclass
class Frame:
    """What a set of record files holds.

    Attributes:
        results: one row per result that counts (the last one of its key), with its run's and its stack's columns:
            run, case, workload, impl, stack, replica, regime, status, reason, method, complete, rounds (how many),
            prepare_s, first_call_s, peak_memory_bytes, traffic_bytes, workspace_bytes, error_worst (largest error over
            its tolerance), error_max_abs, flags, config, seed, when; machine, device_kind, device, arch, threads,
            started, commit, dirty, ...; versions, lock, python. The index is the number that ``blocks`` refers to.
        blocks: one row per block of an ``ok`` result: result, round, order, t0 (seconds), samples (how many),
            median_us, min_us, clock_mhz, power_w.
        runs: one row per run, indexed by its id: machine, device_kind, device, arch, threads, started, run_seed,
            commit, dirty, interrupted (it has not come to its end), harness, plan, machine_facts.
        profiles: one row per call whose traffic Nsight Compute counted: run, case, impl, counted_bytes (read from DRAM,
            written to it, and what was still dirty in L2 at the end), l2_bytes, tensor_instructions (of all
            warps); machine, device.
        notes: what had to be repaired, left out or is missing, one sentence each.
    """

    results: pd.DataFrame
    blocks: pd.DataFrame
    runs: pd.DataFrame
    profiles: pd.DataFrame
    notes: list[str]

    def of(self, chosen: pd.Series) -> Frame:
        """The part of this frame whose results ``chosen`` (boolean, indexed like ``results``) selects."""
        if chosen.all():
            return self
        results = self.results[chosen]
        blocks = self.blocks[self.blocks["result"].isin(results.index)]
        return Frame(results, blocks, self.runs, self.profiles, self.notes)


def load(paths: Iterable[Path]) -> Frame:
    """The frame of record files and folders of them. What cannot be read is named in ``notes``, not fatal."""
    build = _Builder()
    with no_collection():
        for path in paths:
            files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
            if not files:
                build.notes.append(f"{path} holds no records (*.jsonl).")
            for file in files:
                build.add_file(file)
        return build.frame()


def from_lines(lines: Iterable[Mapping[str, Any]]) -> Frame:
    """The frame of record lines that are already in memory."""
    build = _Builder()
    for line in lines:
        build.add(line)
    return build.frame()


@contextmanager
def no_collection() -> Iterator[None]:
    """Without the cyclic garbage collector, which takes 40 % of the time of reading records and finds nothing there."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Builder:
    """Collects columns. No line and no sample is kept: samples become their blocks' medians a million at a time."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.columns: dict[str, list[Any]] = {name: [] for name in _RESULT_COLUMNS}
        self.last: dict[tuple[Any, ...], int] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.ends: dict[str, bool] = {}
        self.stacks: dict[tuple[str, str], dict[str, Any]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.profiles: dict[str, list[Any]] = {name: [] for name in _PROFILE_COLUMNS}
        self.samples = array("d")
        self.summarised = 0
        self.blocks: dict[str, array[Any]] = {
            name: array("q" if kind == "int64" else "d") for name, kind in _BLOCK_COLUMNS.items()
        }

    def add_file(self, path: Path) -> None:
        """Add a file's lines; what is no record of this schema is left out and said."""
        problems: list[str] = []
        try:
            for line in records.scan(path):
                if isinstance(line, records.TornLine):
                    self.notes.append(str(line))
                elif isinstance(line, records.RecordError):
                    problems.append(str(line))
                else:
                    self.add(line)
        except records.RecordError as error:
            problems.append(str(error))
        if problems:
            others = f" And so are {len(problems) - 1} more of its lines." if len(problems) > 1 else ""
            self.notes.append(f"Left out: {problems[0]}{others}")

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line; one that is malformed is left out and said."""
        kind = line.get("kind")
        try:
            if kind == "result":
                self._result(line)
            elif kind == "run":
                self.runs[line["run"]] = _run(line)
            elif kind == "stack":
                self.stacks[line["run"], line["stack"]] = {
                    "versions": dict(line.get("versions") or {}),
                    "lock": _text(line.get("lock")),
                    "python": _text(line.get("python")),
                }
            elif kind == "profile":
                self._profile(line)
            elif kind == "end":
                self.ends[line["run"]] = bool(line.get("interrupted"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.notes.append(f"A {kind} line of run {line.get('run')} is malformed and left out: {error!r}.")

    def _profile(self, line: Mapping[str, Any]) -> None:
        if line["status"] != "ok":
            return
        counters = line["counters"]
        moved = [_number(counters[name]) for name in ("dram_read_bytes", "dram_write_bytes", "write_back_bytes")]
        row = {
            "run": line["run"],
            "case": sys.intern(line["case"]),
            "impl": sys.intern(line["impl"]),
            "counted_bytes": sum(moved),
            "l2_bytes": _number(counters["l2_bytes"]),
            "tensor_instructions": _number(counters["tensor_instructions"]["all"]),
        }
        for name, column in self.profiles.items():
            column.append(row[name])

    def _result(self, line: Mapping[str, Any]) -> None:
        get = line.get
        errors = [e for e in (get("errors") or {}).values() if isinstance(e, Mapping)]
        rounds = [b for b in get("rounds") or () if b.get("samples_us")] if line["status"] == "ok" else []
        key = records.key(line)
        run, case, impl, replica, regime = key
        config = get("config")
        config = config if isinstance(config, dict) else {}
        row = {
            "run": sys.intern(run),
            "case": sys.intern(case),
            "workload": sys.intern(case.partition(":")[0]),
            "impl": sys.intern(impl),
            "stack": sys.intern(impl.partition(".")[0]),
            "replica": int(replica),
            "regime": sys.intern(regime),
            "status": sys.intern(line["status"]),
            "reason": _text(get("reason")),
            "method": _text(get("method")),
            "complete": bool(get("complete", True)),
            "rounds": len(rounds),
            "prepare_s": _number(get("prepare_s")),
            "first_call_s": _number(get("first_call_s")),
            "peak_memory_bytes": _number(get("peak_memory_bytes")),
            "traffic_bytes": _number(get("traffic_bytes")),
            "workspace_bytes": _number(get("workspace_bytes")),
            "error_worst": max((_number(e.get("worst")) for e in errors), default=math.nan),
            "error_max_abs": max((_number(e.get("max_abs")) for e in errors), default=math.nan),
            "flags": tuple(map(str, get("flags") or ())),
            "config": self.configs.setdefault(repr(config), config),
            "seed": get("seed"),
            "when": get("when"),
        }
        number = len(self.columns["run"])
        samples, blocks = self._blocks(number, rounds)
        # From here on nothing fails: a malformed result leaves nothing behind. A later result of the same key takes
        # the earlier one's place; what the earlier one left is dropped at the end.
        self.last[key] = number
        for name, column in self.columns.items():
            column.append(row[name])
        self.samples.extend(samples)
        for name, values in blocks.items():
            self.blocks[name].extend(values)
        if len(self.samples) >= _SUMMARISED_AT_ONCE:
            self._summarise()

    @staticmethod
    def _blocks(number: int, rounds: list[Mapping[str, Any]]) -> tuple[array[float], dict[str, array[Any]]]:
        """All samples of a result, and its blocks' columns. Raises TypeError where they are no numbers."""
        taken = [block["samples_us"] for block in rounds]
        samples = array("d", chain.from_iterable(taken))
        whole = {
            "result": [number] * len(rounds),
            "round": [block.get("round", i) for i, block in enumerate(rounds)],
            "order": [block.get("order", 0) for block in rounds],
            "samples": [len(block) for block in taken],
        }
        columns: dict[str, array[Any]] = {name: array("q", values) for name, values in whole.items()}
        for name in ("t0", "clock_mhz", "power_w"):
            columns[name] = _numbers([block.get(name) for block in rounds])
        return samples, columns

    def _summarise(self) -> None:
        """Turn the samples held into medians and minima of their blocks."""
        lengths = np.array(self.blocks["samples"][self.summarised :])
        medians, least = _segments(np.array(self.samples), lengths)
        self.blocks["median_us"].extend(medians)
        self.blocks["min_us"].extend(least)
        self.summarised += len(lengths)
        self.samples = array("d")

    def frame(self) -> Frame:
        results = pd.DataFrame({n: pd.Series(v, dtype=_RESULT_COLUMNS[n]) for n, v in self.columns.items()})
        results = results.loc[list(self.last.values())].rename_axis("result")

        self._summarise()
        columns = {name: np.array(self.blocks.pop(name)) for name in _BLOCK_COLUMNS}
        superseded = np.ones(len(self.columns["run"]), bool)
        superseded[results.index] = False
        if superseded.any():
            counts = ~superseded[columns["result"]]
            columns = {name: values[counts] for name, values in columns.items()}
        blocks = pd.DataFrame(columns, copy=False)

        orphans = sorted({*results["run"], *self.profiles["run"]} - set(self.runs))
        for run in orphans:
            self.notes.append(f"Run {run} has no header line: its machine and device are unknown.")
            self.runs[run] = dict.fromkeys(_RUN_COLUMNS, None) | {"machine": UNKNOWN, "device_kind": UNKNOWN}
        for run in self.runs:
            self.runs[run]["interrupted"] = self.ends.get(run, True)
        index = pd.Index(list(self.runs), dtype="str", name="run")
        # Without inference: a thread count that is unknown is None, which equals itself, and not NaN.
        runs = pd.DataFrame(list(self.runs.values()), index=index, columns=list(_RUN_COLUMNS), dtype="object")
        for column in ("machine", "device_kind", "device"):
            runs[column] = runs[column].fillna(UNKNOWN).astype("str")
        results = results.join(runs[[c for c in runs if c not in ("harness", "plan", "machine_facts")]], on="run")

        profiles = pd.DataFrame({n: pd.Series(v, dtype=_PROFILE_COLUMNS[n]) for n, v in self.profiles.items()})
        profiles = profiles.join(runs[["machine", "device"]], on="run")

        keys = list(zip(results["run"], results["stack"], strict=True))
        for column in ("versions", "lock", "python"):
            results[column] = pd.Series(
                [self.stacks[k][column] if k in self.stacks else None for k in keys], results.index, dtype="object"
            )
        if results.empty:
            self.notes.append("There is no result in these records.")
        return Frame(results, blocks, runs, profiles, self.notes)


def _run(line: Mapping[str, Any]) -> dict[str, Any]:
    machine, device, threads = line.get("machine") or {}, line.get("device") or {}, None
    if isinstance(device.get("threads"), int):
        threads = device["threads"]
    return {
        "machine": _text(machine.get("name")) or UNKNOWN,
        "device_kind": _text(device.get("kind")) or UNKNOWN,
        "device": _text(device.get("name")) or UNKNOWN,
        "arch": _text(device.get("arch")),
        "threads": threads,
        "started": _text(line.get("started")),
        "run_seed": line["seed"] if isinstance(line.get("seed"), int) else None,
        "commit": _text(line.get("commit")),
        "dirty": line["dirty"] if isinstance(line.get("dirty"), bool) else None,
        "interrupted": True,
        "harness": line.get("harness"),
        "plan": line.get("plan"),
        "machine_facts": machine,
    }


def _text(value: Any) -> str | None:
    """Text, whatever JSON value stands where text should; None for what is missing or empty."""
    return None if value is None or value == "" else str(value)


def _number(value: Any) -> float:
    """A JSON number, or NaN for what is missing (null, or a list that a device could not fill)."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _numbers(values: list[Any]) -> array[float]:
    """JSON values as numbers; NaN for what is none."""
    if values.count(None) == len(values):
        return array("d", (math.nan,)) * len(values)
    return array("d", [v if type(v) is float else _number(v) for v in values])


def rows_of(data: pd.DataFrame, columns: Sequence[str]) -> Iterator[Any]:
    """The rows of some columns, with the columns as attributes.

    As ``itertuples``, which takes four times as long where there are columns of text.
    """
    row = namedtuple("row", columns)  # type: ignore[misc]
    return map(row._make, zip(*(data[name].to_numpy(dtype=object) for name in columns), strict=True))


def _segments(
    samples: npt.NDArray[np.float64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Median and least of consecutive segments of ``samples``."""
    medians, least = np.empty(len(lengths)), np.empty(len(lengths))
    starts = np.cumsum(lengths) - lengths
    for length in np.unique(lengths):
        chosen = np.flatnonzero(lengths == length)
        for part in np.array_split(chosen, max(1, len(chosen) * int(length) // 1_000_000)):
            rows = samples[starts[part][:, None] + np.arange(length)]
            medians[part], least[part] = np.median(rows, axis=1), rows.min(axis=1)
    return medians, least
