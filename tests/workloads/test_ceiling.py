"""Ceilings: ids, counts, and references that tell finished work from unfinished."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impls.workloads.base import CaseError, parse_case
from impls.workloads.ceiling import EXP_DTYPES, RATE_DTYPES, Ceiling

repeats = st.one_of(st.just(0), st.integers(1, 1000).map(lambda n: 64 * n))
ceilings = st.one_of(
    st.builds(Ceiling, st.just("rate"), st.sampled_from(RATE_DTYPES), repeats=repeats),
    st.builds(Ceiling, st.just("exp"), st.sampled_from(EXP_DTYPES), repeats=repeats),
    st.builds(
        Ceiling, st.sampled_from(["read", "copy"]), bytes=st.integers(1, 2**30).map(lambda n: 4096 * n), repeats=repeats
    ),
    st.builds(Ceiling, st.just("launch")),
)


@given(ceilings)
def test_id_parses_back(case: Ceiling) -> None:
    assert parse_case(case.id) == case


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("ceiling:read:1024KiB", "ceiling:read:1MiB"),
        ("ceiling:rate:f32:repeats=16384", "ceiling:rate:f32"),
        ("ceiling:copy:3GiB", "ceiling:copy:3GiB"),
        ("ceiling:read:2GiB:repeats=1", "ceiling:read:2GiB"),
    ],
)
def test_canonical_id(written: str, canonical: str) -> None:
    assert parse_case(written).id == canonical


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rate", "write ceiling:rate:f32"),
        ("rate:f4", "write one of f64"),
        ("exp:i8", "write one of f32, f16, bf16"),
        ("read:32MB", "such as 32MiB"),
        ("read:0KiB", "such as 32MiB"),
        ("read:-4KiB", "such as 32MiB"),
        ("read:5KiB", "multiple of 4KiB"),
        ("read:4096TiB", "up to 4TiB"),
        ("copy", "write ceiling:copy:32MiB"),
        ("launch:f32", "write ceiling:launch"),
        ("launch:repeats=2", "without repeats"),
        ("rate:f32:repeats=0", "repeats=1 or more"),
        ("rate:f32:repeats=65", "multiple of 64"),
        ("rate:f32:repeats=2147483648", "from 1 to"),
        ("fma:f32", "ceiling:rate"),
    ],
)
def test_refused_with_what_to_write(spec: str, says: str) -> None:
    with pytest.raises(CaseError, match=says):
        parse_case(f"ceiling:{spec}")


@pytest.mark.parametrize("dtype", RATE_DTYPES)
def test_rate_is_the_repeated_product(dtype: str) -> None:
    case = Ceiling("rate", dtype, repeats=128)
    inputs = case.inputs(3)
    a, b = (inputs[name].astype(int).tolist() for name in "AB")
    operations = 0
    entry = 0
    for _ in range(case.repeats):
        for k in range(64):
            entry += a[5][k] * b[k][7]
            operations += 2
    expected = case.expected(inputs)["C"]
    assert expected.value[5, 7] == entry % 2**31
    assert not expected.tolerance.any()
    assert case.flops() == operations * 64 * 64


@pytest.mark.parametrize("dtype", ["f32", "tf32", "f16", "bf16"])
def test_rate_stays_exact_in_f32_for_64_repeats(dtype: str) -> None:
    case = Ceiling("rate", dtype, repeats=64 * 3)
    inputs = case.inputs(1)
    deep_a = np.tile(inputs["A"].astype(np.float32), (1, 64))
    deep_b = np.tile(inputs["B"].astype(np.float32), (64, 1))
    fold = np.zeros((64, 64), np.float32)
    for k in range(64 * 64):
        fold += np.outer(deep_a[:, k], deep_b[k])
    total = np.zeros((64, 64), np.int32)
    for _ in range(3):
        total += fold.astype(np.int32)
    assert np.array_equal(total & np.int32(2**31 - 1), case.expected(inputs)["C"].value)


def test_rate_wraps_in_i32_and_never_gives_the_least() -> None:
    case = Ceiling("rate", "i8", repeats=1 << 20)
    inputs = case.inputs(2)
    product = inputs["A"].astype(np.int32) @ inputs["B"].astype(np.int32)
    wrapped = product * np.int32(1 << 20)  # NumPy's i32 arithmetic wraps
    assert np.abs(product.astype(np.int64) << 20).max() > 2**31
    assert (wrapped == np.iinfo(np.int32).min).any()  # what an unwritten element is poisoned with
    assert np.array_equal(wrapped & np.int32(2**31 - 1), case.expected(inputs)["C"].value)


@pytest.mark.parametrize("dtype", EXP_DTYPES)
def test_exp_in_its_dtype_passes_and_unfinished_fails(dtype: str) -> None:
    case = Ceiling("exp", dtype)
    x = case.inputs(4)["X"]
    assert x.dtype == {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    total = np.zeros(4096, np.float32)
    terms = [np.exp((x - np.asarray(j / 64, x.dtype)).astype(x.dtype)).astype(np.float32) for j in range(64)]
    for r in range(case.repeats):
        total += terms[r % 64]
    expected = case.expected({"X": x})["Y"]
    brute = sum(np.exp(x.astype(np.float64) - (r % 64) / 64) for r in range(case.repeats))
    np.testing.assert_allclose(expected.value, brute, rtol=1e-12)
    worst = float((np.abs(total - expected.value) / expected.tolerance).max())
    assert worst < 1
    unfinished = total * np.float32(1 - 1 / 8)
    assert (np.abs(unfinished - expected.value) > expected.tolerance).all()
    assert case.exps() == 4096 * case.repeats and case.flops() == 0


def test_read_sums_every_repeat() -> None:
    case = Ceiling("read", bytes=4096, repeats=7)
    inputs = case.inputs(0)
    total = 0
    for _ in range(7):
        for value in inputs["X"].tolist():
            total += value
    assert case.expected(inputs)["Y"].value[0] == total % 2**31
    assert case.compulsory_bytes() == 7 * 4096


def test_copy_counts_both_ways_and_sees_one_wrong_element() -> None:
    case = Ceiling("copy", bytes=1 << 20, repeats=2)
    inputs = case.inputs(0)
    copied = inputs["X"].copy()
    assert case.compulsory_bytes() == 2 * (1 << 20) * 2
    assert case.total_bytes() == 2 << 20
    expected = case.expected(inputs, sample=1)["Y"]
    assert np.array_equal(expected.select(copied), expected.value)
    assert case.invariants(inputs, {"Y": copied}, 0) is None
    copied[12345] += 1
    assert "1 elements" in str(case.invariants(inputs, {"Y": copied}, 0))


def test_launch_copies_one_element() -> None:
    case = Ceiling("launch")
    assert (case.flops(), case.exps(), case.compulsory_bytes()) == (0, 0, 8)
    inputs = case.inputs(9)
    assert case.expected(inputs)["Y"].value[0] == inputs["X"][0]


@given(ceilings.filter(lambda c: c.bytes <= 1 << 16))
def test_inputs_fit_their_specs_and_repeat(case: Ceiling) -> None:
    first, again, other = case.inputs(5), case.inputs(5), case.inputs(6)
    for name, spec in case.input_specs().items():
        assert first[name].shape == spec.shape and first[name].nbytes == spec.nbytes
        assert np.array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])
