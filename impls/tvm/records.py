"""The tuned records: what MetaSchedule found, one file per CPU family, ``tuned/<LLVM's name of the CPU>.json``.

Owns the files' form. Making them is ``tune``'s business, replaying them ``kernels/plain``'s. Imports no TVM.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Record:
    """The best schedule found for one case.

    Attributes:
        threads: threads that the schedule was made for.
        trials: candidates that were compiled and timed.
        seconds: what the search took.
        default_us: time of the same definition as TVM compiles it without a schedule.
        tuned_us: time with this schedule, measured beside it.
        versions: of TVM and of LLVM in it.
        trace: the schedule, as TVM's trace writes itself.
    """

    threads: int
    trials: int
    seconds: float
    default_us: float
    tuned_us: float
    versions: dict[str, str]
    trace: list[Any]

    @property
    def gain(self) -> float:
        """How many times faster than TVM's default."""
        return self.default_us / self.tuned_us


@cache
def families() -> tuple[str, ...]:
    """CPU families that have a file."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.json")))


@cache
def load(family: str) -> dict[str, Record]:
    """Records of a family by case id; none where there is no file."""
    try:
        text = (FOLDER / f"{family}.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    return {case: Record(**fields) for case, fields in json.loads(text).items()}


def save(family: str, records: dict[str, Record]) -> Path:
    """Write a family's file; its path."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{family}.json"
    lines = [f"{json.dumps(case)}: {json.dumps(asdict(records[case]))}" for case in sorted(records)]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    load.cache_clear()
    families.cache_clear()
    return file
