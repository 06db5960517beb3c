"""Artefacts beside the records: named by their content, written once, a failure told in a sentence."""

from __future__ import annotations

import hashlib

import pytest

from benchmarks.engine import artefacts, records


def test_named_by_content(tmp_path):
    saved = artefacts.save(tmp_path / "artefacts", {"forward.py": "x = 1\n", "module.bin": b"\x00\x01"})
    assert saved["forward.py"] == hashlib.sha256(b"x = 1\n").hexdigest()[:12] + "-forward.py"
    assert (tmp_path / "artefacts" / saved["forward.py"]).read_text() == "x = 1\n"
    assert (tmp_path / "artefacts" / saved["module.bin"]).read_bytes() == b"\x00\x01"


def test_same_content_is_one_file_and_other_content_another(tmp_path):
    first, again, other = (artefacts.save(tmp_path, {"forward.py": text})["forward.py"] for text in ("a", "a", "b"))
    assert first == again != other
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(records.RecordError, match="cannot be written"):
        artefacts.save(tmp_path / "file", {"forward.py": "a"})


def test_folder_lies_beside_the_records(tmp_path):
    assert artefacts.folder(tmp_path / "records" / "m" / "run.jsonl") == tmp_path / "records" / "m" / "artefacts"
