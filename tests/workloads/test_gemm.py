"""GEMM cases: ids, counts, references against loops and whole-output checks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from impls.workloads import gemm
from impls.workloads.base import CaseError, parse_case
from impls.workloads.dtypes import dtype, rounded
from impls.workloads.gemm import ACCUMULATIONS, EPILOGUES, GELU_LIPSCHITZ, LAYOUTS, OUTPUTS, Gemm, gelu

sizes = st.integers(1, 2**13)


@st.composite
def gemms(draw: st.DrawFn) -> Gemm:
    name = draw(st.sampled_from(sorted(ACCUMULATIONS)))
    acc = draw(st.sampled_from(ACCUMULATIONS[name]))
    out = draw(st.sampled_from(OUTPUTS[name]))
    assume(acc != "f16" or out == "f16")
    if draw(st.booleans()):
        groups = draw(st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any))
        layout = draw(st.sampled_from(["nn", "nt"]))
        return Gemm(sum(groups), draw(sizes), draw(sizes), name, groups=tuple(groups), acc=acc, out=out, layout=layout)
    epilogue = draw(st.sampled_from(EPILOGUES))
    assume(name != "i8" or epilogue != "bias+gelu")
    batch = draw(st.integers(1, 9))
    layout = draw(st.sampled_from(LAYOUTS))
    return Gemm(draw(sizes), draw(sizes), draw(sizes), name, batch, None, acc, out, layout, epilogue)


@given(gemms(), st.randoms())
def test_id_parses_back_whatever_the_order(case: Gemm, random: object) -> None:
    assert parse_case(case.id) == case
    workload, shape, name, *options = case.id.split(":")
    random.shuffle(options)  # type: ignore[attr-defined]
    assert parse_case(":".join([workload, shape, name, *options])) == case


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("gemm:b1x512x512x512:f32:nn:none", "gemm:512x512x512:f32"),
        ("gemm:8x8x8:bf16:bias+gelu:nt:out=bf16:acc=f32", "gemm:8x8x8:bf16:nt:bias+gelu"),
        ("gemm:8x8x8:f8e4m3:out=f32:acc=fast", "gemm:8x8x8:f8e4m3:acc=fast:out=f32"),
        ("gemm:g3+0+5x8x8:f16", "gemm:g3+0+5x8x8:f16"),
        ("gemm:8x8x8:i8:acc=i32", "gemm:8x8x8:i8"),
    ],
)
def test_canonical_id(written: str, canonical: str) -> None:
    assert parse_case(written).id == canonical


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("512x512:f32", "write <M>x<N>x<K>"),
        ("0x8x8:f32", "M is 0; write a size from 1"),
        ("b0x8x8x8:f32", "batch is 0"),
        ("-8x8x8:f32", "write <M>x<N>x<K>"),
        ("8x8x8", "no dtype; write gemm:8x8x8:f32"),
        ("8x8x8:f64", "write one of f32, tf32"),
        ("8x8x8:", "write one of f32, tf32"),
        ("2147483648x1x1:f32", "M is larger than any machine holds"),
        ("9999999999999999999999x1x1:f32", "larger than any machine holds"),
        ("2097152x8x2097152:bf16", "2\\^40 elements"),
        ("1048576x1048577x1:bf16", "C .* 2\\^40 elements"),
        ("8x8x8:f32:nt:tn", "two of layout"),
        ("8x8x8:f32:bias:residual", "two of epilogue"),
        ("8x8x8:f32:acc=f16", "acc=f16 does not go with a gemm of f32; write one of f32"),
        ("8x8x8:f32:out=bf16", "out=bf16 does not go"),
        ("8x8x8:f16:acc=f16:out=f32", "write out=f16"),
        ("8x8x8:f16:acc=", "names no dtype"),
        ("8x8x8:f32:relu", "or one of bias, bias\\+relu"),
        ("8x8x8:i8:bias+gelu", "write bias or bias\\+relu"),
        ("g0+0x8x8:f16", "M is 0"),
        ("g8+8x8x8:f16:tn", "write layout nn or nt"),
        ("g8+8x8x8:f16:bias", "no epilogue"),
        ("b2xg8+8x8x8:f16", "takes no batch"),
        ("1x1x2147483647:i8", "at most 1073741824 for i8"),
    ],
)
def test_refused_with_what_to_write(spec: str, says: str) -> None:
    with pytest.raises(CaseError, match=says):
        parse_case(f"gemm:{spec}")


def test_groups_must_add_up() -> None:
    with pytest.raises(CaseError, match="do not add up to 5 rows"):
        Gemm(5, 8, 8, "f16", groups=(2, 2))


@pytest.mark.parametrize(
    "case_id",
    ["gemm:3x5x7:f32", "gemm:b2x3x5x7:f16:tt:residual", "gemm:g2+0+1x5x7:bf16:nt", "gemm:3x5x7:f8e4m3:bias"],
)
def test_counts_against_loops(case_id: str) -> None:
    case = parse_case(case_id)
    assert isinstance(case, Gemm)
    operations = 0
    touched: set[tuple[str, int]] = set()
    groups = case.groups if case.groups is not None else (case.m,) * case.batch
    starts = [0, *np.cumsum(groups).tolist()]
    for g, size in enumerate(groups):
        for i, j, k in itertools.product(range(size), range(case.n), range(case.k)):
            operations += 2
            touched |= {("A", (starts[g] + i) * 7 + k), ("B", (g * 7 + k) * 5 + j), ("C", (starts[g] + i) * 5 + j)}
            if case.epilogue == "residual":
                touched.add(("residual", (starts[g] + i) * 5 + j))
            if case.epilogue == "bias":
                touched.add(("bias", j))
    width = {name: dtype(s.dtype).bytes for name, s in {**case.input_specs(), **case.output_specs()}.items()}
    moved = sum(width[name] for name, _ in touched) + (4 * len(groups) if case.groups else 0)
    assert case.flops() == operations
    assert case.compulsory_bytes() == moved
    assert case.intensity() == operations / moved


def test_known_counts() -> None:
    case = parse_case("gemm:4096x4096x4096:bf16")
    assert case.flops() == 137_438_953_472
    assert case.compulsory_bytes() == 3 * 4096 * 4096 * 2
    assert case.intensity() == pytest.approx(4096 / 3)
    assert (case.compute_dtype, case.exps()) == ("bf16", 0)
    assert case.total_bytes() == case.compulsory_bytes()


def entry(case: Gemm, x: dict[str, np.ndarray], b: int, i: int, j: int) -> float:
    """C[b, i, j] in Python floats, from the definition."""
    a_of = x["A"] if case.batch == 1 else x["A"][b]
    b_of = x["B"] if case.batch == 1 else x["B"][b]
    if case.groups is not None:
        b_of = x["B"][int(np.searchsorted(np.cumsum(case.groups), i, side="right"))]
    total = math.fsum(
        float(a_of[i, k] if case.layout[0] == "n" else a_of[k, i])
        * float(b_of[k, j] if case.layout[1] == "n" else b_of[j, k])
        for k in range(case.k)
    )
    if "bias" in x:
        total += float(x["bias"][j])
    if "residual" in x:
        total += float(x["residual"][i, j] if case.batch == 1 else x["residual"][b, i, j])
    if case.epilogue == "bias+relu":
        return max(total, 0.0)
    if case.epilogue == "bias+gelu":
        return total / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (total + 0.044715 * total**3)))
    return total


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("batch", [1, 3])
def test_reference_against_loops(layout: str, epilogue: str, batch: int) -> None:
    case = Gemm(5, 6, 7, "bf16", batch, layout=layout, epilogue=epilogue)
    x = case.inputs(1)
    value = case.expected(x)["C"].value.reshape(batch, 5, 6)
    for b, i, j in itertools.product(range(batch), range(5), range(6)):
        assert value[b, i, j] == pytest.approx(entry(case, x, b, i, j), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_grouped_reference_against_loops(layout: str) -> None:
    case = Gemm(9, 4, 7, "f16", groups=(4, 0, 5), layout=layout)
    x = case.inputs(1)
    assert x["group_sizes"].tolist() == [4, 0, 5]
    value = case.expected(x)["C"].value
    for i, j in itertools.product(range(9), range(4)):
        assert value[i, j] == pytest.approx(entry(case, x, 0, i, j), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(
    "case_id",
    [
        "gemm:200x150x40:f32:nt:bias+gelu",
        "gemm:b2x130x70x33:bf16:tn:residual",
        "gemm:g70+0+1+129x130x20:f16",
        "gemm:129x65x300:i8:bias",
        "gemm:200x150x700:f8e4m3",
    ],
)
def test_sample_is_the_full_reference_at_every_tile_and_border(case_id: str) -> None:
    case = parse_case(case_id)
    assert isinstance(case, Gemm)
    x = case.inputs(2)
    full, some = case.expected(x)["C"], case.expected(x, sample=3)["C"]
    assert full.index is None and some.index is not None
    np.testing.assert_allclose(some.value, full.select(full.value)[np.ix_(*some.index)], rtol=1e-12, atol=1e-14)
    whole = np.broadcast_to(full.tolerance, full.value.shape)[np.ix_(*some.index)]
    np.testing.assert_allclose(np.broadcast_to(some.tolerance, some.value.shape), whole, rtol=1e-5)
    starts = [0] if case.groups is None else [0, *np.cumsum(case.groups)[:-1].tolist()]
    for axis, size, begins in ((-2, case.m, starts), (-1, case.n, [0])):
        chosen = set(some.index[axis].tolist())
        assert {0, size - 1} <= chosen
        for begin, end in zip(begins, [*begins[1:], size], strict=True):
            for tile in range(begin, end, 64):
                stop = min(tile + 64, end)
                assert {tile, stop - 1} <= chosen
                if size > 64 and stop - tile > 16:
                    assert len(chosen & set(range(tile, stop))) < stop - tile
    assert some.value.size < full.value.size


@given(st.sampled_from(sorted(ACCUMULATIONS)), st.integers(1, 200), st.integers(0, 2**40))
def test_inputs_are_seeded_by_tensor_and_exact_in_their_dtype(name: str, k: int, seed: int) -> None:
    small, large = Gemm(3, 4, k, name), Gemm(30, 4, k, name)
    x, again, other = small.inputs(seed), large.inputs(seed), small.inputs(seed + 1)
    assert np.array_equal(x["B"], again["B"])  # A's size does not move B
    assert k < 3 or not np.array_equal(x["B"], other["B"])
    for tensor in ("A", "B"):
        assert x[tensor].dtype == dtype(name).storage
        assert x[tensor].shape == small.input_specs()[tensor].shape
        if not dtype(name).integer:
            assert np.array_equal(rounded(x[tensor].astype(np.float32), name), x[tensor])


def test_products_are_near_unit_variance() -> None:
    case = Gemm(64, 64, 1000, "f32", epilogue="residual")
    x = case.inputs(0)
    deviation = float((x["A"].astype(float) @ x["B"].astype(float)).std())
    assert 0.7 < deviation < 1.42  # the scale is a power of two
    assert x["A"].std() == pytest.approx(1, abs=0.02) and x["residual"].std() == pytest.approx(1, abs=0.05)


def test_large_inputs_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Gemm(2048, 1, 1100, "bf16")
    threaded = case.inputs(7)["A"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert np.array_equal(threaded.view(np.uint16), case.inputs(7)["A"].view(np.uint16))
    rows = threaded.astype(np.float32)
    assert not np.array_equal(rows.reshape(-1)[: 2**20], rows.reshape(-1)[2**20 : 2**21])


@pytest.mark.parametrize("k", [1, 1000, 133_140, 1_000_000])
def test_i8_sums_cannot_leave_i32(k: int) -> None:
    case = Gemm(1, 1, k, "i8", epilogue="bias")
    x = case.inputs(0)
    largest = int(np.abs(x["A"].astype(int)).max())
    assert largest * largest * k + 2**16 < 2**31
    if k <= 133_140:
        assert largest == 127 or k == 1
    expected = case.expected(x)["C"]
    exact = (x["A"].astype(np.int64) @ x["B"].astype(np.int64)).item() + int(x["bias"][0])
    assert expected.value[0, 0] == exact
    assert not expected.tolerance.any()


def test_gelu_lipschitz_constant_and_values() -> None:
    z = np.linspace(-8, 8, 2_000_001)
    slopes = np.diff(gelu(z)) / np.diff(z)
    assert GELU_LIPSCHITZ - 2e-4 < np.abs(slopes).max() < GELU_LIPSCHITZ
    assert gelu(np.array([0.0, 1.0, -1.0])) == pytest.approx([0.0, 0.841192, -0.158808], abs=1e-6)


@pytest.mark.parametrize(
    "case_id",
    [
        "gemm:96x512x256:f32",
        "gemm:96x512x256:bf16:nt",
        "gemm:b3x96x512x64:f16:tn:bias",
        "gemm:96x512x256:bf16:residual",
        "gemm:g60+0+36x512x64:bf16:nt",
        "gemm:96x512x256:f8e4m3",
        "gemm:96x512x256:i8:residual",
    ],
)
def test_freivalds_passes_right_outputs_and_sees_a_wrong_tile(case_id: str) -> None:
    case = parse_case(case_id)
    assert isinstance(case, Gemm)
    x = case.inputs(5)
    value = case.expected(x)["C"].value
    right = rounded(value, case.out)
    for seed in range(20):
        assert case.invariants(x, {"C": right}, seed) is None
    wrong = right.copy()
    wrong[..., 64:96, 128:256] = rounded(np.asarray(value[..., 64:96, 0:128]), case.out)
    if case.batch > 1:
        wrong[1:] = right[1:]
    said = case.invariants(x, {"C": wrong}, 0)
    assert said is not None and "32 rows, the first row 64" in said


def test_freivalds_sees_one_wrong_element_in_f32_and_says_not_in_bf16() -> None:
    for name, seen in (("f32", True), ("i8", True), ("bf16", False)):
        case = Gemm(64, 4096, 64, name)
        x = case.inputs(5)
        output = rounded(case.expected(x)["C"].value, case.out)
        output[7, 9] += np.asarray(1, output.dtype)
        assert (case.invariants(x, {"C": output}, 1) is not None) == seen


@pytest.mark.parametrize("case_id", ["gemm:96x512x256:bf16:nt", "gemm:96x512x256:bf16", "gemm:96x512x256:f32:tt"])
def test_the_sums_of_freivalds_do_not_depend_on_the_pieces(case_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = parse_case(case_id)
    assert isinstance(case, Gemm)
    x = case.inputs(5)
    a, b = (x[n].astype(np.float64) for n in "AB")
    product = (a.T if case.layout[0] == "t" else a) @ (b.T if case.layout[1] == "t" else b)
    signs = np.random.default_rng(3).integers(0, 2, (512, 4)).astype(case._wide) * 2 - 1
    for in_cache, shares in ((1 << 16, 64), (1 << 12, 3)):
        monkeypatch.setattr(gemm, "_IN_CACHE", in_cache)
        monkeypatch.setattr(gemm, "_SHARES", shares)
        (sums,) = (case._sums(x, p, signs) for p in case._products(x))
        np.testing.assert_allclose(sums.sought, product @ signs, rtol=0, atol=1e-4)
        check, right = case.checker(x, 5), rounded(product, case.out)
        assert check({"C": right}) is None
        wrong = right.copy()
        wrong[40] = right[41]
        assert "1 rows, the first row 40" in (check({"C": wrong}) or "")
        assert check({"C": right}) is None


@pytest.mark.parametrize("out", ["bf16", "f32"])
def test_freivalds_sees_rows_whose_sums_overflow(out: str) -> None:
    case = Gemm(96, 512, 64, "bf16", out=out)
    x = case.inputs(5)
    right = rounded(x["A"].astype(np.float64) @ x["B"].astype(np.float64), out)
    check, wrong = case.checker(x, 5), right.copy()
    wrong[40] = rounded(np.where(np.arange(512) % 2, 3e38, -3e38), out)
    assert check({"C": right}) is None
    assert "1 rows, the first row 40" in (check({"C": wrong}) or "")


@pytest.mark.parametrize(("n", "k", "wide"), [(64, 32, np.float64), (2**21, 1, np.float64), (2**21 + 1, 1, np.int64)])
def test_whole_numbers_are_summed_exactly(n: int, k: int, wide: type[np.generic]) -> None:
    case = Gemm(3, n, k, "i8")
    assert case._wide is wide
    x = {"A": np.full((3, k), -128, np.int8), "B": np.full((k, n), 127, np.int8)}
    right = np.full((3, n), -128 * 127 * k, np.int32)
    check, wrong = case.checker(x, 5), right.copy()
    wrong[2, n // 2] += 1
    assert check({"C": right}) is None
    assert "1 rows, the first row 2" in (check({"C": wrong}) or "")
    wrong[:] = np.iinfo(np.int32).max
    assert "3 rows" in (check({"C": wrong}) or "")


def test_no_freivalds_through_an_activation() -> None:
    case = Gemm(8, 8, 8, "f32", epilogue="bias+relu")
    assert case.invariants(case.inputs(0), {"C": np.zeros((8, 8), np.float32)}, 0) is None
