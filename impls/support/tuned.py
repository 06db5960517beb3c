"""What tuning chose for a device, as ``nox -s tune`` keeps it: one file per stack and device.

Owns where the file lies and how its choices are read. Standard library and the workloads only.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from impls.support.h200 import H200
from impls.workloads.base import Case, parse_case


def file(stack: Path, device_name: str) -> Path:
    """The file of the stack in this folder: ``tuned/h200.json`` for ``NVIDIA H200``. It need not be there."""
    key = re.sub(r"[^a-z0-9]+", "-", device_name.lower().removeprefix("nvidia")).strip("-")
    return stack / "tuned" / f"{key}.json"


def nearest(stack: Path, device_name: str) -> Path:
    """The device's file, or where it has none the H200's: a choice made elsewhere is nearer than none."""
    own = file(stack, device_name)
    return own if own.is_file() else file(stack, H200.name)


@cache
def _content(kept: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {"versions": {}, "choices": {}}
    return content


def versions(kept: Path) -> dict[str, str]:
    """The library's version that the choices were made with; empty where there is no such file."""
    found: dict[str, str] = _content(kept)["versions"]
    return found


def origin(kept: Path, implementation: str, case_id: str) -> str:
    """For the record of a case that takes what was chosen for ``case_id``: for which, and the seconds tuning took."""
    return f"tuned for {case_id} in {_content(kept)['choices'][implementation][case_id]['seconds']} s"


@cache
def choices(kept: Path, implementation: str) -> list[tuple[Case, dict[str, Any]]]:
    """The cases that were tuned for an implementation, and what was chosen; none where there is no such file."""
    chosen = _content(kept)["choices"].get(implementation, {})
    return [(parse_case(case_id), result["choice"]) for case_id, result in chosen.items()]


def around(kept: Path, implementation: str, case: Case) -> list[tuple[Case, dict[str, Any]]]:
    """``choices``, the case's own first: of several that are as near, as f16 and bf16 of a shape are, it is taken."""
    return sorted(choices(kept, implementation), key=lambda chosen: chosen[0] != case)
