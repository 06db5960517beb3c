"""Attention cases: ids, counts, and references against loops, finite differences and each other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from impls.workloads import attention_reference
from impls.workloads.attention import DIRECTIONS, DTYPES, Attention
from impls.workloads.base import CaseError, parse_case
from impls.workloads.dtypes import dtype, rounded


@st.composite
def attentions(draw: st.DrawFn, largest: int = 4096) -> Attention:
    hkv, group = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    sq, sk = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    mask = draw(st.sampled_from(["full", "causal", "window"]))
    if mask != "full":
        sq, sk = min(sq, sk), max(sq, sk)
    assume(mask != "window" or sk > 1)
    window = draw(st.integers(1, sk - 1)) if mask == "window" else 0
    d, batch = draw(st.integers(1, 300)), draw(st.integers(1, 64))
    name, direction = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DIRECTIONS))
    return Attention(batch, hkv * group, hkv, sq, sk, d, name, mask, window, direction)


@given(attentions(), st.randoms())
def test_id_parses_back_whatever_the_order(case: Attention, random: object) -> None:
    assert parse_case(case.id) == case
    workload, shape, name, *options = case.id.split(":")
    random.shuffle(options)  # type: ignore[attr-defined]
    assert parse_case(":".join([workload, shape, name, *options])) == case


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("b1h8kv8q1024k1024d64:bf16:full:fwd", "b1h8s1024d64:bf16"),
        ("b2h32kv8s4096d128:bf16:bwd:causal", "b2h32kv8s4096d128:bf16:causal:bwd"),
        ("b2h32kv8q1k4096d128:f16:causal:window=128", "b2h32kv8q1k4096d128:f16:window=128"),
        ("b2h32kv8q1k4096d128:f16:window=128:causal", "b2h32kv8q1k4096d128:f16:window=128"),
    ],
)
def test_canonical_id(written: str, canonical: str) -> None:
    assert parse_case(f"attention:{written}").id == f"attention:{canonical}"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("b1h8d64:bf16", "write b<B>h<Hq>"),
        ("b1h8s0d64:bf16", "q0 of an attention; write q with a number from 1"),
        ("b0h8s8d64:bf16", "b0 of an attention"),
        ("b1h8s-8d64:bf16", "write b<B>h<Hq>"),
        ("b1h8q8d64:bf16", "write b<B>h<Hq>"),
        ("b1h8s64d64", "no dtype; write attention:b1h8s64d64:bf16"),
        ("b1h8s64d64:f8e4m3", "no dtype 'f8e4m3'; write one of f32"),
        ("b1h8kv3s64d64:f16", "do not share 3 key heads evenly"),
        ("b1h8kv16s64d64:f16", "do not share 16 key heads evenly"),
        ("b1h8q9k8d64:f16:causal", "the first 1 would see no key; write k with at least 9"),
        ("b1h8s64d64:f16:window=0", "write window=<keys>, from 1"),
        ("b1h8s64d64:f16:window=64", "write causal"),
        ("b1h8s64d64:f16:full:causal", "two masks"),
        ("b1h8s64d64:f16:window=8:full", "two masks"),
        ("b1h8s64d64:f16:bwd:fwd", "two directions"),
        ("b1h8s64d64:f16:backward", "write causal, window=<keys>, bwd or fwdbwd"),
        ("b1h8s9999999999d64:f16", "a number from 1 to 2147483647"),
        ("b65536h1024s16384d128:f16", "2\\^40 elements"),
    ],
)
def test_refused_with_what_to_write(spec: str, says: str) -> None:
    with pytest.raises(CaseError, match=says):
        parse_case(f"attention:{spec}")


def sees(case: Attention, i: int, j: int) -> bool:
    """The definition of the masks."""
    if case.mask == "full":
        return True
    last = i + case.sk - case.sq
    return j <= last and (case.mask == "causal" or j > last - case.window)


@given(attentions(largest=40))
def test_counts_against_loops(case: Attention) -> None:
    pairs = [(i, j) for i, j in itertools.product(range(case.sq), range(case.sk)) if sees(case, i, j)]
    per_head = len(pairs)
    assert case.visible() == per_head
    heads = case.batch * case.hq
    matmuls = {"fwd": 2, "bwd": 5, "fwdbwd": 7}[case.direction]
    assert case.flops() == heads * per_head * matmuls * 2 * case.d
    assert case.exps() == heads * per_head * (2 if case.direction == "fwdbwd" else 1)
    seen = len({j for _, j in pairs})
    queries, all_keys, seen_keys = (
        case.batch * rows * h * case.d for rows, h in ((case.sq, case.hq), (case.sk, case.hkv), (seen, case.hkv))
    )
    elements = {
        "fwd": queries + 2 * seen_keys + queries,
        "bwd": 2 * queries + 2 * seen_keys + queries + 2 * all_keys,
        "fwdbwd": 2 * queries + 2 * seen_keys + 2 * queries + 2 * all_keys,
    }[case.direction]
    assert case.compulsory_bytes() == elements * dtype(case.dtype).bytes


def test_known_counts() -> None:
    case = parse_case("attention:b2h16s8192d128:bf16")
    assert case.flops() == 4 * 2 * 16 * 8192 * 8192 * 128
    assert case.intensity() == 8192 / 2  # S / 2 for multi-head attention in 16 bits
    decode = parse_case("attention:b64h64kv8q1k8192d128:bf16")
    assert decode.intensity() == pytest.approx(8, rel=0.01)  # Hq / Hkv
    causal = parse_case("attention:b2h16s8192d128:bf16:causal")
    assert causal.flops() == case.flops() * 8193 // (2 * 8192)
    assert parse_case("attention:b1h1s64d32:f16:bwd").flops() * 2 == parse_case("attention:b1h1s64d32:f16").flops() * 5


def attend(case: Attention, x: dict[str, np.ndarray], b: int, i: int, h: int) -> list[float]:
    """O[b, i, h] in Python floats, from the definition."""
    kv = h * case.hkv // case.hq
    row = x["Q"][b, i, h].tolist()
    keys = [j for j in range(case.sk) if sees(case, i, j)]
    weights = [
        math.exp(math.fsum(map(math.prod, zip(row, x["K"][b, j, kv].tolist(), strict=True))) / case.d**0.5)
        for j in keys
    ]
    total = math.fsum(weights)
    values = [x["V"][b, j, kv].tolist() for j in keys]
    return [math.fsum(w * v[c] for w, v in zip(weights, values, strict=True)) / total for c in range(case.d)]


SMALL = [
    "attention:b2h4kv2s7d5:f32",
    "attention:b1h2q3k9d4:f32:causal",
    "attention:b2h6kv2q4k9d3:f32:window=3",
    "attention:b1h3q5k2d4:f32",
    "attention:b1h2s6d4:f32:window=1",
]


@pytest.mark.parametrize("case_id", SMALL)
def test_forward_against_loops(case_id: str) -> None:
    case = parse_case(case_id)
    assert isinstance(case, Attention)
    x = case.inputs(1)
    value = case.expected(x)["O"].value
    for b, i, h in itertools.product(range(case.batch), range(case.sq), range(case.hq)):
        assert value[b, i, h] == pytest.approx(attend(case, x, b, i, h), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("case_id", SMALL)
def test_backward_against_finite_differences(case_id: str) -> None:
    forward, case = parse_case(case_id), parse_case(f"{case_id}:bwd")
    x = {name: values.astype(np.float64) for name, values in case.inputs(1).items()}
    gradients = {name: one.value for name, one in case.expected(x).items()}
    generator = np.random.default_rng(0)
    step = 1e-5
    for name in ("Q", "K", "V"):
        direction = generator.standard_normal(x[name].shape)
        ahead, behind = (
            (forward.expected({**x, name: x[name] + sign * step * direction})["O"].value * x["dO"]).sum()
            for sign in (1, -1)
        )
        along = (gradients[f"d{name}"] * direction).sum()
        assert along == pytest.approx((ahead - behind) / (2 * step), rel=1e-7, abs=1e-8)
        # Element by element, so that no error cancels along the direction.
        where = tuple(int(generator.integers(n)) for n in x[name].shape)
        unit = np.zeros_like(x[name])
        unit[where] = step
        ahead, behind = (
            (forward.expected({**x, name: x[name] + sign * unit})["O"].value * x["dO"]).sum() for sign in (1, -1)
        )
        assert gradients[f"d{name}"][where] == pytest.approx((ahead - behind) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("case_id", SMALL)
def test_both_directions_are_the_two_together(case_id: str) -> None:
    both = parse_case(f"{case_id}:fwdbwd")
    x = both.inputs(3)
    together = both.expected(x)
    apart = {**parse_case(case_id).expected(x), **parse_case(f"{case_id}:bwd").expected(x)}
    assert list(together) == list(both.output_specs()) == ["O", "dQ", "dK", "dV"]
    for name, one in together.items():
        np.testing.assert_array_equal(one.value, apart[name].value)
        np.testing.assert_allclose(one.tolerance, apart[name].tolerance, rtol=1e-5)


@pytest.mark.parametrize("mask", ["", ":causal", ":window=40"])
def test_blocks_do_not_change_the_reference(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = parse_case(f"attention:b1h2kv1q90k130d8:f32{mask}:fwdbwd")
    x = case.inputs(0)
    whole = case.expected(x)
    monkeypatch.setattr(attention_reference, "_BLOCK", 700)
    monkeypatch.setattr(attention_reference, "_WIDENED", 24 * 8)
    for name, one in case.expected(x).items():
        np.testing.assert_allclose(one.value, whole[name].value, rtol=1e-9, atol=1e-12)
        # Shorter blocks under a mask go over fewer hidden keys: a slightly smaller bound.
        assert (one.tolerance <= whole[name].tolerance * 1.0001).all()
        assert (one.tolerance >= whole[name].tolerance * 0.7).all()


@pytest.mark.parametrize("mask", ["", ":causal", ":window=100"])
@pytest.mark.parametrize("direction", ["", ":bwd", ":fwdbwd"])
def test_sample_is_the_full_reference(mask: str, direction: str) -> None:
    case = parse_case(f"attention:b3h8kv4q150k200d16:bf16{mask}{direction}")
    assert isinstance(case, Attention)
    x = case.inputs(2)
    full, some = case.expected(x), case.expected(x, sample=1)
    for name, one in some.items():
        assert one.index is not None
        mesh = np.ix_(*one.index)
        np.testing.assert_allclose(one.value, full[name].value[mesh], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(one.tolerance, full[name].tolerance[mesh], rtol=0.2)
        batches, rows, heads, elements = (set(axis.tolist()) for axis in one.index)
        assert {0, 2} <= batches and elements == set(range(16))
        last = full[name].value.shape[2] - 1
        assert {0, last} <= heads
        if name == "O" and direction == "":
            assert {0, 63, 64, 127, 128, 149} <= rows and len(rows) < 150
            assert {0, 1, 6, 7} <= heads  # first and last query head of the first and the last group
        elif direction:
            assert rows == set(range(full[name].value.shape[1]))


def test_a_large_sample_stays_within_its_budget() -> None:
    case = parse_case("attention:b4h8kv2s512d64:bf16:bwd")
    assert isinstance(case, Attention)
    batches, heads = case._chosen(np.random.default_rng(0), 512)
    assert (len(batches), heads.tolist()) == (2, [0, 1])
    huge = parse_case("attention:b4h8kv2s65536d128:bf16:bwd")
    assert isinstance(huge, Attention)
    batches, heads = huge._chosen(np.random.default_rng(0), 65536)
    assert (len(batches), heads.tolist()) == (1, [1])


@given(attentions(largest=20), st.integers(0, 2**40))
def test_inputs_are_seeded_by_tensor(case: Attention, seed: int) -> None:
    x, other = case.inputs(seed), case.inputs(seed + 1)
    assert list(x) == list(case.input_specs())
    for name, spec in case.input_specs().items():
        assert x[name].shape == spec.shape and x[name].dtype == dtype(case.dtype).storage
        assert np.array_equal(rounded(x[name].astype(np.float32), case.dtype), x[name])
        assert x[name].size < 3 or not np.array_equal(x[name], other[name])
    assert x["Q"].size < 3 or not np.array_equal(x["Q"].reshape(-1)[:3], x["K"].reshape(-1)[:3])


@pytest.mark.parametrize(
    "case_id",
    ["attention:b2h4kv2s130d16:bf16:causal:fwdbwd", "attention:b2h4kv2q60k130d16:f16:window=50:bwd"],
)
def test_what_is_held_of_a_head_is_the_reference_bit_for_bit_and_serves_any_output(case_id: str) -> None:
    case = parse_case(case_id)
    assert isinstance(case, Attention)
    x = case.inputs(3)
    rows, heads = np.array([7, 41]), np.array([2, 3])
    head, reference = case._head(x, 1, 1, rows), case._reference(x, 1, 1)
    q, do = x["Q"][1, rows, heads], x["dO"][1, rows, heads]
    wanted = {"dQ": reference.backward(q, do, rows).dq}
    if case.direction == "fwdbwd":
        wanted["O"] = reference.forward(q, rows)
    assert set(head.checks) == set(wanted)
    for name, one in wanted.items():
        assert all(np.array_equal(a, b) for a, b in zip(head.checks[name], one, strict=True))
    given, dv = x["dO"][1][:, heads].astype(np.float64), np.random.default_rng(0).normal(size=(case.sk, case.d))
    assert head.do_sum is not None and np.array_equal(head.do_sum, given.sum(axis=(0, 1)))
    accumulated = (reference.accumulator.spread(reference.sharing, reference.odds) / reference.reach) ** 2
    relative = reference.rounding + reference.u_exp**2 / 3 + accumulated
    squares = relative * np.square(given.reshape(-1, case.d)).sum(axis=0)
    squares += 2 * reference.rounding * np.square(dv).sum(axis=0) + reference.underflow**2 * case.sk
    assert head.tolerance is not None
    np.testing.assert_array_equal(head.tolerance(dv), reference.reach * np.sqrt(squares))

    # One checker sees right, wrong, other wrong and right again, as a fresh one does.
    check = case.checker(x, 5)
    right = {name: rounded(one.value, case.dtype) for name, one in case.expected(x).items()}
    said = []
    for name in [None, *(set(right) - {"dK"}), None]:
        outputs = dict(right)
        if name is not None:
            outputs[name] = right[name].copy()
            outputs[name][1, :, 1] = right[name][1, :, 0]
        said.append(check(outputs))
        assert said[-1] == case.invariants(x, outputs, 5)
        assert (said[-1] is None) == (name is None)


@pytest.mark.parametrize(
    "case_id",
    [
        "attention:b2h4kv2s130d16:bf16:causal:fwdbwd",
        "attention:b2h4kv4s130d16:f32:fwdbwd",
        "attention:b3h4kv2q1k300d16:f16",
        "attention:b2h4kv2q60k130d16:bf16:window=50:bwd",
    ],
)
def test_invariants_pass_right_outputs_and_see_a_wrong_head(case_id: str) -> None:
    case = parse_case(case_id)
    assert isinstance(case, Attention)
    x = case.inputs(0)
    right = {name: rounded(one.value, case.dtype) for name, one in case.expected(x).items()}
    for seed in range(10):
        assert case.invariants(x, right, seed) is None
    for name in set(right) - {"dK"}:
        wrong = {**right, name: right[name].copy()}
        wrong[name][1, :, 1] = right[name][1, :, 0]
        said = case.invariants(x, wrong, 0)
        assert said is not None and said.startswith(f"{name}[1, ")
