"""Records -> tidy DataFrames: one row per result, one row per block of samples.

Owns the reading of many record files and the join of results with their run and stack. It derives only what needs no
statistics (a block's median, the worst error of a result); ratios, intervals and classes live elsewhere.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
        runs: one row per run, indexed by its id.
        notes: what had to be repaired, left out or is missing, one sentence each.
    """

    results: pd.DataFrame
    blocks: pd.DataFrame
    runs: pd.DataFrame
    notes: list[str]

    def of(self, chosen: pd.Series) -> Frame:
        """The part of this frame whose results ``chosen`` (boolean, indexed like ``results``) selects."""
        results = self.results[chosen]
        return Frame(results, self.blocks[self.blocks["result"].isin(results.index)], self.runs, self.notes)


def load(paths: Iterable[Path]) -> Frame:
    """The frame of record files and folders of them. A file that cannot be read is named in ``notes``, not fatal."""
    build = _Builder()
    for path in paths:
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            build.notes.append(f"{path} holds no records (*.jsonl).")
        for file in files:
            try:
                loaded = records.read(file)
            except records.RecordError as error:
                build.notes.append(f"Left out: {error}")
                continue
            build.notes += loaded.repairs
            build.add(loaded.lines)
    return build.frame()


def from_lines(lines: Iterable[Mapping[str, Any]]) -> Frame:
    """The frame of record lines that are already in memory."""
    build = _Builder()
    build.add(lines)
    return build.frame()


class _Builder:
    """Collects columns; samples go into flat arrays at once, so that no line is kept."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.seen = 0
        self.runs: dict[str, dict[str, Any]] = {}
        self.stacks: dict[tuple[str, str], dict[str, Any]] = {}
        self.samples = array("d")
        self.blocks: dict[str, array[Any]] = {
            name: array("q" if kind == "int64" else "d")
            for name, kind in _BLOCK_COLUMNS.items()
            if name not in ("median_us", "min_us")
        }
        self.unknown_kinds = 0

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            kind = line.get("kind")
            if kind == "result":
                self._result(line)
            elif kind == "run":
                self.runs[line["run"]] = _run(line)
            elif kind == "stack":
                self.stacks[line["run"], line["stack"]] = {
                    "versions": line.get("versions") or {},
                    "lock": line.get("lock"),
                    "python": line.get("python"),
                }

    def _result(self, line: Mapping[str, Any]) -> None:
        errors = [e for e in (line.get("errors") or {}).values() if isinstance(e, Mapping)]
        rounds = line.get("rounds") or [] if line["status"] == "ok" else []
        number, self.seen = self.seen, self.seen + 1
        # A later result of the same key takes the earlier one's place; the earlier one's blocks are dropped at the end.
        self.rows[records.key(line)] = {
            "result": number,
            "run": line["run"],
            "case": line["case"],
            "workload": line["case"].partition(":")[0],
            "impl": line["impl"],
            "stack": line["impl"].partition(".")[0],
            "replica": line.get("replica", 0),
            "regime": line["regime"],
            "status": line["status"],
            "reason": line.get("reason") or None,
            "method": line.get("method"),
            "complete": bool(line.get("complete", True)),
            "rounds": sum(1 for block in rounds if block.get("samples_us")),
            "prepare_s": line.get("prepare_s"),
            "first_call_s": line.get("first_call_s"),
            "peak_memory_bytes": line.get("peak_memory_bytes"),
            "traffic_bytes": line.get("traffic_bytes"),
            "workspace_bytes": line.get("workspace_bytes"),
            "error_worst": max((_number(e.get("worst")) for e in errors), default=math.nan),
            "error_max_abs": max((_number(e.get("max_abs")) for e in errors), default=math.nan),
            "flags": tuple(line.get("flags") or ()),
            "config": line.get("config") or {},
            "seed": line.get("seed"),
            "when": line.get("when"),
        }
        blocks = self.blocks
        for position, block in enumerate(rounds):
            samples = block.get("samples_us")
            if not samples:
                continue
            self.samples.extend(samples)
            blocks["result"].append(number)
            blocks["round"].append(block.get("round", position))
            blocks["order"].append(block.get("order", 0))
            blocks["t0"].append(_number(block.get("t0")))
            blocks["samples"].append(len(samples))
            blocks["clock_mhz"].append(_number(block.get("clock_mhz")))
            blocks["power_w"].append(_number(block.get("power_w")))

    def frame(self) -> Frame:
        results = pd.DataFrame(list(self.rows.values()), columns=["result", *_RESULT_COLUMNS]).set_index("result")
        for column, kind in _RESULT_COLUMNS.items():
            results[column] = results[column].astype(kind)

        blocks = pd.DataFrame({name: np.array(values) for name, values in self.blocks.items()})
        samples = np.array(self.samples)
        blocks["median_us"], blocks["min_us"] = _segments(samples, blocks["samples"].to_numpy(np.int64))
        blocks = blocks.loc[blocks["result"].isin(results.index), list(_BLOCK_COLUMNS)].astype(_BLOCK_COLUMNS)
        blocks = blocks.reset_index(drop=True)

        orphans = sorted(set(results["run"]) - set(self.runs))
        for run in orphans:
            self.notes.append(f"Run {run} has no header line: its machine and device are unknown.")
            self.runs[run] = dict.fromkeys(_RUN_COLUMNS, None) | {"machine": UNKNOWN, "device_kind": UNKNOWN}
        index = pd.Index(list(self.runs), dtype="str", name="run")
        runs = pd.DataFrame(list(self.runs.values()), index=index, columns=list(_RUN_COLUMNS))
        for column in ("machine", "device_kind", "device"):
            runs[column] = runs[column].fillna(UNKNOWN).astype("str")
        results = results.join(runs[[c for c in runs if c not in ("harness", "plan", "machine_facts")]], on="run")

        keys = list(zip(results["run"], results["stack"], strict=True))
        for column in ("versions", "lock", "python"):
            results[column] = pd.Series(
                [self.stacks[k][column] if k in self.stacks else None for k in keys], results.index, dtype="object"
            )
        if results.empty:
            self.notes.append("There is no result in these records.")
        return Frame(results, blocks, runs, self.notes)


def _run(line: Mapping[str, Any]) -> dict[str, Any]:
    machine, device = line.get("machine") or {}, line.get("device") or {}
    return {
        "machine": machine.get("name") or UNKNOWN,
        "device_kind": device.get("kind") or UNKNOWN,
        "device": device.get("name") or UNKNOWN,
        "arch": device.get("arch"),
        "threads": device.get("threads"),
        "started": line.get("started"),
        "run_seed": line.get("seed"),
        "commit": line.get("commit"),
        "dirty": line.get("dirty"),
        "harness": line.get("harness"),
        "plan": line.get("plan"),
        "machine_facts": machine,
    }


def _number(value: Any) -> float:
    """A JSON number, or NaN for what is missing (null, or a list that a device could not fill)."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _segments(
    samples: npt.NDArray[np.float64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Median and least of consecutive segments of ``samples``."""
    medians, least = np.empty(len(lengths)), np.empty(len(lengths))
    starts = np.cumsum(lengths) - lengths
    for length in np.unique(lengths):
        chosen = np.flatnonzero(lengths == length)
        for part in np.array_split(chosen, max(1, len(chosen) * int(length) // 4_000_000)):
            rows = samples[starts[part][:, None] + np.arange(length)]
            medians[part], least[part] = np.median(rows, axis=1), rows.min(axis=1)
    return medians, least
