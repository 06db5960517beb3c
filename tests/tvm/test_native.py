"""What TVM makes of the kernels, looked at in the stack's environment; skipped where that is not built."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import environments

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def native() -> dict[str, Any]:
    found = environments.find("tvm", "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"The kernels need TVM. {found.reason} {found.remedy}")
    # As the harness runs its workers: bound, a thread would share its CPU with whatever else runs there.
    environ = {**os.environ, "TVM_BIND_THREADS": "0"}
    command = [found.python, "-m", "tests.tvm.native"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize(
    ("kernel", "mnemonic"),
    [
        ("znver4 f32", "vfmadd231ps"),
        ("znver4 bf16", "vdpbf16ps"),
        ("znver4 i8", "vpdpbusd"),
        ("haswell f32", "vfmadd231ps"),
        ("haswell bf16", "vfmadd231ps"),
        ("haswell i8", "vpmulld"),
        ("neoverse-n1 f32", "fmla"),
        ("neoverse-n1 bf16", "fmla"),
        ("neoverse-n1 i8", "mla"),
    ],
)
def test_innermost_loop_is_the_tile_in_registers(native: dict[str, Any], kernel: str, mnemonic: str) -> None:
    """One instruction for each vector of the tile and each unrolled word, and nothing that goes to the stack."""
    code = native["machine_code"][kernel]
    multiplications = sum(n for m, n in code.items() if m.startswith(mnemonic.removesuffix("231ps")))
    assert multiplications >= code["tile"]
    assert multiplications % code["tile"] == 0  # LLVM may unroll further
    assert code["spills"] == 0


def test_right_without_avx512_and_without_any_extension(native: dict[str, Any]) -> None:
    assert len(native["narrow"]) == 9
    assert all(ratio <= 1 for ratio in native["narrow"].values()), native["narrow"]


def test_few_rows_are_computed_without_packing(native: dict[str, Any]) -> None:
    assert len(native["unpacked"]) == 16
    for shape, (ratio, as_expected) in native["unpacked"].items():
        assert ratio <= 1, shape
        assert as_expected, shape


def test_elements_are_read_and_rounded_bit_for_bit(native: dict[str, Any]) -> None:
    """All 256 f8e4m3 and 65536 bf16 numbers; every tie between two bf16 numbers; NaN stays NaN."""
    got = native["elements"]
    assert [got[name] for name in ("f8e4m3 read", "bf16 read", "bf16 rounded")] == [0, 0, 0]


def test_exp_and_gelu_are_as_exact_as_their_docstrings_say(native: dict[str, Any]) -> None:
    got = native["elements"]
    assert got["exp, relative error"] < 2 * 2**-23
    assert got["exp(-100)"] == 0
    assert got["gelu, error over |z|"] < 16 * 2**-24  # what the workload's tolerance allows


def test_one_compilation_serves_every_m(native: dict[str, Any]) -> None:
    got = native["symbolic"]
    assert set(got["errors"]) == {"1", "13", "14", "15", "200", "1031"}
    assert all(ratio <= 1 for ratio in got["errors"].values()), got["errors"]
    assert (got["compiled"], got["reused"]) == (1, 5)


def test_one_compilation_serves_every_group(native: dict[str, Any]) -> None:
    assert native["symbolic"]["groups"] <= 1


def test_relax_fuses_epilogues_into_the_product(native: dict[str, Any]) -> None:
    """One kernel per GEMM; of attention the two products and the softmax, scale, mask and roundings inside them."""
    fused = native["fusion"]
    assert len(fused["bias+gelu"]) == 1
    assert len(fused["residual"]) == 1
    work = [name for name in fused["attention"] if "matmul" in name or "softmax" in name]
    assert len(work) == 3
    assert not [name for name in fused["attention"] if name in ("multiply", "add", "cast")]


def test_relax_branches_and_loops_by_recursion(native: dict[str, Any]) -> None:
    got = native["control_flow"]
    errors = dict(got["errors"])
    assert errors.pop("size") > 0.01  # five layers have not gone to zero
    assert len(errors) == 8
    assert all(error < 1e-5 for error in errors.values()), errors
    assert any("matmul" in name and "relu" in name for name in got["kernels"])


def test_every_tuned_record_of_this_cpu_is_replayed_right(native: dict[str, Any]) -> None:
    if not native["records"]:
        pytest.skip("No records are tuned for this CPU.")
    assert all(ratio <= 1 for ratio in native["records"].values()), native["records"]
