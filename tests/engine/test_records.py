"""The records file: what is written is read, torn lines are cut, newer schemas refused, the last result counts."""

import json
import resource
import subprocess
import sys
import textwrap

import pytest

from benchmarks.engine import records

RESULT = {
    "case": "gemm:2x2x2:f32",
    "impl": "blas.default",
    "replica": 0,
    "regime": "warm",
    "status": "ok",
    "complete": True,
}


def write(path, run="r1", n=3):
    writer = records.Writer(path, run)
    for i in range(n):
        writer.append("result", **RESULT | {"value": i})
    writer.close()


def test_what_is_appended_is_read_back(tmp_path):
    path = tmp_path / "a" / "r1.jsonl"
    write(path)
    loaded = records.read(path)
    assert [line["value"] for line in loaded.lines] == [0, 1, 2]
    assert loaded.repairs == []
    assert {line["schema"] for line in loaded.lines} == {records.SCHEMA}


def test_the_last_result_of_a_key_counts(tmp_path):
    path = tmp_path / "r1.jsonl"
    write(path)
    (only,) = records.results(records.read(path))
    assert only["value"] == 2


def test_torn_last_line_is_left_out_said_and_cut_on_the_next_write(tmp_path):
    path = tmp_path / "r1.jsonl"
    write(path)
    with path.open("ab") as file:
        file.write(b'{"schema":1,"kind":"resul')
    loaded = records.read(path)
    assert len(loaded.lines) == 3
    assert "torn (25 bytes" in loaded.repairs[0]
    assert path.read_bytes().endswith(b"resul")  # reading changes nothing
    writer = records.Writer(path, "r1")
    assert "torn" in writer.repairs[0]
    writer.append("end", interrupted=False, phases={})
    writer.close()
    assert [line["kind"] for line in records.read(path).lines] == ["result"] * 3 + ["end"]


def test_newer_schema_is_refused_with_a_sentence(tmp_path):
    path = tmp_path / "r1.jsonl"
    path.write_text(json.dumps({"schema": records.SCHEMA + 1, "kind": "run", "run": "x"}) + "\n")
    with pytest.raises(records.RecordError, match=r"schema 2; this ridgemark reads up to 1\. Upgrade"):
        records.read(path)


@pytest.mark.parametrize(
    "line", [b"not json", b"[1]", b'{"kind":"run"}', b'{"schema":"1","kind":"run","run":"x"}', b"\xff\xfe"]
)
def test_corrupt_line_is_named_and_nothing_is_lost(tmp_path, line):
    path = tmp_path / "r1.jsonl"
    write(path, n=1)
    before = path.read_bytes()
    path.write_bytes(line + b"\n" + before)
    with pytest.raises(records.RecordError, match="line 1 is not a record"):
        records.read(path)
    assert path.read_bytes() == line + b"\n" + before


def test_unfinished_finds_the_newest_run_without_an_end(tmp_path):
    place = records.folder(tmp_path, "box")
    for run, end in (("20260101T000000-aaaa", None), ("20260102T000000-bbbb", True), ("20260103T000000-cccc", False)):
        write(place / f"{run}.jsonl", run)
        if end is not None:
            writer = records.Writer(place / f"{run}.jsonl", run)
            writer.append("end", interrupted=end, phases={})
            writer.close()
    assert records.unfinished(tmp_path, "box").stem == "20260102T000000-bbbb"
    assert records.unfinished(tmp_path, "other") is None


def test_a_case_with_an_incomplete_result_is_not_finished(tmp_path):
    path = tmp_path / "r1.jsonl"
    writer = records.Writer(path, "r1")
    writer.append("result", **RESULT)
    writer.append("result", **RESULT | {"case": "other", "impl": "a.b"})
    writer.append("result", **RESULT | {"case": "other", "complete": False})
    writer.close()
    assert set(records.finished_cases(records.read(path))) == {RESULT["case"]}


def test_full_disk_keeps_what_was_written_and_says_so(tmp_path):
    """A file size limit stands in for a full disk: the write fails half way, the file stays whole."""
    program = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from benchmarks.engine import records
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
        writer = records.Writer(Path(sys.argv[1]), "r1")
        try:
            for i in range(100):
                writer.append("end", interrupted=False, phases={"wall": i})
        except records.RecordError as error:
            print(error)
    """)
    path = tmp_path / "r1.jsonl"
    said = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True).stdout
    assert "Cannot write" in said
    loaded = records.read(path)
    assert loaded.repairs == []
    assert [line["phases"]["wall"] for line in loaded.lines] == list(range(len(loaded.lines)))
    assert loaded.lines
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 400


def test_unwritable_folder_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(records.RecordError, match="Make the folder writable, or give another with --out"):
        records.Writer(tmp_path / "file" / "r1.jsonl", "r1")


def test_numbers_that_json_cannot_hold_are_refused(tmp_path):
    writer = records.Writer(tmp_path / "r1.jsonl", "r1")
    with pytest.raises(ValueError):
        writer.append("end", interrupted=False, phases={"wall": float("nan")})
    writer.close()
    assert not (tmp_path / "r1.jsonl").exists()  # nothing was written, so there is no run
