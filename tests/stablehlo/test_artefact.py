"""The portable artefact: the same bytes wherever they are made, for the oldest version, and right when read back."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import environments

ROOT = Path(__file__).parents[2]
CASES = (
    "gemm:33x65x47:f32:tn",
    "gemm:17x31x48:f16:bias+gelu",
    "gemm:b3x7x9x11:bf16:residual",
    "gemm:g5+0+31x33x65:f8e4m3",
    "gemm:9x8x7:i8:bias+relu",
    "attention:b2h4kv2q17k33d64:f32:window=5",
    "attention:b1h7kv1s19d64:bf16:causal",
    "attention:b1h2s21d64:f32:causal:fwdbwd",
)


@cache
def ask(stack: str, *question: str) -> dict[str, Any]:
    """An answer of ``in_stack`` from the environment of a stack."""
    found = environments.find(stack, "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"{found.reason} {found.remedy}")
    command = [str(found.python), "-m", "tests.stablehlo.in_stack", *question]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**found.environ}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("case", CASES)
def test_both_stacks_write_the_same_bytes(case: str) -> None:
    in_xla, in_iree = ask("xla", "export", case), ask("iree", "export", case)
    assert in_xla == in_iree
    assert in_xla["sha256"] == in_xla["again"]
    assert not in_xla["names_a_file"]


def test_two_cases_do_not_share_a_hash() -> None:
    hashes = [ask("iree", "export", case)["sha256"] for case in CASES]
    assert len(set(hashes)) == len(hashes)


def test_one_artefact_serves_every_m() -> None:
    few, many = (ask("xla", "open_rows", f"gemm:{m}x31x48:bf16:nt:bias+gelu") for m in (1, 133))
    assert few["sha256"] == many["sha256"]
    assert max(few["worst"], many["worst"]) <= 1


def test_written_for_the_oldest_version() -> None:
    answer = ask("iree", "versions")
    assert not answer["older_is_written"]
    written = ask("iree", "export", CASES[0])
    assert written["version"] == answer["oldest"]
    assert f"StableHLO_v{answer['oldest']}" in written["magic"]


@pytest.mark.parametrize("case", CASES)
def test_read_back_it_computes_the_same(case: str) -> None:
    answer = ask("xla", "read_back", case)
    assert answer["equal_to_newest"]
    assert answer["equal_to_direct"]
    assert answer["worst"] <= 1


@pytest.mark.parametrize("case", [CASES[1], CASES[5]])
def test_round_trip_through_mhlo(case: str) -> None:
    answer = ask("xla", "through_mhlo", case)
    assert answer["mhlo_dots"] > 0
    assert answer["stablehlo_left"] == 0
    assert answer["same_text"]
    assert answer["equal"]
