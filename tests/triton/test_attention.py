"""What the attention kernels compile to for GPUs that are not there, which tiles they get, how keys are shared."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import environments
from impls.contract import Device
from impls.support.h200 import H200
from impls.triton import attention_tiles
from impls.triton.attention import Decode, Flash, FlashTma
from impls.triton.attention_tiles import PROGRAMS_AT_ONCE, SHARED_BYTES, choose, key_blocks, shared_bytes, shares
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case
from impls.workloads.dtypes import dtype

ROOT = Path(__file__).parents[2]
AMPERE = Device("cuda", "NVIDIA A100", "sm_80", 1, 80 * 2**30)
BACKWARD = "attention:b1h4s512d128:bf16:causal:bwd"
DECODE = "attention:b8h64kv8q1k8192d128:bf16"
#: Target -> implementation and case -> kernel -> families of instructions that it must and must not hold.
CODE: dict[str, dict[tuple[str, str], dict[str, tuple[set[str], set[str]]]]] = {
    "sm_80": {
        ("triton.flash", BACKWARD): {
            kernel: ({"mma", "cp_async", "ex2"}, {"wgmma", "tma_load"})
            for kernel in ("forward", "backward_kv", "backward_q")
        },
        ("triton.decode", DECODE): {"forward": ({"mma", "cp_async"}, {"wgmma"})},
    },
    "sm_90": {
        ("triton.flash", BACKWARD): {
            kernel: ({"wgmma", "cp_async", "ex2"}, {"mma", "tma_load"})
            for kernel in ("forward", "backward_kv", "backward_q")
        },
        ("triton.flash_tma", BACKWARD): {
            kernel: ({"wgmma", "tma_load", "mbarrier", "ex2"}, {"mma", "cp_async"})
            for kernel in ("forward_tma", "backward_kv_tma", "backward_q_tma")
        },
        ("triton.flash_tma", "attention:b1h4s300d256:f16:window=100"): {
            "forward_tma": ({"wgmma", "tma_load", "ex2"}, {"mma", "local_store"})
        },
        # What takes most shared memory.
        ("triton.flash", "attention:b1h2s40d256:f32"): {"forward": ({"cp_async", "ex2"}, {"wgmma"})},
        # Sixteen rows fill no wgmma, whose tiles have 64.
        ("triton.decode", DECODE): {"forward": ({"mma", "cp_async"}, {"wgmma", "local_store"})},
    },
    "sm_100": {
        ("triton.flash", "attention:b1h4s512d128:bf16:causal"): {"forward": ({"tcgen05", "cp_async"}, {"wgmma"})},
        ("triton.flash_tma", "attention:b1h4s512d128:bf16"): {"forward_tma": ({"tcgen05", "tma_load"}, {"wgmma"})},
    },
    "gfx942": {
        ("triton.flash", BACKWARD): {kernel: ({"mfma"}, set()) for kernel in ("forward", "backward_kv", "backward_q")},
        ("triton.decode", DECODE): {"forward": ({"mfma"}, set())},
    },
}


@cache
def compiled(arch: str) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Facts about the kernels of every case of ``CODE`` for one target."""
    found = environments.find("triton", "cpu")
    if isinstance(found, environments.Missing):
        pytest.skip(f"{found.reason} {found.remedy}")
    pairs = [word for pair in CODE[arch] for word in pair]
    command = [str(found.python), "-m", "tests.triton.attention_native", arch, *pairs]
    # Nothing of the environment's variables: they ask for the interpreter.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={}, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CODE[arch], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("arch", CODE)
def test_compiles_to_the_instructions_of_the_device(arch: str) -> None:
    for pair, kernels in CODE[arch].items():
        for kernel, (wanted, unwanted) in kernels.items():
            families = set(compiled(arch)[pair][kernel]["instructions"])
            assert wanted <= families, (pair, kernel)
            assert not unwanted & families, (pair, kernel)


@pytest.mark.parametrize("arch", CODE)
def test_fits_shared_memory(arch: str) -> None:
    for kernels in compiled(arch).values():
        for name, facts in kernels.items():
            assert facts["shared_bytes"] <= SHARED_BYTES[arch], name


def test_forward_spills_next_to_nothing_on_hopper() -> None:
    for kernels in compiled("sm_90").values():
        if "forward_tma" in kernels:
            assert kernels["forward_tma"]["stack_bytes"] == 0
        if "backward_kv" in kernels:  # 16 warps have 128 registers each
            assert kernels["forward"]["stack_bytes"] <= 64


