"""The records of a run: JSON Lines, append-only, fsynced, schema-versioned.

Owns the file format: where a run's file lies, how a line is written, read and repaired, and what counts as finished.
It does not interpret results: that is the analysis.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

SCHEMA = 1
KINDS = ("run", "stack", "result", "profile", "end")
#: What a run's plan says for a regime where the run counts (``profile`` lines) and times nothing.
COUNTED = "counted"
STATUSES = ("ok", "checked", "unsupported", "wrong", "failed", "crashed", "timeout")


class RecordError(Exception):
    """A records file that cannot be read or written. The message says what to do."""


class TornLine(RecordError):
    """A last line that a killed run left unfinished: nothing that was on the disk before it is lost."""


@dataclass
class Loaded:
    """The lines of one or several files, and what had to be repaired to read them (one sentence each)."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)


def new_run_id() -> str:
    """A fresh run id that sorts by time: UTC date and time, and four random hex digits."""
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


def folder(out: Path, machine: str) -> Path:
    """Where the records of ``machine`` lie below a results folder."""
    return out / "records" / machine


def key(result: Mapping[str, Any]) -> tuple[str, str, str, int, str]:
    """What identifies a result: (run, case, impl, replica, regime). The last result of a key counts."""
    return (result["run"], result["case"], result["impl"], result["replica"], result["regime"])


class Writer:
    """Appends lines to one run's file. Every line is on the disk when ``append`` returns.

    A torn last line (a run killed while writing) is cut off when the file is opened again; ``repairs`` says so.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run
        self.repairs: list[str] = []
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._cut_torn_line()
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise RecordError(_write_problem(path, error)) from error

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Write one line of ``kind``.

        Raises:
            RecordError: the disk is full or the file cannot be written. What was written before stays valid.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r}")
        line = {"schema": SCHEMA, "kind": kind, "run": self.run, **fields}
        data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            start = os.lseek(self._fd, 0, os.SEEK_END)
            try:
                written = 0
                while written < len(data):
                    written += os.write(self._fd, data[written:])
                os.fsync(self._fd)
            except OSError as error:
                os.ftruncate(self._fd, start)  # no torn line stays in front of what is written later
                raise RecordError(_write_problem(self.path, error)) from error
        return line

    def close(self) -> None:
        """Close the file; a run that wrote nothing leaves no file."""
        empty = os.fstat(self._fd).st_size == 0
        os.close(self._fd)
        if empty:
            self.path.unlink(missing_ok=True)

    def _cut_torn_line(self) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)
            self.repairs.append(_torn(self.path, len(data) - whole))


def read(path: Path) -> Loaded:
    """The lines of ``path``: one file, or every ``*.jsonl`` below a folder.

    A torn last line is left out and named in ``repairs``; the file itself is not touched.

    Raises:
        RecordError: no such place, a line that is no record, or a newer schema.
    """
    if path.is_dir():
        loaded = Loaded()
        for file in sorted(path.rglob("*.jsonl")):
            one = read(file)
            loaded.lines += one.lines
            loaded.repairs += one.repairs
        return loaded
    loaded = Loaded()
    for line in scan(path):
        if isinstance(line, TornLine):
            loaded.repairs.append(str(line))
        elif isinstance(line, RecordError):
            raise line
        else:
            loaded.lines.append(line)
    return loaded


def scan(path: Path) -> Iterator[dict[str, Any] | RecordError]:
    """The lines of one file, one at a time: a record, or why the line is none (a TornLine where it was cut short).

    Raises:
        RecordError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    yield TornLine(_torn(path, len(line)))
                elif line.strip():
                    yield _parsed(path, number, line)
    except OSError as error:
        raise RecordError(f"Cannot read {path}: {error.strerror}. Give a records file or a results folder.") from error


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any] | RecordError:
    try:
        record = orjson.loads(line)
        schema = record["schema"]
        if not isinstance(schema, int):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        return RecordError(
            f"{path}, line {number} is not a record. Restore the file, or move that line out of it; "
            "the other lines are untouched."
        )
    if schema > SCHEMA:
        return RecordError(
            f"{path}, line {number} has schema {schema}; this ridgemark reads up to {SCHEMA}. "
            "Upgrade ridgemark to read it."
        )
    if record.get("kind") not in KINDS or not isinstance(record.get("run"), str):
        return RecordError(f"{path}, line {number} is not a record of a known kind. Move that line out of the file.")
    return record  # type: ignore[no-any-return]


def results(loaded: Loaded) -> list[dict[str, Any]]:
    """The results that count: the last one of every key, in the order in which the keys first appeared."""
    last: dict[tuple[str, str, str, int, str], dict[str, Any]] = {}
    for line in loaded.lines:
        if line["kind"] == "result":
            last[key(line)] = line
    return list(last.values())


def unfinished(out: Path, machine: str) -> Path | None:
    """The file of the newest run on ``machine`` that has not come to its end; None where there is none.

    A run that only counts is short and is not gone on with.
    """
    for path in sorted(folder(out, machine).glob("*.jsonl"), reverse=True):
        loaded = read(path)
        if any(line["kind"] == "run" and line["plan"].get("regime") == COUNTED for line in loaded.lines):
            continue
        ends = [line for line in loaded.lines if line["kind"] == "end"]
        if not ends or ends[-1]["interrupted"]:
            return path
    return None


def finished_cases(loaded: Loaded) -> Iterator[str]:
    """Ids of the cases whose results are all complete: a resumed run leaves them as they are."""
    complete: dict[str, bool] = {}
    for result in results(loaded):
        complete[result["case"]] = complete.get(result["case"], True) and result["complete"]
    return (case for case, done in complete.items() if done)


def _torn(path: Path, size: int) -> str:
    return f"{path}: the last line was torn ({size} bytes, written when the run was killed) and is left out."


def _write_problem(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"Cannot write {path}: the disk is full. Free some space, then continue with --resume."
    return f"Cannot write {path}: {error.strerror}. Make the folder writable, or give another with --out DIR."
