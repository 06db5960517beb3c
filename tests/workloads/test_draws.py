"""Drawn tensors that are kept: the same values, drawn once, within a limit."""

from __future__ import annotations

import numpy as np
import pytest

from impls.workloads import draws
from impls.workloads.base import parse_case


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are drawn from now on, by a process that has kept nothing yet."""
    names: list[str] = []
    draw = draws._drawn

    def noted(seed: int, tensor: str, *rest: object) -> np.ndarray:
        names.append(tensor)
        return draw(seed, tensor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(draws, "_shelf", draws._Shelf())
    monkeypatch.setattr(draws, "_drawn", noted)
    return names


def test_a_weight_is_drawn_once_for_any_number_of_rows(drawn: list[str]) -> None:
    few, more = parse_case("gemm:4x96x64:bf16:nt"), parse_case("gemm:16x96x64:bf16:nt")
    expected = more.inputs(3)
    drawn.clear()
    draws.keep(1 << 20)
    for case in (few, more, more):
        got = case.inputs(3)
    assert drawn == ["A", "B", "A"]
    assert all(np.array_equal(got[n].view(np.uint16), expected[n].view(np.uint16)) for n in "AB")
    assert not got["B"].flags.writeable
    other = more.inputs(4)
    assert drawn[3:] == ["A", "B"] and not np.array_equal(other["B"].view(np.uint16), got["B"].view(np.uint16))


@pytest.mark.parametrize("other", ["gemm:4x96x64:f16:nt", "gemm:4x96x65:bf16:nt", "gemm:4x96x64:f8e4m3:nt"])
def test_another_dtype_or_scale_is_another_weight(drawn: list[str], other: str) -> None:
    draws.keep(1 << 20)
    parse_case("gemm:4x96x64:bf16:nt").inputs(3)
    parse_case(other).inputs(3)
    assert drawn == ["A", "B", "A", "B"]


def test_no_more_is_kept_than_there_is_room_for_and_nothing_unless_asked(drawn: list[str]) -> None:
    case, room = parse_case("gemm:4x96x64:bf16:nt"), 2 * 96 * 64
    case.inputs(3)["B"][0, 0] = 1  # its own
    case.inputs(3)
    assert drawn == ["A", "B", "A", "B"]
    draws.keep(room)
    case.inputs(3)
    case.inputs(3)
    assert drawn[4:] == ["A", "B", "A", "B"]  # A makes way for B, which makes way for A
    draws.keep(room + 2 * 4 * 64)
    case.inputs(3)
    case.inputs(3)
    assert drawn[8:] == ["A", "B"]
