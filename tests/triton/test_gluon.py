"""Which cases the Gluon kernels take, and what they compile to for Hopper, where no GPU is needed to see it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import environments
from impls.contract import Device
from impls.support.h200 import H200
from impls.triton import choices, gluon_tiles
from impls.triton.gluon import GluonAttention, GluonGemm
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm

ROOT = Path(__file__).parents[2]
# A Hopper CTA may have 227 KiB of shared memory (CUDA C++ programming guide, table of compute capabilities).
MOST_SHARED = 227 * 1024
GEMM = (
    "gemm:4096x4096x4096:bf16",
    "gemm:4096x4096x4096:bf16:bias+gelu",
    "gemm:4096x4096x4096:f16:tt:residual",
    "gemm:8192x8192x8192:f8e4m3:nt",
    "gemm:8192x8192x8192:f8e4m3:nt:acc=fast",
    "gemm:4096x4096x4096:tf32:nt",
    "gemm:256x256x256:bf16:out=f32:tn:bias+relu",
)
ATTENTION = (
    "attention:b1h2s1024d64:bf16",
    "attention:b1h2s1024d128:bf16:causal",
    "attention:b1h2s1024d256:f16",
    "attention:b1h4kv2s300d128:bf16:window=100",
)


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    found = environments.find("triton", "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"The kernels need Triton. {found.reason} {found.remedy}")
    # Interpreted, a kernel would not be compiled.
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [found.python, "-m", "tests.triton.gluon_native", *GEMM, *ATTENTION]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize("case_id", [*GEMM, *ATTENTION])
def test_a_kernel_multiplies_by_wgmma_from_what_tma_brought(kernels: dict[str, Any], case_id: str) -> None:
    code = kernels[case_id]["instructions"]
    assert code["wgmma"] > 0
    assert code["tma_load"] > 0
    assert code["tma_store"] > 0
    assert code["mbarrier"] > 0
    assert "mma" not in code
    assert "cp_async" not in code


@pytest.mark.parametrize("case_id", [*GEMM, *ATTENTION])
def test_warps_are_specialised(kernels: dict[str, Any], case_id: str) -> None:
    registers = kernels[case_id]["shapes"]["setmaxnreg"]
    assert kernels[case_id]["warps"] == 12  # two consumer warpgroups, and the producer's
    assert "inc 240" in registers
    assert "dec 24" in registers


@pytest.mark.parametrize("case_id", [*GEMM, *ATTENTION])
def test_products_are_not_serialised_and_little_is_spilled(kernels: dict[str, Any], case_id: str) -> None:
    # ptxas says C7510 and its neighbours where it makes products wait for each other.
    assert kernels[case_id]["ptxas"]["codes"] == []
    assert kernels[case_id]["ptxas"]["spills"] <= (128 if case_id in ATTENTION else 0)
    assert kernels[case_id]["shared_bytes"] <= MOST_SHARED


@pytest.mark.parametrize(
    ("case_id", "shape"),
    [
        ("gemm:4096x4096x4096:bf16", "m64n256k16.f32.bf16.bf16"),
        ("gemm:8192x8192x8192:f8e4m3:nt:acc=fast", "m64n256k32.f32.e4m3.e4m3"),
        ("gemm:8192x8192x8192:f8e4m3:nt", "m64n128k32.f32.e4m3.e4m3"),
        ("gemm:4096x4096x4096:tf32:nt", "m64n256k8.f32.tf32.tf32"),
        ("attention:b1h2s1024d256:f16", "m64n256k16.f32.f16.f16"),
    ],
)
def test_products_have_the_shape_that_the_tile_asks_for(kernels: dict[str, Any], case_id: str, shape: str) -> None:
    assert shape in kernels[case_id]["shapes"]["wgmma.mma_async"]


@pytest.mark.parametrize(
    ("case_id", "word"),
    [
        ("gemm:128x128x128:f32", "f32"),
        ("gemm:128x128x128:i8:nt", "i8"),
        ("gemm:128x128x128:f16:acc=f16", "accumulates"),
        ("gemm:128x128x128:f8e4m3", "K-major"),
        ("gemm:127x131x137:bf16", "16 bytes"),
        ("gemm:b3x33x32x64:bf16", "batch"),
        ("gemm:g64+64x128x128:bf16", "groups"),
    ],
)
def test_what_the_gemm_cannot_it_refuses(case_id: str, word: str) -> None:
    refusal = GluonGemm().refuses(parse_case(case_id), H200)
    assert refusal is not None
    assert word in refusal
    assert refusal.endswith(".")


@pytest.mark.parametrize(
    ("case_id", "word"),
    [
        ("attention:b1h1s64d64:f32", "f32"),
        ("attention:b1h1s64d64:bf16:bwd", "backward"),
        ("attention:b1h1s64d100:bf16", "multiples of 8"),
    ],
)
def test_what_the_attention_cannot_it_refuses(case_id: str, word: str) -> None:
    refusal = GluonAttention().refuses(parse_case(case_id), H200)
    assert refusal is not None
    assert word in refusal


def test_other_gpus_are_refused() -> None:
    other = Device("cuda", "NVIDIA B200", "sm_100", 1, 180 * 2**30)
    assert "sm_100" in (GluonGemm().refuses(parse_case("gemm:128x128x128:bf16"), other) or "")
    assert "sm_100" in (GluonAttention().refuses(parse_case("attention:b1h1s64d64:bf16"), other) or "")


@pytest.mark.parametrize("case_id", [*GEMM, "gemm:b64x1024x1024x1024:bf16", "gemm:4096x4096x4096:bf16:out=f32"])
def test_tilings_that_tuning_tries_fit_and_differ(case_id: str) -> None:
    case = parse_case(case_id)
    assert isinstance(case, Gemm)
    space = gluon_tiles.gemm_space(case)
    assert len(set(space)) == len(space) > 0
    for tiling in space:
        # A stage holds 128 x bk of A and bk x bn of B; C leaves through four buffers of 64 x bn / 4.
        element = {"f8e4m3": 1, "tf32": 4}.get(case.dtype, 2)
        ring = tiling.stages * (128 * tiling.bk + tiling.bk * tiling.bn) * element
        assert ring + 4 * 64 * tiling.bn // 4 * (4 if case.out == "f32" else 2) <= MOST_SHARED
        assert tiling.bk * element == 128
        assert tiling.lead < tiling.stages
    # Each depth that is tried is the deepest that fits, or one less.
    for bn in (128, 256):
        depths = {tiling.stages for tiling in space if tiling.bn == bn}
        assert max(depths) - min(depths) == 1


@pytest.mark.parametrize("spec", ["b2h16s8192d64:bf16", "b2h16s8192d128:bf16:causal", "b1h8kv2s512d192:f16"])
def test_blockings_that_tuning_tries_fit_and_differ(spec: str) -> None:
    case = parse_case(f"attention:{spec}")
    assert isinstance(case, Attention)
    space = gluon_tiles.attention_space(case)
    assert len(set(space)) == len(space) > 0
    for blocking in space:
        d = {64: 64, 128: 128, 192: 256}[case.d]
        q = 128 * d * 2
        assert q * (2 if d < 256 else 1) + 2 * blocking.stages * blocking.block * d * 2 <= MOST_SHARED
        assert 1 <= blocking.section <= case.batch * case.hq


def test_takes_what_was_tuned_for_a_case_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiling = {"bn": 256, "bk": 64, "stages": 4, "group": 7, "lead": 3}
    blocking = {"block": 128, "stages": 2, "section": 5}
    tuned = {
        "gemm:4096x4096x4096:bf16": {"choice": tiling, "seconds": 2.5},
        "attention:b2h16s8192d128:bf16:causal": {"choice": blocking, "seconds": 1.0},
    }
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "h200.json").write_text(json.dumps({"choices": {"triton.gluon": tuned}}))
    monkeypatch.setattr(choices, "_STACK", tmp_path)

    def gemm(spec: str) -> tuple[Any, str]:
        case = parse_case(f"gemm:{spec}")
        assert isinstance(case, Gemm)
        return gluon_tiles.choose_tiling(case, H200)

    def attention(spec: str) -> tuple[Any, str]:
        case = parse_case(f"attention:{spec}")
        assert isinstance(case, Attention)
        return gluon_tiles.choose_blocking(case, H200)

    near, origin = gemm("4096x8192x4096:f16:nt")
    assert (near.config(), origin) == (tiling, "tuned for gemm:4096x4096x4096:bf16 in 2.5 s")
    # C in 32 bits takes twice the room on its way out: a stage less, and a lead that fits it.
    near, _ = gemm("4096x4096x4096:bf16:out=f32")
    assert (near.stages, near.lead, near.group) == (3, 2, 7)
    # Another dtype, and a shape with too few tiles of that width, take the rule.
    assert gemm("4096x4096x4096:f8e4m3:nt")[1] == "rule"
    assert gemm("128x4096x4096:bf16")[1] == "rule"
    near, origin = attention("b2h16s8192d128:bf16:causal")
    assert (near.config(), origin) == (blocking, "tuned for attention:b2h16s8192d128:bf16:causal in 1.0 s")
    # A neighbour's heads have other keys: as many of them are walked together as take as much of L2.
    near, _ = attention("b2h16s2048d128:bf16:causal")
    assert (near.stages, near.section) == (2, 8 * 2**20 // (4 * 2048 * 128))
    assert attention("b2h16s8192d128:bf16")[1] == "rule"
