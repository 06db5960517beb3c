import json
import math

import numpy as np
import pytest

from analysis import frame, statistics, table

CASE = "gemm:512x512x512:f32"


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_results_are_joined_with_run_and_stack(records):
    records.result(
        CASE, "blas.default", [10.0, 20.0], errors={"C": {"max_abs": 0.1, "worst": 0.5}, "D": {"worst": 0.75}}
    )
    loaded = frame.from_lines(records.lines)
    (row,) = loaded.results.to_dict(orient="records")
    assert (row["machine"], row["device_kind"], row["threads"], row["workload"]) == ("box", "cpu", 2, "gemm")
    assert (row["versions"], row["lock"], row["commit"]) == ({"torch": "2.13.0"}, "abc", "c0ffee")
    assert (row["rounds"], row["error_worst"], row["error_max_abs"]) == (2, 0.75, 0.1)


def test_blocks_are_medians_of_their_samples():
    rng = np.random.default_rng(0)
    blocks = [rng.uniform(1, 2, size) for size in (1, 4, 5, 4)]
    line = {
        "kind": "result", "run": "r", "case": CASE, "impl": "a.b", "replica": 0, "regime": "warm", "status": "ok",
        "rounds": [{"round": i, "order": 0, "t0": 0.0, "samples_us": list(b)} for i, b in enumerate(blocks)],
    }  # fmt: skip
    loaded = frame.from_lines([line])
    assert loaded.blocks["median_us"].to_numpy() == pytest.approx([np.median(b) for b in blocks])
    assert loaded.blocks["min_us"].to_numpy() == pytest.approx([b.min() for b in blocks])
    assert loaded.blocks["samples"].tolist() == [1, 4, 5, 4]


def test_last_result_of_a_key_counts_and_takes_its_blocks_along(records):
    records.result(CASE, "blas.default", [10.0] * 9, complete=False)
    records.result(CASE, "xla.jit", [1.0])
    records.result(CASE, "blas.default", [30.0, 40.0])
    loaded = frame.from_lines(records.lines)
    assert len(loaded.results) == 2
    number = loaded.results.index[loaded.results["impl"] == "blas.default"]
    assert loaded.blocks.loc[loaded.blocks["result"].isin(number), "median_us"].tolist() == [30.0, 40.0]


def test_a_result_that_is_not_ok_carries_no_blocks(records):
    records.result(CASE, "xla.jit", [1.0, 2.0], status="wrong", reason="It is wrong.")
    loaded = frame.from_lines(records.lines)
    assert loaded.blocks.empty
    assert loaded.results.iloc[0]["rounds"] == 0


def test_run_without_header_is_shown_and_said():
    line = {
        "kind": "result",
        "run": "r9",
        "case": CASE,
        "impl": "a.b",
        "replica": 0,
        "regime": "warm",
        "status": "failed",
    }
    loaded = frame.from_lines([line])
    assert loaded.results.iloc[0]["machine"] == frame.UNKNOWN
    assert loaded.notes == ["Run r9 has no header line: its machine and device are unknown."]


def test_folders_files_and_unreadable_files_are_loaded_together(tmp_path, records):
    records.result(CASE, "blas.default", [10.0] * 8)
    good = write(tmp_path / "records" / "box" / "r1.jsonl", records.lines)
    with good.open("a") as file:
        file.write('{"schema": 1, "kind": "resu')
    newer = write(tmp_path / "records" / "box" / "r2.jsonl", [{"schema": 99, "kind": "run", "run": "r2"}])
    loaded = frame.load([tmp_path])
    assert len(loaded.results) == 1
    assert any("torn" in note for note in loaded.notes)
    assert any(note.startswith("Left out") and str(newer) in note for note in loaded.notes)


def test_lines_of_a_newer_schema_are_left_out_and_the_others_of_their_file_stay(tmp_path, records):
    records.result(CASE, "blas.default", [10.0] * 8)
    records.result(CASE, "xla.jit", [5.0] * 8)
    lines = [
        *records.lines[:-1],
        {"schema": 2, "kind": "result", "run": "r1"},
        {"schema": 3, "kind": "result", "run": "r1"},
        records.lines[-1],
    ]
    loaded = frame.load([write(tmp_path / "r1.jsonl", lines)])
    assert loaded.results["impl"].tolist() == ["blas.default", "xla.jit"]
    (note,) = [n for n in loaded.notes if n.startswith("Left out")]
    assert "line 4 has schema 2" in note and "And so are 1 more" in note


