"""One graph per case, no recompilation unnoticed, and the generated code kept."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import environments
from impls.contract import Device
from impls.torch_compile import capture

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def captured() -> dict[str, Any]:
    found = environments.find("torch_compile", "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"{found.reason} {found.remedy}")
    reason = capture.lacks_compiler(Device("cpu", "", "x86_64", 2, 1 << 34))
    if reason is not None:
        pytest.skip(reason)
    command = [str(found.python), "-m", "tests.torch_compile.captured"]
    environ = {**os.environ, **found.environ}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


PROGRAMS = ("epilogue", "another shape", "control", "backward", "raced")


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_graph_and_no_recompilation(captured: dict[str, Any], program: str) -> None:
    config = captured[program]["config"]
    assert (config["graphs"], config["graph_breaks"], config["recompiles"]) == (1, 0, 0)
    assert config["compile_s"] > 0


def test_a_recompilation_is_an_error(captured: dict[str, Any]) -> None:
    assert "2 graphs" in captured["recompiled"]


def test_generated_code_is_kept(captured: dict[str, Any]) -> None:
    """GELU's tanh in a C++ kernel, the product by the library; forward and backward apart; the control has none."""
    code = captured["epilogue"]["artefacts"]["forward.py"]
    assert "tanh" in code
    assert captured["epilogue"]["config"]["cpp_kernels"] == 1
    assert captured["epilogue"]["config"]["library_calls"] == ["addmm"]
    assert set(captured["backward"]["artefacts"]) == {"forward.py", "backward.py"}
    assert "bmm" in captured["backward"]["artefacts"]["backward.py"]
    assert captured["control"]["artefacts"] == {}


def test_max_autotune_races_both_libraries(captured: dict[str, Any]) -> None:
    [race] = captured["raced"]["config"]["autotuned"]
    assert race["of"] == ["mm", "onednn_inner_product"]
    assert captured["raced"]["config"]["library_calls"] == [race["fastest"]]