@pytest.mark.parametrize(
    ("case_id", "expected"),
    [
        # 512 key heads of 128 blocks over 264 programs at a time: two rounds of 128 blocks each; sharing only adds.
        ("attention:b64h64kv8q1k8192d128:bf16", 1),
        # 8 key heads: 33 programs for each fill the device once.
        ("attention:b1h32kv8q1k131072d128:bf16", 33),
        # Two blocks of keys: putting shares together would cost more than it gains.
        ("attention:b1h8kv2q1k128d64:f16", 1),
    ],
)
def test_keys_are_shared_to_fill_the_device(case_id: str, expected: int) -> None:
    case = parse_case(case_id)
    assert isinstance(case, Attention)
    assert PROGRAMS_AT_ONCE == 264
    assert shares(case, 64) == expected


@pytest.mark.parametrize("sk", [1, 63, 64, 65, 1029, 8192, 1_000_000])
@pytest.mark.parametrize("heads", [1, 3, 264, 1000])
def test_every_share_has_keys(sk: int, heads: int) -> None:
    case = parse_case(f"attention:b1h{heads}q1k{sk}d64:bf16")
    assert isinstance(case, Attention)
    count, blocks = shares(case, 64), key_blocks(case, 64)
    assert 1 <= count <= blocks
    assert blocks == -(-sk // 64)


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("d", [1, 17, 64, 96, 128, 200, 256])
def test_chosen_tiles_fit_shared_memory(arch: str, kind: str, d: int) -> None:
    device = Device("cuda", "some other GPU", arch, 1, 0)
    for kernel in attention_tiles.IMPLEMENTATIONS:
        direction = ":bwd" if kernel.startswith("backward") else ""
        sq = 1 if kernel == "decode" else 4096
        case = parse_case(f"attention:b1h8q{sq}k4096d{d}:{kind}:causal{direction}")
        assert isinstance(case, Attention)
        tiles, _ = choose(kernel, case, device)
        assert shared_bytes(kernel, tiles, d, dtype(kind).bytes) <= SHARED_BYTES[arch], kernel


def test_a_tile_has_no_more_rows_than_there_are() -> None:
    case = parse_case("attention:b1h8kv2q3k4096d128:bf16")
    assert isinstance(case, Attention)
    assert choose("forward", case, H200)[0].block_m == 16  # 3 queries of 4 heads
    assert choose("decode", case, H200)[0].block_m == 16


@pytest.mark.parametrize("implementation", [Flash(), FlashTma(), Decode()])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_tuning_tries_only_what_fits(implementation: Flash | FlashTma | Decode, d: int) -> None:
    for spec in (f"b2h16s8192d{d}:bf16", f"b2h16s8192d{d}:bf16:causal:bwd", f"b8h8q1k8192d{d}:f16"):
        case = parse_case(f"attention:{spec}")
        assert isinstance(case, Attention)
        if implementation.refuses(case, H200) is not None:
            continue
        for choice in implementation.space(case):
            for kernel, tiles in choice.tiles:
                assert kernel in attention_tiles.IMPLEMENTATIONS
                assert shared_bytes(kernel, tiles, d, 2) <= SHARED_BYTES["sm_90"]


def test_tuning_has_something_to_try() -> None:
    forward = parse_case("attention:b2h16s8192d128:bf16")
    backward = parse_case("attention:b2h16s8192d128:bf16:bwd")
    decode = parse_case(DECODE)
    assert isinstance(forward, Attention) and isinstance(backward, Attention) and isinstance(decode, Attention)
    for implementation in (Flash(), FlashTma()):
        assert {k for c in implementation.space(forward) for k, _ in c.tiles} == set(implementation._kernels(forward))
        tried = {k for c in implementation.space(backward) for k, _ in c.tiles}
        assert tried == {k for k in implementation._kernels(backward) if k.startswith("backward")}
    assert len(Decode().space(decode)) > 1


@pytest.mark.parametrize(
    ("implementation", "case_id", "device", "word"),
    [
        (Flash(), "attention:b1h1s64d257:bf16", H200, "257"),
        (FlashTma(), "attention:b1h1s64d100:bf16", H200, "16 bytes"),
        (FlashTma(), "attention:b1h1s64d64:bf16", AMPERE, "TMA"),
        (Decode(), "attention:b1h1s64d64:bf16:bwd", H200, "backward"),
        (Decode(), "attention:b1h1q65k128d64:bf16", H200, "65 queries"),
    ],
)
def test_what_it_cannot_it_refuses(
    implementation: Flash | FlashTma | Decode, case_id: str, device: Device, word: str
) -> None:
    refusal = implementation.refuses(parse_case(case_id), device)
    assert refusal is not None
    assert word in refusal
    assert refusal.endswith(".")