@pytest.mark.parametrize("line", [{"machine": "box"}, {"machine": {"name": "box"}, "device": 7}, {"machine": [1]}])
def test_a_malformed_header_is_left_out_and_said(records, line):
    records.lines[0] = {"schema": 1, "kind": "run", "run": "r1"} | line
    records.result(CASE, "blas.default", [10.0] * 8)
    loaded = frame.from_lines(records.lines)
    assert loaded.results["machine"].tolist() == [frame.UNKNOWN]
    assert any("A run line of run r1 is malformed" in note for note in loaded.notes)


def test_a_run_without_its_end_was_interrupted(records):
    records.run("r2")
    records.lines.append({"schema": 1, "kind": "end", "run": "r2", "interrupted": False})
    records.run("r3")
    records.lines.append({"schema": 1, "kind": "end", "run": "r3", "interrupted": True})
    assert frame.from_lines(records.lines).runs["interrupted"].to_dict() == {"r1": True, "r2": False, "r3": True}


def test_blocks_are_summarised_in_parts_as_well(records, monkeypatch):
    monkeypatch.setattr(frame, "_SUMMARISED_AT_ONCE", 7)
    times = np.arange(1.0, 40.0)
    for impl in ("blas.default", "xla.jit"):
        records.result(CASE, impl, times, samples=5)
    assert frame.from_lines(records.lines).blocks["median_us"].to_numpy() == pytest.approx([*times, *times])


def test_an_empty_folder_is_a_note(tmp_path):
    loaded = frame.load([tmp_path])
    assert loaded.results.empty
    assert f"{tmp_path} holds no records (*.jsonl)." in loaded.notes
    assert table.rows(loaded) == []


def test_nothing_at_all_gives_an_empty_frame_that_everything_accepts():
    loaded = frame.from_lines([])
    assert statistics.compare(loaded).empty
    assert table.rows(loaded) == []


def test_null_telemetry_is_nan(records):
    records.result(CASE, "blas.default", [10.0])
    block = records.lines[-1]["rounds"][0]
    block |= {"clock_mhz": None, "power_w": [1, 2], "t0": None}
    row = frame.from_lines(records.lines).blocks.iloc[0]
    assert all(math.isnan(row[c]) for c in ("clock_mhz", "power_w", "t0"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.pop("case"),
        lambda line: line.update(case=7),
        lambda line: line.update(rounds=[{"round": 0, "samples_us": [1.0, None]}]),
        lambda line: line.update(rounds=[{"round": "first", "samples_us": [1.0]}]),
        lambda line: line.update(rounds=7),
        lambda line: line.update(replica="none"),
    ],
)
def test_a_malformed_result_is_left_out_and_said_and_the_others_stay(records, damage):
    records.result(CASE, "blas.default", [10.0] * 8)
    records.result(CASE, "xla.jit", [5.0] * 8)
    damage(records.lines[-1])
    loaded = frame.from_lines(records.lines)
    assert loaded.results["impl"].tolist() == ["blas.default"]
    assert loaded.blocks["median_us"].tolist() == [10.0] * 8
    assert any("malformed" in note for note in loaded.notes)


def test_counted_traffic(records):
    records.result(CASE, "blas.default", [1000.0])
    records.profile(CASE, "blas.default", read=100, written=20, back=3)
    records.profile(CASE, "xla.default", status="failed", counters=None)
    records.profile(CASE, "xla.default", counters=7)
    loaded = frame.from_lines(records.lines)
    (row,) = loaded.profiles.itertuples()
    assert (row.run, row.case, row.impl, row.machine) == ("r1", CASE, "blas.default", "box")
    assert (row.counted_bytes, row.l2_bytes, row.tensor_instructions) == (123, 5, 7)
    assert "A profile line of run r1 is malformed" in loaded.notes[-1]
    assert len(loaded.results) == 1
    assert loaded.of(loaded.results["impl"] == "none").profiles.equals(loaded.profiles)
