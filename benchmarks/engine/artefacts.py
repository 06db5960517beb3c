"""Generated code worth keeping, beside the records: one file per content.

Owns the files' names and where they lie: ``artefacts/<sha256, 12 digits>-<name>`` beside a run's records. Programs that
generated the same text share its file. Results say which files are theirs (``config.artefacts``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from benchmarks.engine.records import RecordError


def folder(records: Path) -> Path:
    """Where the artefacts of the runs in this records file's folder lie."""
    return records.parent / "artefacts"


def save(into: Path, artefacts: Mapping[str, str | bytes]) -> dict[str, str]:
    """Write what is not there yet.

    Returns:
        The file's name by the artefact's name.

    Raises:
        RecordError: it cannot be written.
    """
    saved = {}
    for name, content in artefacts.items():
        data = content.encode() if isinstance(content, str) else content
        path = into / f"{hashlib.sha256(data).hexdigest()[:12]}-{name}"
        saved[name] = path.name
        if path.exists():
            continue
        try:
            into.mkdir(parents=True, exist_ok=True)
            new = path.with_name(path.name + ".new")
            new.write_bytes(data)
            new.replace(path)  # a killed run leaves no torn file under the name of its content
        except OSError as error:
            raise RecordError(
                f"{path} cannot be written: {error.strerror or error}. Free space, or choose another folder."
            ) from error
    return saved
