"""The compiled kernels, looked at and run in the stack's environment; skipped where that is not built."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import environments
from impls.ceilings.kernels.instructions import INSTRUCTIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def native() -> dict[str, Any]:
    python = Path(sys.executable)
    if find_spec("llvmlite") is None:
        found = environments.find("ceilings", "cpu")
        if isinstance(found, environments.Missing):
            pytest.skip(f"The kernels need llvmlite. {found.reason} {found.remedy}")
        python = found.python
    done = subprocess.run(
        [python, "-m", "tests.ceilings.native"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("dtype", "instruction"), [pytest.param(d, i, id=f"{d}-{i.mnemonic}") for d, of in INSTRUCTIONS.items() for i in of]
)
def test_machine_code_repeats_the_instruction_as_written(native: dict[str, Any], dtype: str, instruction: Any) -> None:
    """Eight turns of the unrolled loop on every register in flight: none was merged, none left out."""
    listing = native["listings"][f"{dtype} {instruction.mnemonic} {'+'.join(sorted(instruction.features))}"]
    count = sum(n for mnemonic, n in listing.items() if mnemonic.startswith(instruction.mnemonic))
    down, across = instruction.registers
    assert count == 8 * down * across


@pytest.mark.parametrize(("vectors", "past", "through"), [("avx512", "vmovntps", "vmovups"), ("neon", "stnp", "stp")])
def test_nontemporal_copies_store_past_the_caches(
    native: dict[str, Any], vectors: str, past: str, through: str
) -> None:
    assert native["listings"][f"{vectors} copy nontemporal"][past] > 0
    assert past not in native["listings"][f"{vectors} copy"]
    assert native["listings"][f"{vectors} copy"][through] > 0


def test_exponentials_are_made_of_fused_multiply_adds(native: dict[str, Any]) -> None:
    assert native["listings"]["avx512 exp"]["vscalefps"] == 17  # 16 in the unrolled loop, one in the array's
    assert native["listings"]["neon exp"]["fmla"] > 16 * 5


def test_rates_are_right_with_every_instruction_of_this_host(native: dict[str, Any]) -> None:
    assert native["rates"] and not any(native["rates"].values()), native["rates"]


@pytest.mark.parametrize(("bound", "ulp"), [(8, 2.2), (32, 4.0), (87, 6.0)])
def test_exponentials_err_by_few_ulp(native: dict[str, Any], bound: int, ulp: float) -> None:
    assert native["exp"]
    for method, worst in native["exp"].items():
        assert 0.4 < worst[str(bound)] <= ulp, method


def test_every_member_of_the_team_runs_every_call_once(native: dict[str, Any]) -> None:
    counts, rest = [n for n in native["team"] if n], [n for n in native["team"] if not n]
    assert set(counts) == {50} and len(rest) == 2 * len(counts)


def test_the_clock_counts_additions_that_were_done(native: dict[str, Any]) -> None:
    ended, additions = native["chain"]
    assert ended == additions
