"""Which cases the CuTe kernels of attention take, their blocks of keys and shares, and what they compile to."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impls import registry
from impls.cutlass.cute_attention import (
    SHARED_BYTES,
    Cute,
    CuteNoPingPong,
    backward_tiles,
    decode_tiles,
    decodes,
    forward_tiles,
    key_blocks,
    query_blocks,
    split,
)
from impls.support.h200 import H200, MULTIPROCESSORS
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case


def attention(case_id: str) -> Attention:
    case = parse_case(case_id)
    assert isinstance(case, Attention)
    return case


def test_both_are_found_by_name() -> None:
    assert isinstance(registry.find("cutlass.cute", "attention"), Cute)
    assert isinstance(registry.find("cutlass.cute_no_pingpong", "attention"), CuteNoPingPong)


@pytest.mark.parametrize(
    "case_id, word",
    [
        ("attention:b1h2s64d64:f32", "16 bits"),
        ("attention:b1h2s64d136:bf16:bwd", "registers"),
        ("attention:b1h2s64d264:bf16", "264"),
        ("attention:b1h2s64d60:bf16", "16 bytes"),
        ("attention:b1024h64s512d128:bf16", "32 bits"),
    ],
)
def test_a_refusal_says_why(case_id: str, word: str) -> None:
    why = registry.refusal(Cute(), attention(case_id), H200)
    assert why is not None
    assert word in why


def test_another_device_is_refused() -> None:
    case = attention("attention:b1h2s64d64:bf16")
    assert registry.refusal(Cute(), case, H200) is None
    for arch in ("sm_80", "sm_100"):
        assert registry.refusal(Cute(), case, replace(H200, arch=arch)) is not None


def test_one_query_has_no_turns_to_switch_off() -> None:
    case = attention("attention:b2h8kv2q1k64d64:bf16")
    assert registry.refusal(Cute(), case, H200) is None
    assert registry.refusal(CuteNoPingPong(), case, H200) is not None


@pytest.mark.parametrize("d", [8, 64, 72, 128, 192, 256])
def test_tiles_fit_shared_memory_and_hold_the_head(d: int) -> None:
    for mask in ("", ":causal", ":window=9"):
        tiles = forward_tiles(attention(f"attention:b1h2s512d{d}:bf16{mask}"))
        assert tiles.head >= d
        # 2 KiB for barriers and for aligning the tiles to 1 KiB.
        assert tiles.shared_bytes + 2048 <= SHARED_BYTES
    decode, _ = decode_tiles(attention(f"attention:b1h2q1k512d{d}:bf16"), MULTIPROCESSORS)
    assert decode.head >= d
    assert decode.shared_bytes + 2048 <= SHARED_BYTES
    assert decode.residents >= 1
    if d <= 128:
        backward = backward_tiles(attention(f"attention:b1h2s512d{d}:bf16:bwd"))
        assert backward.head >= d
        assert backward.shared_bytes + 4096 <= SHARED_BYTES


def sizes_and_mask(data: st.DataObject) -> tuple[int, int, str, int]:
    """Queries, keys, a mask, and its window, 0 where it has none."""
    sq, more = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 60))
    sk = sq + more
    mask = data.draw(st.sampled_from(["full", "causal", *(["window"] if sk > 1 else [])]))
    return sq, sk, mask, data.draw(st.integers(1, sk - 1)) if mask == "window" else 0


def left(queries: np.ndarray, keys: np.ndarray, sq: int, sk: int, mask: str, window: int) -> np.ndarray:
    """What a mask leaves of (queries, keys): the last query sees the last key."""
    seen = np.ones((queries.size, keys.size), bool)
    if mask != "full":
        seen &= keys <= queries + sk - sq
    if mask == "window":
        seen &= keys > queries + sk - sq - window
    return seen


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_blocks_of_keys_are_those_that_a_mask_leaves(data: st.DataObject) -> None:
    sq, sk, mask, window = sizes_and_mask(data)
    rows, keys = data.draw(st.sampled_from([8, 16, 24])), data.draw(st.sampled_from([4, 8, 12]))
    row = data.draw(st.integers(0, (sq - 1) // rows)) * rows
    begin, whole, partial, end = key_blocks(row, rows, sq, sk, window, keys, mask, min, max)

    # Queries of the tile that are beyond the last are computed and dropped.
    queries = np.arange(row, min(row + rows, sq))[:, None]
    key = np.arange(-(-sk // keys) * keys)[None, :]
    seen = (key < sk) & left(queries, key, sq, sk, mask, window)
    by_block = seen.reshape(len(queries), -1, keys)
    some = np.flatnonzero(by_block.any(axis=(0, 2)))
    assert (begin, end) == (some[0], some[-1] + 1)
    for block in range(max(begin, whole), min(partial, end)):
        assert by_block[:, block].all()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_blocks_of_queries_are_those_that_see_a_key(data: st.DataObject) -> None:
    sq, sk, mask, window = sizes_and_mask(data)
    rows, keys = data.draw(st.sampled_from([4, 8, 12])), data.draw(st.sampled_from([8, 16, 24]))
    first = data.draw(st.integers(0, (sk - 1) // keys)) * keys
    begin, whole, partial, end = query_blocks(first, keys, sq, sk, window, rows, mask, min, max)

    query = np.arange(-(-sq // rows) * rows)[:, None]
    key = np.arange(first, min(first + keys, sk))[None, :]
    seen = left(query, key, sq, sk, mask, window)
    by_block = seen.reshape(query.size // rows, -1)
    there = (seen & (query < sq)).reshape(query.size // rows, -1)
    some = np.flatnonzero(there.any(axis=1))
    assert all(begin <= block < end for block in some)
    assert end - begin <= some.size + 1
    for block in range(max(begin, whole), min(partial, end)):
        assert by_block[block].all()
        assert first + keys <= sk


def test_a_decode_step_is_split_where_heads_do_not_fill_the_device() -> None:
    # 512 key heads over 264 places leave 3 % of two rounds empty: nothing to gain.
    _, shares = decode_tiles(attention("attention:b64h64kv8q1k8192d128:bf16"), MULTIPROCESSORS)
    assert shares == 1
    case = attention("attention:b1h32kv8q1k131072d128:bf16")
    tiles, shares = decode_tiles(case, MULTIPROCESSORS)
    assert tiles.split
    assert 8 * shares <= MULTIPROCESSORS * tiles.residents < 8 * (shares + 1)
    # Never more shares than blocks.
    few = attention("attention:b1h2q1k100d128:bf16")
    assert split(few, decode_tiles(few, MULTIPROCESSORS)[0], MULTIPROCESSORS) <= 2


def test_parts_are_counted_as_workspace_and_traffic() -> None:
    case = attention("attention:b1h32kv8q1k131072d128:bf16")
    _, shares = decode_tiles(case, MULTIPROCESSORS)
    assert Cute().workspace_bytes(case) == shares * 32 * (128 + 2) * 4
    assert Cute().traffic_bytes(case) == case.compulsory_bytes() + 2 * Cute().workspace_bytes(case)
    assert decodes(case)
    assert Cute().workspace_bytes(attention("attention:b1h2s512d64:bf16")) == 0


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds a case without a GPU; its machine code's facts where a disassembler is there."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("compiling needs nvidia-cutlass-dsl: run this test in an environment that has it")
    from impls.cutlass.kernels import cute_host

    patch = pytest.MonkeyPatch()
    patch.setenv("RIDGEMARK_CACHE", str(tmp_path_factory.mktemp("cute")))
    yield cute_host
    patch.undo()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case_id",
    [
        "attention:b1h2s512d64:bf16",
        "attention:b1h2s512d128:bf16:causal",
        "attention:b1h2s512d128:f16:window=100",
        "attention:b1h2s512d256:bf16:causal",
    ],
)
def test_a_forward_kernel_multiplies_by_wgmma_what_tma_brought(kernels: Any, case_id: str) -> None:
    (built,) = Cute().libraries(attention(case_id))
    tiles, path = built.tiles, built.path
    ptx = json.loads(path.with_suffix(".json").read_text())["ptx"]
    shapes = ptx["shapes"]["wgmma.mma_async"]
    kind = tiles.dtype
    assert set(shapes) == {f"m64n{n}k16.f32.{kind}.{kind}" for n in {tiles.keys, tiles.head}}
    assert ptx["counts"]["cp.async.bulk.tensor load"] > 0
    assert len(ptx["shapes"]["setmaxnreg"]) == 2
    # The description comes with the library, and the library is found again.
    assert path == Cute().libraries(attention(case_id))[0].path
    assert path.with_suffix(".cubin").read_bytes()[:4] == b"\x7fELF"


@pytest.mark.slow
def test_a_decode_kernel_compiles_with_and_without_shares(kernels: Any) -> None:
    for case_id in ("attention:b64h64kv8q1k8192d128:bf16", "attention:b1h8kv2q1k9000d64:f16:window=4000"):
        (built,) = Cute().libraries(attention(case_id))
        assert built.path.is_file()
        assert built.tiles.split == (built.shares > 1)


@pytest.mark.slow
@pytest.mark.parametrize("case_id", ["attention:b1h2s512d64:f16:bwd", "attention:b1h2s512d128:bf16:window=70:fwdbwd"])
def test_a_backward_pass_starts_from_what_a_forward_kernel_leaves(kernels: Any, case_id: str) -> None:
    forward, backward = Cute().libraries(attention(case_id))
    assert forward.tiles.residuals
    ptx = json.loads(backward.path.with_suffix(".json").read_text())["ptx"]
    kind, head = backward.tiles.dtype, backward.tiles.head
    assert set(ptx["shapes"]["wgmma.mma_async"]) == {f"m64n{n}k16.f32.{kind}.{kind}" for n in {64, head}}
