"""The committed records: complete, of cases that exist, and each of them a gain."""

from __future__ import annotations

from pathlib import Path

import pytest

from impls.contract import Device
from impls.tvm import gemm, records
from impls.tvm.records import Record
from impls.workloads.base import parse_case

DEVICE = Device("cpu", "", "x86_64", 2, 1 << 34)


def test_records_say_what_they_cost_and_what_they_gain() -> None:
    assert records.families()
    for family in records.families():
        for case_id, record in records.load(family).items():
            assert parse_case(case_id).id == case_id
            assert record.trials > 0
            assert record.seconds > 0
            assert record.gain > 1
            assert set(record.versions) == {"tvm", "llvm"}


def test_what_has_no_record_is_refused_with_the_way_to_make_one() -> None:
    case = parse_case("gemm:3x5x7:f32")
    refusal = gemm.MetaSchedule().refuses(case, DEVICE)
    assert refusal is not None
    assert f"python -m impls.tvm.tune {case.id}" in refusal


def test_a_saved_file_is_read_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    records.load.cache_clear()
    records.families.cache_clear()
    try:
        of_case = {"gemm:3x5x7:f32": Record(2, 16, 1.5, 30.0, 10.0, {"tvm": "1", "llvm": "2"}, [["x", 1, None]])}
        records.save("cpu", of_case)
        assert records.families() == ("cpu",)
        assert records.load("cpu") == of_case
        assert records.load("other") == {}
        assert of_case["gemm:3x5x7:f32"].gain == 3
    finally:
        monkeypatch.undo()
        records.load.cache_clear()
        records.families.cache_clear()
