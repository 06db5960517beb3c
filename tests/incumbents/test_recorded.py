"""What FlashAttention-4 and QuACK are given and refuse, and the form of their recordings, known by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from impls.contract import Device
from impls.incumbents import gemm
from impls.incumbents.attention import FlashAttention4
from impls.incumbents.gemm import Quack
from impls.incumbents.kernels import recording
from impls.incumbents.kernels.recording import Recorded, Recording
from impls.support import tuned
from impls.support.h200 import H200
from impls.workloads.base import parse_case

B200 = Device("cuda", "NVIDIA B200", "sm_100", 16, 1 << 37)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("64x64x64:f32", "not f32"),
        ("64x64x64:f16:acc=f16", "not acc=f16"),
        ("64x64x64:f8e4m3:nt:acc=fast", None),
        ("64x64x64:f8e4m3:nt:acc=fast:bias+gelu", "always promote"),
        ("64x64x64:f8e4m3", "layout nt"),
        # Rows of 65 and of 60 elements are 130 and 120 bytes; C's rows of 12 in f32 are 48.
        ("64x64x65:bf16:nt", "A has 65 of bf16"),
        ("64x60x64:bf16:nt", "C has 60 of bf16"),
        ("64x12x64:bf16:nt:out=f32", None),
        ("64x12x64:bf16:nt", "C has 12 of bf16"),
        ("1x64x64:bf16:tn", "A has 1 of bf16"),
        ("1x64x64:bf16:nt", None),
        ("g5+0+3x64x64:bf16:nt", None),
        ("b3x64x64x64:f8e4m3:nt:residual", None),
    ],
)
def test_quack_takes_what_tma_can_address(spec, why):
    said = Quack().refuses(parse_case(f"gemm:{spec}"), H200)
    assert said is None if why is None else why in said


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("b1h1s64d64:f32", "not f32"),
        ("b1h1s64d257:bf16", "a multiple of 8"),
        ("b1h1s64d264:bf16", "up to 256"),
        ("b1h8kv2q3k64d96:f16:window=5:bwd", None),
    ],
)
def test_flash_attention_takes_half_precision_and_heads_up_to_256(spec, why):
    said = FlashAttention4().refuses(parse_case(f"attention:{spec}"), H200)
    assert said is None if why is None else why in said


def test_what_is_compiled_for_another_gpu_is_refused():
    assert "sm_90" in Quack().refuses(parse_case("gemm:64x64x64:bf16"), B200)
    assert "sm_90" in FlashAttention4().refuses(parse_case("attention:b1h1s64d64:bf16"), B200)


def test_flash_attention_sums_dq_in_f32():
    forward = parse_case("attention:b2h4s128d64:bf16")
    assert FlashAttention4().traffic_bytes(forward) == forward.compulsory_bytes()
    backward = parse_case("attention:b2h4s128d64:bf16:bwd")
    rows = 2 * 4 * 128
    # O and dO in bf16; dQ in f32 zeroed, read and written by the sum, read; six f32 per row.
    expected = 2 * rows * 64 * 2 + 4 * rows * 64 * 4 + 6 * rows * 4
    assert FlashAttention4().traffic_bytes(backward) - backward.compulsory_bytes() == expected
    # Two query heads to a key head: dK and dV as well, of half the heads each.
    grouped = parse_case("attention:b2h4kv2s128d64:bf16:bwd")
    more = expected + 4 * (2 * 2 * 2 * 128) * 64 * 4
    assert FlashAttention4().traffic_bytes(grouped) - grouped.compulsory_bytes() == more


def test_configurations_begin_with_the_default_and_none_comes_twice():
    for spec in ("8192x8192x8192:bf16", "16x8192x8192:bf16:nt", "g64+64x512x512:bf16"):
        found = gemm.configurations(parse_case(f"gemm:{spec}"))
        assert found[0] == gemm.DEFAULT
        assert len({tuple(c.items()) for c in found}) == len(found)
    split = {c["split_k"] for c in gemm.configurations(parse_case("gemm:16x8192x8192:bf16:nt"))}
    assert split == {1, 2}
    # K is not split where rows belong to groups.
    assert {c["split_k"] for c in gemm.configurations(parse_case("gemm:g64x512x512:bf16"))} == {1}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGEMARK_CACHE", str(tmp_path))
    return tmp_path


def one(choice: dict[str, object] | None, scratch: int) -> Recording:
    buffers = [{"name": "A", "bytes": 512}, {"name": None, "bytes": scratch}, {"name": None, "bytes": 4}]
    return Recording(choice, [], buffers, [], [{"zero": {"buffer": 1}}])


def test_a_recording_is_read_as_it_was_written(cache):
    case = parse_case("gemm:16x8192x8192:bf16:nt")
    written = Recorded({"quack-kernels": "0.6.5"}, 132, {"ab": 1.5}, [one({"split_k": 1}, 0), one({"split_k": 2}, 64)])
    assert Quack().workspace_bytes(case) == 0
    written.write(recording.file("incumbents.quack", case))
    assert Recorded.read(recording.file("incumbents.quack", case)) == written
    # The most of any choice; inputs are no scratch.
    assert Quack().workspace_bytes(case) == 68
    assert [c.config() for c in Quack().space(case)] == [{"split_k": 1}, {"split_k": 2}]


def test_cases_whose_names_begin_alike_have_their_own_files(cache):
    groups = "+".join(["1024"] * 40)
    files = {recording.file("incumbents.quack", parse_case(f"gemm:g{groups}x{n}x64:bf16")) for n in (64, 128)}
    assert len(files) == 2
    assert all(file.parent.parent == cache / "incumbents" for file in files)


def test_a_shape_takes_the_choice_of_the_nearest_that_was_tuned(tmp_path, monkeypatch):
    kept = tmp_path / "h200.json"
    large, long = ({**gemm.DEFAULT, "tile_n": n} for n in (128, 160))
    few = {**gemm.DEFAULT, "tile_n": 64, "swap_ab": True}
    tuned_cases = {"8192x8192x8192:bf16": large, "1024x1024x65536:bf16": long, "16x8192x8192:bf16": few}
    results = {f"gemm:{case}": {"choice": choice, "seconds": 2.0} for case, choice in tuned_cases.items()}
    kept.write_text(json.dumps({"versions": {}, "choices": {"incumbents.quack": results}}))
    monkeypatch.setattr(tuned, "file", lambda stack, device_name: kept)

    def chosen(spec: str) -> tuple[object, str]:
        return gemm.choose(parse_case(f"gemm:{spec}"), H200.name)

    assert chosen("4096x4096x4096:bf16") == (large, "tuned for gemm:8192x8192x8192:bf16 in 2.0 s")
    assert chosen("2048x1024x32768:bf16") == (long, "tuned for gemm:1024x1024x65536:bf16 in 2.0 s")
    # The tile is as narrow as few rows allow.
    assert chosen("16x4096x4096:bf16") == ({**few, "tile_n": 16}, "tuned for gemm:16x8192x8192:bf16 in 2.0 s")
    assert chosen("65x4096x4096:bf16") == ({**few, "tile_n": 128}, "tuned for gemm:16x8192x8192:bf16 in 2.0 s")
    # f16 is computed as bf16 is; another width, layout or epilogue is another problem.
    assert chosen("8192x8192x8192:f16") == (large, "tuned for gemm:8192x8192x8192:bf16 in 2.0 s")
    for spec in ("8192x8192x8192:f8e4m3", "8192x8192x8192:bf16:nt", "8192x8192x8192:bf16:bias"):
        assert chosen(spec) == (gemm.DEFAULT, "QuACK's default")
