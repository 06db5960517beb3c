"""The profiled process: what is counted, and that a failing call leaves no window open. The device is a list."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks.engine import profiled
from impls.contract import Device, Implementation, Program, Unsupported

CASE = "gemm:2x3x4:f32"
DEVICE = Device("cuda", "GPU", "sm_90", 1, 1)


class Recorder(Program):
    """Writes what it is asked for into the events."""

    def __init__(self, events: list[str], fails_at: int | None) -> None:
        super().__init__()
        self.events, self.calls, self.fails_at = events, 0, fails_at
        self.config = {"tile": 8}

    def load(self, inputs):
        assert inputs["A"].shape == (2, 4)
        return inputs

    def refill(self, loaded, inputs):
        raise AssertionError

    def run(self, loaded):
        self.calls += 1
        self.events.append("call")
        if self.calls == self.fails_at:
            raise RuntimeError("no more")

    def read_outputs(self, result):
        raise AssertionError

    def read_inputs(self, loaded):
        raise AssertionError

    def release(self) -> None:
        self.events.append("release")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    class Gpu:
        def flush_l2(self) -> None:
            seen.append("sweep")

        def synchronize(self) -> None:
            pass

    driver = ModuleType("driver")
    driver.cuProfilerStart = lambda: (seen.append("start") or 0,)  # type: ignore[attr-defined]
    driver.cuProfilerStop = lambda: (seen.append("stop") or 0,)  # type: ignore[attr-defined]
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(profiled.gpus, "gpu", Gpu)
    return seen


def use(monkeypatch: pytest.MonkeyPatch, made: dict[str, object]) -> None:
    """Implementations by name, each a program or what ``prepare`` raises."""

    class Fake(Implementation):
        name, workload, devices, summary = "x.y", "gemm", ("cuda",), ""

        def __init__(self, what: object) -> None:
            self.what = what

        def prepare(self, case, device):
            if isinstance(self.what, Exception):
                raise self.what
            return self.what

    monkeypatch.setattr(profiled.registry, "find", lambda impl, workload: Fake(made[impl]))


def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impls: list[str], seconds: float = 1e9) -> list[dict]:
    programs = [{"impl": impl, "case": CASE} for impl in impls]
    content = {"device": asdict(DEVICE) | {"features": []}, "seed": 1, "seconds": seconds, "programs": programs}
    (tmp_path / "job").write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["profiled", str(tmp_path / "job"), str(tmp_path / "answers")])
    profiled.main()
    return [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]


def test_one_warm_call_between_two_sweeps_is_counted(events, tmp_path, monkeypatch) -> None:
    use(monkeypatch, {"x.y": Recorder(events, None)})
    (answer,) = job(tmp_path, monkeypatch, ["x.y"])
    assert answer["status"] == "ok" and answer["window"] == 0 and answer["config"] == {"tile": 8}
    counted = events[events.index("start") + 1 : events.index("stop")]
    assert counted == ["sweep", "call", "sweep"]
    before = events[: events.index("start")]
    assert before.count("call") >= 1  # compiled, tuned and allocated
    assert before[-1] == "sweep"  # nothing dirty is left when counting begins
    assert events[-1] == "release"


def test_what_fails_takes_no_other_program_s_window(events, tmp_path, monkeypatch) -> None:
    counted_call = profiled._WARM_CALLS + 1
    use(
        monkeypatch,
        {
            "x.warm": Recorder(events, 1),
            "x.counted": Recorder(events, counted_call),
            "x.refuses": Unsupported("Not here."),
            "x.right": Recorder(events, None),
        },
    )
    answers = job(tmp_path, monkeypatch, ["x.warm", "x.counted", "x.refuses", "x.right"])
    assert [a["status"] for a in answers] == ["failed", "failed", "unsupported", "ok"]
    assert [a["window"] for a in answers] == [None, 0, None, 1]
    assert answers[0]["reason"] == "RuntimeError: no more"
    assert answers[2]["reason"] == "Not here."
    # Every window that was opened was closed, and is two sweeps long.
    marks = [e for e in events if e in ("start", "stop")]
    assert marks == ["start", "stop"] * 2
    assert events.count("release") == 3


def test_what_there_is_no_time_for_is_not_begun(events, tmp_path, monkeypatch) -> None:
    use(monkeypatch, {"x.y": Recorder(events, None)})
    assert [a["status"] for a in job(tmp_path, monkeypatch, ["x.y"], seconds=-1.0)] == ["left"]
    assert events == []


def test_inputs_are_the_seed_s(events, tmp_path, monkeypatch) -> None:
    taken = []

    class Taking(Recorder):
        def load(self, inputs):
            taken.append(inputs["A"].copy())
            return inputs

    use(monkeypatch, {"x.a": Taking(events, None), "x.b": Taking(events, None)})
    job(tmp_path, monkeypatch, ["x.a", "x.b"])
    first, second = taken
    assert np.array_equal(first, second)
    assert np.array_equal(first, profiled.parse_case(CASE).inputs(1)["A"])
