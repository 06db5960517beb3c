"""Mends Triton 3.6's interpreter where it computes something else than a GPU does; without it only bf16 would be lost.

It keeps bf16 and f8 as whole numbers of their bits, and ``dot`` multiplies bf16's as such; conversions from f32 to bf16
cut off what they should round. Both are given here by NumPy with ml_dtypes' types. Sums are taken in the accumulator's
type, whole numbers through f64, which holds them exactly and has a BLAS.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

_EXTENSION_TYPES = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
}


def _values(handle: Any) -> np.ndarray:
    """A tensor's values in a type that NumPy computes with."""
    kind = _EXTENSION_TYPES.get(handle.dtype.scalar)
    data: np.ndarray = handle.data if kind is None else handle.data.view(kind)
    return data


def mend() -> None:
    """Replace the interpreter's conversions and products, where this process interprets."""
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    def cast(self: Any, source: Any, to: Any) -> Any:
        scalar = to.scalar
        kind = _EXTENSION_TYPES.get(scalar, _get_np_dtype(scalar))
        values = _values(source)
        if values.dtype.kind == "V" and kind.kind in "iub":
            values = values.astype(np.float32)
        return TensorHandle(values.astype(kind).view(_get_np_dtype(scalar)), scalar)

    def cast_rounded(self: Any, source: Any, to: Any, rounding_mode: Any) -> Any:
        return cast(self, source, to)

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        kind = d.data.dtype
        work = np.float64 if kind.kind == "i" else kind
        product = np.matmul(_values(a).astype(work), _values(b).astype(work), dtype=work).astype(kind)
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = cast_rounded
    InterpreterBuilder.create_dot = dot
