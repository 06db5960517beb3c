"""Recording without a GPU: what FlashAttention-4 and QuACK launch for a case. Needs both, and CUTLASS' CuTe DSL.

Run with the interpreter that compiles (docs/environments.md): ``dsl/bin/python -m pytest tests/incumbents``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

# First of all: it tells the DSL which GPU to compile for, which is read when that is imported.
libraries = pytest.importorskip(
    "impls.incumbents.kernels.libraries",
    reason="flash-attn-4, quack-kernels or CUTLASS' CuTe DSL is not installed here",
)

from impls.incumbents import gemm  # noqa: E402
from impls.incumbents.kernels import recording  # noqa: E402
from impls.incumbents.kernels.recorder import Kernels, Unrecordable  # noqa: E402
from impls.incumbents.kernels.recording import Recording  # noqa: E402
from impls.workloads.base import parse_case  # noqa: E402


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGEMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = Kernels()
        made.watch()
        yield made


def recorded(kernels: Kernels, case_id: str, choice: gemm.Configuration | None = None) -> Recording:
    case = parse_case(case_id)
    with kernels.recording() as call:
        if choice is None:
            libraries.attend(case, call)
        else:
            libraries.multiply(case, choice, call)
    return call.recording(choice)


def sizes(one: Recording) -> dict[str, int]:
    return {b["name"]: b["bytes"] for b in one.buffers if b["name"] is not None}


def test_a_forward_pass_is_one_launch_over_the_case_s_tensors(kernels):
    one = recorded(kernels, "attention:b2h4kv2s256d64:bf16")
    query, key = 2 * 256 * 4 * 64 * 2, 2 * 256 * 2 * 64 * 2
    assert sizes(one) == {"Q": query, "K": key, "V": key, "O": query}
    [step] = one.steps
    assert step["arguments"][5] == pytest.approx(1 / math.sqrt(64))
    assert one.before == [] and one.scratch_bytes() == 0
    assert recording.library(one.kernels[0]["library"]).stat().st_size > 10_000


def test_the_forward_pass_of_a_backward_case_comes_before(kernels):
    one = recorded(kernels, "attention:b1h2s128d64:f16:bwd")
    assert one.kernels[0]["class"] == "FlashAttentionForwardSm90"
    assert [s["launch"] for s in one.before] == [0]
    assert all(s.get("launch") != 0 for s in one.steps)
    assert set(sizes(one)) == {"Q", "K", "V", "dO", "dQ", "dK", "dV"}


def test_the_layout_is_the_case_s_and_the_grid_that_of_132_multiprocessors(kernels):
    one = recorded(kernels, "gemm:256x384x128:bf16:nt", gemm.DEFAULT)
    [step] = one.steps
    a, b, c = (step["arguments"][n] for n in range(3))
    assert (a["shape"], a["strides"]) == ([256, 128], [128, 1])
    # B is stored (N, K), and seen as (K, N).
    assert sorted(zip(b["shape"], b["strides"], strict=True)) == [(128, 1), (384, 128)]
    assert (c["shape"], c["strides"]) == ([256, 384], [384, 1])
    # 66 clusters of two blocks.
    assert 66 in step["arguments"][5]


def test_what_is_zeroed_for_a_split_k_is_zeroed_again_in_every_call(kernels):
    choice = {**gemm.DEFAULT, "tile_n": 128, "split_k": 2}
    one = recorded(kernels, "gemm:128x256x1024:bf16:nt", choice)
    assert [sorted(s) for s in one.steps] == [["zero"], ["arguments", "launch"]]
    assert one.scratch_bytes() > 0


def test_f8_is_promoted_unless_the_case_says_otherwise(kernels):
    found = [recorded(kernels, f"gemm:256x256x256:f8e4m3:nt{acc}", gemm.DEFAULT) for acc in ("", ":acc=fast", "")]
    assert [one.kernels[0]["attributes"]["fp8_slow_accum"] for one in found] == [True, False, True]
    assert found[0] == found[2]


def test_what_a_recording_cannot_hold_is_refused(kernels):
    with pytest.raises(Unrecordable, match="aten::add"), kernels.recording() as call:
        call.named("A", (4, 4), "bf16") + 1
    with pytest.raises(Unrecordable, match="writes to"), kernels.recording() as call:
        call.named("A", (4, 4), "bf16").fill_(1.0)
    with kernels.recording() as call:
        outside = call.named("A", (4, 4), "bf16")
    with pytest.raises(Unrecordable, match="outside the call"), kernels.recording() as call:
        call.launch({"library": "none"}, (outside,))
