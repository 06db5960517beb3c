"""What no machine here runs: kernels lowered for Hopper, and what they become on TPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import environments

ROOT = Path(__file__).parents[2]
# Generations whose matrix units take bf16 through Mosaic; the first two, v2 and v3, take f32 only.
LATER = ("v4", "v4 lite", "v5e", "v5p", "v6e", "7x")
# Every kernel once in the form that a GPU runs: layouts, epilogues, dtypes, few rows, masks, ragged lengths.
MOSAIC = (
    "gemm:4096x4096x4096:bf16",
    "gemm:4096x4096x4096:bf16:tt:bias+gelu",
    "gemm:4096x4096x4096:f16:residual",
    "gemm:8192x8192x8192:f8e4m3:nt",
    "gemm:8192x8192x8192:f8e4m3:nt:acc=fast",
    "gemm:b64x1024x1024x1024:bf16",
    "gemm:16x8192x8192:bf16:nt:bias",
    "gemm:16x1024x8192:bf16:nt:residual",
    "gemm:16x1000x512:bf16:nt",
    "gemm:1x65x48:f16:tt",
    "gemm:1000x1000x1023:bf16",
    "attention:b2h16s8192d128:bf16",
    "attention:b2h16s8192d64:bf16:causal",
    "attention:b2h16s8192d256:bf16:causal",
    "attention:b1h4kv2s300d64:bf16:window=40",
    "attention:b64h64kv8q1k8192d128:bf16",
    "attention:b2h14kv2q1k257d256:f16:window=100",
    "attention:b2h16s8192d128:bf16:bwd",
    "attention:b2h16s8192d128:bf16:causal:bwd",
    "attention:b1h7kv1s61d64:f16:bwd",
)
TRITON = (
    "gemm:4096x4096x4096:bf16",
    "gemm:b3x33x31x47:i8:tt:residual",
    "attention:b2h16s8192d128:bf16:causal",
    "attention:b2h14kv2q33k70d96:f16:window=16",
)


@cache
def ask(*question: str) -> dict[str, Any]:
    """An answer of ``in_stack`` from the stack's environment."""
    found = environments.find("pallas", "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"{found.reason} {found.remedy}")
    command = [str(found.python), "-m", "tests.pallas.in_stack", *question]
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **found.environ}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("case", MOSAIC)
def test_lowers_to_one_mosaic_kernel_for_hopper(case: str) -> None:
    # A backward pass is here together with its forward pass.
    assert ask("lower", "mosaic", *MOSAIC)[case] == (2 if case.endswith(":bwd") else 1)


@pytest.mark.parametrize("case", TRITON)
def test_lowers_to_one_triton_kernel(case: str) -> None:
    assert ask("lower", "triton", *TRITON)[case] == 1


def test_tpu_code_is_kept_as_text_and_compiled_for_every_generation() -> None:
    told = ask("tpu", "gemm:256x256x512:bf16")
    assert told["config"]["vmem_bytes"] > 0
    tpu = told["config"]["tpu"]
    assert {name for name, one in tpu.items() if "refused" not in one} == set(LATER)
    assert all(one["code_bytes"] > 0 for one in tpu.values() if "refused" not in one)
    assert {one["flops"] for one in tpu.values() if "refused" not in one} == {2 * 256 * 256 * 512}
    assert all("bf16" in one["refused"] for one in tpu.values() if "refused" in one)
    kernel = told["artefacts"]["tpu-0.mosaic.mlir"]
    assert "memory_space<vmem>" in kernel and "tpu.matmul" in kernel
    assert "tpu_custom_call" in told["artefacts"]["tpu.stablehlo.mlir"]


def test_tpu_attention_names_every_memory_it_uses() -> None:
    told = ask("tpu", "attention:b1h2s512d128:bf16:causal")
    assert {name for name, one in told["config"]["tpu"].items() if "refused" not in one} == set(LATER)
    kernel = told["artefacts"]["tpu-0.mosaic.mlir"]
    for used in ("memory_space<hbm>", "memory_space<vmem>", "memory_space<smem>", "tpu.enqueue_dma", "tpu.wait_dma"):
        assert used in kernel, used
    assert "memory_space<any>" not in kernel


def test_a_race_of_a_copy_with_a_read_is_found() -> None:
    assert ask("race", "no") == {"raced": True, "seen": True}
    assert ask("race", "yes") == {"raced": False, "seen": False}
