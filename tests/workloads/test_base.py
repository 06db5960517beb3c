"""Workloads found by name, ids from anywhere, dtypes and their rounding, sampling, the model of sums."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from impls.workloads.base import CaseError, TensorSpec, parse_case, workloads
from impls.workloads.dtypes import DTYPES, dtype, rounded, widened
from impls.workloads.parallel import each
from impls.workloads.rounding import ACCUMULATORS, Accumulator, log_odds
from impls.workloads.sampling import pieces, tile_sample

IDS = ["gemm:b2x8x8x8:bf16:nt:bias+gelu", "attention:b1h8kv2q4k9d16:f16:window=3:bwd", "ceiling:read:32MiB:repeats=3"]


def test_workloads_are_found() -> None:
    assert set(workloads()) >= {"gemm", "attention", "ceiling"}


@pytest.mark.parametrize("case_id", ["gemm", "", "conv:8x8", "gem:8x8x8:f32"])
def test_unknown_workloads_are_refused(case_id: str) -> None:
    with pytest.raises(CaseError, match=r"write one of attention:\.\.\., ceiling:\.\.\., gemm:"):
        parse_case(case_id)


@given(st.sampled_from(IDS), st.data())
def test_mangled_ids_are_refused_or_parse_to_what_they_say(case_id: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(case_id) - 1))
    to = data.draw(st.integers(at, len(case_id)))
    mangled = case_id[:at] + data.draw(st.text(alphabet=":=x+-0129bghkqsd.eK²٣ \n", max_size=4)) + case_id[to:]
    try:
        case = parse_case(mangled)
    except CaseError as refusal:
        assert len(str(refusal)) > 20
    else:
        assert parse_case(case.id) == case


@given(st.text(max_size=40))
@example("gemm:²x8x8:f32")
@example("gemm:8x8x8:f32\n")
@example("launch")
def test_any_text_is_refused_in_words_or_is_a_cases_id(text: str) -> None:
    for workload in ("", "gemm:", "attention:", "ceiling:"):
        try:
            case = parse_case(workload + text)
        except CaseError as refusal:
            assert str(refusal)
        else:  # Hypothesis has found "launch", a ceiling's whole id
            assert parse_case(case.id) == case


@pytest.mark.parametrize("case_id", IDS)
def test_cases_say_what_they_occupy(case_id: str) -> None:
    case = parse_case(case_id)
    specs = [*case.input_specs().values(), *case.output_specs().values()]
    assert case.total_bytes() == sum(s.nbytes for s in specs)
    assert case.intensity() == case.flops() / case.compulsory_bytes()


def test_bytes_of_huge_tensors_do_not_wrap() -> None:
    assert TensorSpec((2**31, 2**31, 8), "f64").nbytes == 2**68


def test_unit_roundoffs_are_half_the_distance_to_the_next_number() -> None:
    for name, storage in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16), ("f8e4m3", ml_dtypes.float8_e4m3fn)):
        one = np.ones(1, storage)
        following = (one.view(f"u{one.itemsize}") + 1).view(storage)
        assert dtype(name).unit_roundoff == (following.astype(float) - 1)[0] / 2
    assert DTYPES["i8"].integer and not DTYPES["f32"].integer
    with pytest.raises(KeyError, match="known: f64, f32"):
        dtype("f4")


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120))
@example(1 + 2.0**-11)  # halfway: to the even neighbour
@example(1 + 3 * 2.0**-11)
@example(-(1 + 2.0**-10 + 2.0**-12))
def test_tf32_rounds_to_the_nearest_even_of_ten_fraction_bits(value: float) -> None:
    result = float(rounded(np.array([value], np.float32), "tf32")[0])
    quantum = 2.0 ** max(np.frexp(value)[1] - 11, -126 - 10)
    assert result == np.round(value / quantum) * quantum
    assert (rounded(np.array([value], np.float32), "tf32").view(np.uint32) & 0x1FFF)[0] == 0


@given(st.integers(1, 5000), st.lists(st.integers(0, 5000), max_size=5), st.integers(0, 99))
def test_tile_sample_covers_every_tile(size: int, starts: list[int], seed: int) -> None:
    starts = [s for s in starts if s <= size]
    chosen = tile_sample(size, np.random.default_rng(seed), starts)
    assert (np.diff(chosen) > 0).all() and chosen[0] == 0 and chosen[-1] == size - 1
    for offset in range(64):  # wherever tiles of 64 begin
        assert np.unique((chosen[chosen >= offset] - offset) // 64).size == -((offset - size) // 64) or size <= offset
    for start in starts:
        assert start == size or start in chosen
    if size > 64 and not starts:
        assert chosen.size <= 3 * -(-size // 64)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_pieces_cover_in_order(start: int, length: int, step: int) -> None:
    parts = list(pieces(start, start + length, step))
    assert [i for p in parts for i in range(p.start, p.stop)] == list(range(start, start + length))
    assert all(0 < p.stop - p.start <= step for p in parts)


def test_each_keeps_order_and_passes_errors_on() -> None:
    assert list(each(lambda i: i * i, range(100))) == [i * i for i in range(100)]
    assert list(each(str, [])) == []

    def fail(i: int) -> int:
        return 1 // (i - 3)

    with pytest.raises(ZeroDivisionError):
        list(each(fail, range(5)))


@pytest.mark.parametrize("accumulator", ACCUMULATORS.values())
def test_bounds_grow_as_they_should(accumulator: Accumulator) -> None:
    odds = log_odds(10**6)
    total, squares = np.array([0.0, 1.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0, 4.0])
    bounds = [accumulator.bound(total, squares, n, odds) for n in (1, 2, 64, 128, 1024, 8192)]
    for one in bounds:
        assert one[0] <= one[1] < one[2]
    if not accumulator.promoted:  # which begins anew: of the same Q, more chunks err by less
        for less, more in pairwise(bounds):
            assert (less < more).all()
    doubled = accumulator.bound(2 * total, 4 * squares, 64, odds)
    np.testing.assert_allclose(doubled, 2 * accumulator.bound(total, squares, 64, odds))
    assert (accumulator.bound(total, squares, 64, odds, start=5.0) > accumulator.bound(total, squares, 64, odds)).all()
    assert accumulator.bound(np.zeros(1), np.zeros(1), 64, odds)[0] == 0


def test_error_bound_holds_the_probability_it_states() -> None:
    """Of many random sums, errors beyond the bound for one element in a thousand are no more than that."""
    generator = np.random.default_rng(0)
    products = generator.standard_normal((200_000, 64)).astype(np.float32)
    partial = np.zeros(products.shape[0], np.float32)
    for k in range(products.shape[1]):
        partial += products[:, k]
    wide = products.astype(np.float64)
    error = np.abs(partial - wide.sum(axis=1))
    odds = float(np.log(2 / 1e-3))
    bound = ACCUMULATORS["f32", "f32"].bound(wide.sum(axis=1), np.square(wide).sum(axis=1), 64, odds)
    assert (error > bound).mean() <= 1e-3
    assert (error > bound / 8).mean() > 1e-3  # and is no more than a few times too wide


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_widened_is_what_the_storage_converts_to(name: str, wide: type[np.floating]) -> None:
    storage = dtype(name).storage
    bits = np.arange(1 << 16, dtype=np.uint16) if storage.itemsize <= 2 else np.arange(1 << 16, dtype=np.uint32) * 65537
    values = bits.astype(f"u{storage.itemsize}").view(storage).reshape(256, 256)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        for some in (values, values[::3, 1:5], values.T):
            got = widened(some, wide)
            assert got.dtype == wide and np.array_equal(got, some.astype(wide), equal_nan=True)


def test_f8_is_rounded_as_ml_dtypes_rounds() -> None:
    storage = dtype("f8e4m3").storage
    numbers = np.arange(256, dtype=np.uint8).view(storage).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    between = (numbers[1:] + numbers[:-1]) / 2  # ties
    edges = np.array([464, 465, 1e9, np.inf, np.nan, 2.0**-10, 2.0**-149], np.float32)
    exact = np.concatenate([numbers, between, edges, -edges])
    random = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.concatenate([exact, np.nextafter(exact, np.inf), np.nextafter(exact, -np.inf), random])
        assert np.array_equal(rounded(values, "f8e4m3").view(np.uint8), values.astype(storage).view(np.uint8))
