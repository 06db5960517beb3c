"""Which of torch's products a GEMM gets on a GPU, and what it refuses there. The products themselves need a GPU."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path

import pytest

from benchmarks.engine import environments
from impls.support.h200 import H200
from impls.torch_compile import gpu
from impls.torch_compile.gemm import AotEager, MaxAutotuneTma
from impls.workloads.base import parse_case


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("64x64x64:f16:acc=f16", "accumulate"),
        ("64x64x64:f8e4m3", "layout nt"),
        ("64x64x40:f8e4m3:nt", "multiples of 16"),
        ("b2x64x64x64:f8e4m3:nt", "batched"),
        ("g32+32x64x64:f8e4m3:nt", "scale for every row"),
        ("16x64x64:i8:nt", "more than 16 rows"),
        ("g64+16x64x64:i8:nt", "more than 16 rows"),
        ("64x60x64:i8:nt", "multiples of 8"),
        ("b2x64x64x64:i8:nt", "batched"),
    ],
)
def test_refuses_in_a_sentence_what_torch_has_no_product_for(spec, told):
    reason = gpu.refusal(parse_case(f"gemm:{spec}"))
    assert told in reason
    assert reason.endswith(".")


@pytest.mark.parametrize(
    "spec",
    ["1x1x1:bf16", "64x64x64:tf32", "64x64x64:f8e4m3:nt:acc=fast:out=f32", "g0+17x64x64:i8", "17x8x8:i8:tt"],
)
def test_takes_the_rest(spec):
    assert gpu.refusal(parse_case(f"gemm:{spec}")) is None


TAKEN = (
    *("256x512x512:bf16", "127x131x137:bf16:bias+gelu", "256x512x512:f16:residual", "256x256x256:tf32:tt"),
    *("128x256x64:bf16:out=f32:bias+relu", "b3x128x64x96:bf16:nt:bias", "b3x128x64x96:f16:tn:out=f32"),
    *("256x512x512:f8e4m3:nt:bias+gelu", "256x512x512:f8e4m3:nt:acc=fast:out=f32", "256x512x512:i8:nt:bias"),
    *("g128+0+64+200x256x512:bf16:nt", "g128+0+64+200x256x512:bf16"),
)
TORCH_NAMES = {"bf16": "torch.bfloat16", "f16": "torch.float16", "f32": "torch.float32", "i32": "torch.int32"}


@cache
def products() -> dict[str, list]:
    found = environments.find("torch_compile", "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"{found.reason} {found.remedy}")
    command = [str(found.python), "-m", "tests.torch_compile.in_stack", *(f"gemm:{spec}" for spec in TAKEN)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env={**found.environ}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("spec", TAKEN)
def test_what_is_taken_comes_out_in_the_shape_and_dtype_of_c(spec):
    c = parse_case(f"gemm:{spec}").output_specs()["C"]
    assert products()[f"gemm:{spec}"] == [list(c.shape), TORCH_NAMES[c.dtype], True]


@pytest.mark.parametrize(
    ("spec", "one_call"),
    [
        ("g64+64x64x64:bf16", True),
        ("g64+0x8x8:bf16:nt", True),
        ("g64+64x65x64:bf16", False),  # rows of B are not whole 16 bytes
        ("g64+64x64x65:bf16", False),
        ("g64+64x64x64:f16", False),
        ("g64+64x64x64:bf16:out=f32", False),
        ("64x64x64:bf16", False),
    ],
)
def test_groups_are_one_call_where_tma_can_read_them(spec, one_call):
    assert gpu.grouped_in_one_call(parse_case(f"gemm:{spec}")) is one_call


def test_what_tma_is_not_for_is_refused_and_the_control_needs_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "TMA" in MaxAutotuneTma().refuses(parse_case("gemm:b2x64x64x64:bf16"), H200)
    assert "gcc or clang" in MaxAutotuneTma().refuses(parse_case("gemm:64x64x64:bf16"), H200)
    assert AotEager().refuses(parse_case("gemm:64x64x64:bf16"), H200) is None
