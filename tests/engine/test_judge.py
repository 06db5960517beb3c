"""The judge against outputs whose faults are planted."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from benchmarks.engine.judge import Judge, finite
from impls.workloads.base import Case, Expected, TensorSpec, parse_case
from impls.workloads.dtypes import DTYPES, rounded


@dataclass(frozen=True)
class Doubling(Case):
    """y = 2 x, a case small enough to judge by eye."""

    n: int = 4
    out: str = "f32"

    @property
    def id(self):
        return f"doubling:{self.n}:{self.out}"

    @classmethod
    def parse(cls, spec):
        raise NotImplementedError

    @property
    def compute_dtype(self):
        return "f32"

    def flops(self):
        return self.n

    def compulsory_bytes(self):
        return 8 * self.n

    def input_specs(self):
        return {"x": TensorSpec((self.n,), "f32")}

    def output_specs(self):
        return {"y": TensorSpec((self.n,), self.out)}

    def inputs(self, seed):
        return {"x": np.random.default_rng(seed).standard_normal(self.n).astype(np.float32)}

    def reference_flops(self):
        return self.n

    def expected(self, inputs, *, sample=None):
        index = None if sample is None else (np.array([0, self.n - 1]),)
        value = 2 * inputs["x"].astype(np.float64)
        value = value if index is None else value[index[0]]
        return {"y": Expected(index, value, np.full(value.shape, 1e-3))}


def judge(case=None, sample=None):
    case = case or Doubling()
    inputs = [case.inputs(seed) for seed in (1, 2)]
    return inputs, Judge(case, inputs, [case.expected(i, sample=sample) for i in inputs], seed=1)


def test_a_right_output_is_right_and_its_error_is_reported():
    inputs, one = judge()
    y = 2 * inputs[0]["x"]
    y[2] += np.float32(5e-4)
    verdict = one.outputs(0, {"y": y})
    assert verdict.right
    assert verdict.errors["y"]["max_abs"] == pytest.approx(5e-4, rel=1e-2)
    assert verdict.errors["y"]["worst"] == pytest.approx(0.5, rel=1e-2)
    assert one.outputs(0, {"y": y.copy()}) == verdict


def test_an_output_of_other_inputs_is_wrong():
    inputs, one = judge()
    assert one.outputs(0, {"y": 2 * inputs[0]["x"]}).right
    assert not one.outputs(1, {"y": 2 * inputs[0]["x"]}).right


def test_one_wrong_element_is_named():
    inputs, one = judge()
    y = 2 * inputs[0]["x"]
    y[2] += 1
    verdict = one.outputs(0, {"y": y})
    assert verdict.reason.startswith("y[2] is ")
    assert "1 of 4 compared elements" in verdict.reason


def test_a_sampled_reference_names_the_place_in_the_whole_output():
    inputs, one = judge(sample=1)
    y = 2 * inputs[0]["x"]
    y[3] += 1
    assert one.outputs(0, {"y": y}).reason.startswith("y[3] is ")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_element_that_is_not_finite_is_wrong_even_where_not_compared(bad):
    inputs, one = judge(sample=1)
    y = 2 * inputs[0]["x"]
    y[1] = bad
    assert one.outputs(0, {"y": y}).reason == "y has 1 of 4 elements never written or not finite, the first at [1]."


def test_what_was_not_written_is_counted_and_found_wherever_it_lies():
    inputs, one = judge(Doubling(n=3 * 2**18 + 5))
    y = 2 * inputs[0]["x"]
    y[[2**18 + 7, 3 * 2**18 + 1]] = np.nan
    reason = one.outputs(0, {"y": y}).reason
    assert reason == f"y has 2 of {y.size} elements never written or not finite, the first at [{2**18 + 7}]."


def test_tolerance_zero_means_exact():
    @dataclass(frozen=True)
    class Exact(Doubling):
        def expected(self, inputs, *, sample=None):
            return {"y": Expected(None, 2 * inputs["x"].astype(np.float64), np.zeros(()))}

    inputs, one = judge(Exact())
    y = 2 * inputs[0]["x"]
    assert one.outputs(0, {"y": y}).errors["y"] == {"max_abs": 0.0, "worst": 0.0}
    y = np.nextafter(y, np.float32(np.inf))
    assert not one.outputs(0, {"y": y}).right


def test_the_worst_element_is_found_in_whichever_piece_it_lies():
    inputs, one = judge(Doubling(n=3 * 2**18 + 5))
    y = 2 * inputs[0]["x"]
    y[[7, 2**18, -1]] += np.array([0.5, 2.0, 1.0], np.float32)
    verdict = one.outputs(0, {"y": y})
    assert verdict.reason.startswith(f"y[{2**18}] is ")
    assert verdict.reason.endswith(f"± 0.001; 3 of {y.size} compared elements are off.")
    assert verdict.errors["y"]["max_abs"] == pytest.approx(2.0, abs=1e-6)
    assert verdict.errors["y"]["worst"] == pytest.approx(2000, abs=1e-3)


@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if not d.integer])
def test_finite_agrees_with_float64_for_every_dtype(name):
    values = rounded(np.array([0.0, 1.0, -2.5, 448.0, 1e-3], np.float32), name)
    assert finite(values, name).all()
    values[3] = np.nan
    assert finite(values, name).tolist() == [True, True, True, False, True]
    every = np.arange(2**16, dtype=np.uint16)
    if DTYPES[name].bits == 16:
        got = finite(every.view(DTYPES[name].storage), name)
        assert (got == np.isfinite(every.view(DTYPES[name].storage).astype(np.float64))).all()
    if DTYPES[name].bits == 8:
        every = every[:256].astype(np.uint8)
        got = finite(every.view(DTYPES[name].storage), name)
        assert (got == np.isfinite(every.view(DTYPES[name].storage).astype(np.float64))).all()


def test_the_poison_of_integers_counts_as_unwritten():
    assert finite(np.array([0, np.iinfo(np.int32).min, 7], np.int32), "i32").tolist() == [True, False, True]


def test_what_follows_from_the_inputs_alone_is_made_once_for_each_variant_whichever_thread_asks(monkeypatch):
    case = parse_case("attention:b1h2s64d16:bf16:bwd")
    inputs = [case.inputs(seed) for seed in (0, 1)]
    expected = [case.expected(i) for i in inputs]
    made, checker = [], type(case).checker

    def noted(self, given, seed):
        made.append(next(v for v, one in enumerate(inputs) if one is given))
        return checker(self, given, seed)

    monkeypatch.setattr(type(case), "checker", noted)
    judge = Judge(case, inputs, expected, seed=1)
    right = [{n: e.value.astype(ml_dtypes.bfloat16) for n, e in one.items()} for one in expected]
    # Other bits at every call, all of them right: as of a kernel that adds up in no fixed order.
    asked = []
    for variant in (0, 1):
        for at in range(8):
            one = {name: value.copy() for name, value in right[variant].items()}
            one["dQ"].reshape(-1).view(np.uint16)[at] ^= 1
            asked.append((variant, one))
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda a: judge.outputs(*a), asked))
    assert all(v.right for v in verdicts), [v.reason for v in verdicts]
    assert sorted(made) == [0, 1]
    assert not judge.outputs(1, right[0]).right
