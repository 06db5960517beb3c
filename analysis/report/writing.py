"""Writing a report's files.

Owns their names and that they appear whole or not at all; what is in them is its neighbours' matter.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

from analysis.frame import Frame, no_collection
from analysis.report import markdown, model, page

FILES = ("index.html", "report.md", "report.json")


def write(frame: Frame, out: Path) -> dict[str, Any]:
    """Write the report of ``frame`` into the folder ``out``, replacing an earlier one.

    Returns:
        What the report holds: see ``schema.json``.

    Raises:
        OSError: the folder cannot be written.
    """
    with no_collection():
        report = model.of(frame)
        data = orjson.dumps(report)
        texts = (page.render(report, data), markdown.render(report).encode(), data + b"\n")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in zip(FILES, texts, strict=True):
        unfinished = out / f".{name}.tmp"
        unfinished.write_bytes(text)
        os.replace(unfinished, out / name)
    return report
