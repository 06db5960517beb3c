"""The search over a stack's candidates: which it keeps, which it leaves out, and what its file says."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import tuning
from impls.contract import Device
from impls.support.h200 import H200
from impls.workloads.base import parse_case

CASE = parse_case("gemm:64x64x64:bf16")


@dataclass(frozen=True)
class Tile:
    size: int

    def config(self) -> dict[str, Any]:
        return {"size": self.size}


class Kernel:
    """A tunable implementation whose candidate 13 cannot be built."""

    name = "mine.kernel"
    workload = "gemm"

    def build(self, case: Any, device: Device, choice: Tile) -> Tile:
        if choice.size == 13:
            raise RuntimeError("no room")
        return choice


class Bench:
    """Times given by size, the first look 1 us off so that the order changes; size 7 computes something else."""

    device = H200

    def __init__(self, times: dict[int, float]) -> None:
        self.times = times
        self.looked: list[int] = []

    def set_of(self, program: Tile) -> Tile:
        return program

    def agrees(self, program: Tile, loaded: Any) -> bool:
        return program.size != 7

    def median_us(self, program: Tile, loaded: Any, calls: int) -> float:
        self.looked.append(program.size)
        return self.times[program.size]

    def baseline_us(self, calls: int) -> float:
        return 10.0


def job(*sizes: int) -> tuning.Job:
    return tuning.Job(Kernel(), CASE, tuple(map(Tile, sizes)))


def test_keeps_the_fastest_that_is_right() -> None:
    bench = Bench({1: 9.0, 2: 8.0, 3: 12.0, 7: 1.0, 5: 0.5})
    failed = {("mine.kernel", CASE.id, Tile(5)): "RuntimeError: does not compile"}
    found = tuning.search(job(1, 2, 3, 7, 13, 5), bench, failed, time.monotonic() + 60)
    assert found is not None
    assert found["choice"] == {"size": 2}
    assert found["time_us"] == 8.0
    assert found["baseline_us"] == 10.0
    assert found["second"] == {"choice": {"size": 1}, "time_us": 9.0}
    assert (found["tried"], found["wrong"]) == (3, 1)
    assert not {5, 7, 13} & set(bench.looked)


def test_cases_of_which_nothing_compiled_are_not_prepared() -> None:
    failed = {("mine.kernel", CASE.id, Tile(size)): "BuildError: not here" for size in (1, 2)}
    some = job(2, 3)
    assert tuning.with_candidates([job(1, 2), some], failed) == [some]


def test_looks_again_at_the_best_few_only() -> None:
    bench = Bench({size: float(size) for size in range(20, 40)})
    tuning.search(job(*range(20, 40)), bench, {}, time.monotonic() + 60)
    again = {size for size in bench.looked if bench.looked.count(size) > 1}
    assert again == set(range(20, 20 + len(again)))
    assert 1 < len(again) < 10


def test_says_where_nothing_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuning.search(job(7, 13), Bench({}), {}, time.monotonic() + 60) is None
    said = capsys.readouterr().err
    assert "1 wrong" in said
    assert "no room" in said


def test_stops_when_time_is_up() -> None:
    bench = Bench({1: 9.0})
    assert tuning.search(job(1), bench, {}, time.monotonic() - 1) is None
    assert not bench.looked


def test_file_keeps_other_cases_and_drops_other_versions(tmp_path: Path) -> None:
    file = tmp_path / "tuned" / "h200.json"
    for case in ("gemm:2x2x2:bf16", "gemm:1x1x1:bf16"):
        tuning.keep(file, H200, {"lib": "1"}, "mine.kernel", case, {"time_us": 1.0})
    tuning.keep(file, H200, {"lib": "1"}, "mine.kernel", "gemm:2x2x2:bf16", {"time_us": 2.0})
    kept = json.loads(file.read_text())
    assert kept["device"] == "NVIDIA H200"
    one, other = {"time_us": 1.0}, {"time_us": 2.0}
    assert kept["choices"] == {"mine.kernel": {"gemm:1x1x1:bf16": one, "gemm:2x2x2:bf16": other}}
    tuning.keep(file, H200, {"lib": "2"}, "mine.kernel", "gemm:3x3x3:bf16", {"time_us": 3.0})
    assert list(json.loads(file.read_text())["choices"]["mine.kernel"]) == ["gemm:3x3x3:bf16"]


def test_jobs_are_what_the_stack_takes_and_the_baseline_computes() -> None:
    cases = [parse_case(c) for c in ("gemm:64x64x64:bf16", "gemm:64x64x64:f8e4m3", "gemm:g3+5x64x64:bf16")]
    found = {(j.implementation.name, j.case.id): j for j in tuning.jobs("triton", cases, H200)}
    names = {name for name, case in found if case == "gemm:64x64x64:bf16"}
    assert {"triton.tiled", "triton.persistent_tma"} <= names
    assert "triton.grouped" not in names
    assert [name for name, case in found if case.startswith("gemm:g")] == ["triton.grouped"]
    # cuBLAS, against which outputs are held, multiplies f8 in layout nt only.
    assert not any(case == "gemm:64x64x64:f8e4m3" for _, case in found)


def test_draws_the_same_candidates_every_time() -> None:
    one, again = (tuning.jobs("triton", [CASE], H200, ["triton.tiled"], 3)[0].candidates for _ in range(2))
    assert one == again
    assert len(one) == 3


def test_compares_elements_of_every_column() -> None:
    """A stride that is prime visits every column of a matrix whose width it does not divide."""
    columns = np.broadcast_to(np.arange(256, dtype=np.float32), (64, 256))
    assert set(tuning._some(np.ascontiguousarray(columns))) == set(range(256))
