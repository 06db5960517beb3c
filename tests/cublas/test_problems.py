"""How row-major cases are put to a column-major library, played by hand on flat memory."""

from __future__ import annotations

import numpy as np
import pytest

from impls.cublas.gemm import Default, _problems
from impls.support.h200 import H200
from impls.workloads.base import parse_case


def column_major(flat, matrix, offset, batch):
    """The matrix at ``offset`` in flat memory, of this entry of the batch."""
    start = offset + batch * matrix.stride
    columns = [flat[start + c * matrix.ld : start + c * matrix.ld + matrix.rows] for c in range(matrix.columns)]
    return np.stack(columns, axis=1)


@pytest.mark.parametrize(
    "spec",
    [
        *(f"5x7x3:f32:{layout}" for layout in ("nn", "nt", "tn", "tt")),
        *(f"b3x5x7x3:f32:{layout}" for layout in ("nn", "tt")),
        *("1x7x3:f32:nt", "g2+0+5x7x3:f32", "g2+0+5x7x3:f32:nt"),
    ],
)
def test_products_on_flat_memory_are_the_case(spec):
    case = parse_case(f"gemm:{spec}")
    inputs = case.inputs(3)
    a, b = (inputs[n].reshape(-1) for n in ("A", "B"))
    c = np.full(case.output_specs()["C"].shape, np.nan, np.float32).reshape(-1)
    for problem, (at_a, at_b, at_c) in _problems(case, "none"):
        for entry in range(problem.batch):
            # cuBLASLt's first operand is our B, its second our A.
            first = column_major(b, problem.a, at_b, entry)
            second = column_major(a, problem.b, at_a, entry)
            product = (first.T if problem.transpose_a else first) @ (second.T if problem.transpose_b else second)
            assert product.shape == (problem.d.rows, problem.d.columns)
            for column in range(problem.d.columns):
                start = at_c + entry * problem.d.stride + column * problem.d.ld
                c[start : start + problem.d.rows] = product[:, column]
    expected = case.expected(inputs)["C"]
    assert np.abs(c.reshape(expected.value.shape) - expected.value).max() <= expected.tolerance.max()


@pytest.mark.parametrize("spec", ["64x64x64:f8e4m3", "64x64x8:f8e4m3:nt", "8x8x8:i8:bias"])
def test_what_the_library_has_not_is_refused_in_a_sentence(spec):
    reason = Default().refuses(parse_case(f"gemm:{spec}"), H200)
    assert reason is not None
    assert reason.endswith(".")
