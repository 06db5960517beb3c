"""What the variants of cuBLAS refuse and declare, known by hand."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from impls.contract import Unsupported
from impls.cublas import gemm
from impls.cublas.gemm import Default, Graph, Searched, Unfused
from impls.cublas.kernels.lt import Candidate
from impls.support import tuned
from impls.support.h200 import H200
from impls.workloads.base import parse_case


def test_unfused_takes_what_has_an_epilogue():
    assert "no epilogue" in Unfused().refuses(parse_case("gemm:64x64x64:bf16"), H200)
    assert Unfused().refuses(parse_case("gemm:64x64x64:bf16:bias+gelu"), H200) is None
    # cuBLASLt has no epilogue for i32, and none is asked of it.
    assert Unfused().refuses(parse_case("gemm:64x64x64:i8:bias"), H200) is None


@pytest.mark.parametrize(("epilogue", "passes"), [("bias", 1), ("residual", 1), ("bias+gelu", 2)])
def test_unfused_moves_c_twice_for_every_step(epilogue, passes):
    case = parse_case(f"gemm:64x32x16:bf16:{epilogue}")
    assert Unfused().traffic_bytes(case) - case.compulsory_bytes() == passes * 2 * (64 * 32 * 2)


def test_a_graph_is_the_baseline_by_another_launch():
    case = parse_case("gemm:64x64x8:f8e4m3:nt")
    assert "multiples of 16" in Graph().refuses(case, H200)
    assert Graph().traffic_bytes(case) == case.compulsory_bytes()


def test_gelu_of_an_f32_result_is_a_kernel_of_its_own():
    for spec, again in (
        ("f32:bias+gelu", 1),
        ("tf32:bias+gelu", 1),
        ("bf16:out=f32:bias+gelu", 1),
        ("f32:bias+relu", 0),
    ):
        case = parse_case(f"gemm:64x32x16:{spec}")
        assert Default().traffic_bytes(case) - case.compulsory_bytes() == again * 2 * (64 * 32 * 4)
    case = parse_case("gemm:64x32x16:bf16:bias+gelu")
    assert Default().traffic_bytes(case) == case.compulsory_bytes()


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a search kept: one case, with cuBLAS 13.1; 13.1 is installed."""
    kept = tmp_path / "h200.json"
    choice = {"algo": "42" * 64, "workspace": 4, "rank": 1, "tile": 24}
    chosen = {"cublas.searched": {"gemm:64x64x64:bf16": {"choice": choice, "time_us": 1.0}}}
    kept.write_text(json.dumps({"versions": {"nvidia-cublas": "13.1"}, "choices": chosen}))
    monkeypatch.setattr(tuned, "file", lambda stack, device_name: kept)
    monkeypatch.setattr(metadata, "version", {"nvidia-cublas": "13.1"}.__getitem__)
    return kept


def test_searched_takes_what_was_chosen(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "Product", lambda case, fused, candidate: (case.id, fused, candidate))
    program = Searched().prepare(parse_case("gemm:64x64x64:bf16"), H200)
    assert program == ("gemm:64x64x64:bf16", "none", Candidate("42" * 64, 4, 1))


def test_searched_runs_nothing_that_was_not_searched_or_with_another_library(
    searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unsupported, match="No algorithm has been searched"):
        Searched().prepare(parse_case("gemm:123x64x64:bf16"), H200)
    monkeypatch.setattr(metadata, "version", {"nvidia-cublas": "13.2"}.__getitem__)
    with pytest.raises(Unsupported, match=r"with cuBLAS 13\.1; here is 13\.2"):
        Searched().prepare(parse_case("gemm:64x64x64:bf16"), H200)


def test_committed_choices_are_read() -> None:
    kept = tuned.file(Path(gemm.__file__).parent, H200.name)
    choices = dict(tuned.choices(kept, "cublas.searched"))
    for case, choice in choices.items():
        assert Searched().refuses(case, H200) is None
        # cublasLtMatmulAlgo_t is 64 bytes.
        assert len(bytes.fromhex(Candidate.of(choice).algo)) == 64
    assert parse_case("gemm:8192x8192x8192:bf16") in choices
    assert list(tuned.versions(kept)) == [gemm._LIBRARY]
