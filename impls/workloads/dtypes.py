"""Element types of the workloads: names, storage, precision.

Owns the mapping from a dtype's name in a case id to its NumPy storage and its unit roundoff.
It does not own accumulation: that belongs to a workload's case.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes:
        name: the name used in case ids and buffer descriptors.
        storage: NumPy dtype the elements are stored in.
        unit_roundoff: u, half the distance from 1 to the next number (0 for integers).
        bits: bits that the element occupies in memory.
    """

    name: str
    storage: np.dtype
    unit_roundoff: float
    bits: int

    @property
    def bytes(self) -> int:
        """Bytes that one element occupies."""
        return self.bits // 8

    @property
    def integer(self) -> bool:
        """Whether the elements are whole numbers."""
        return self.unit_roundoff == 0.0


# Unit roundoff: 2**-(p), p = significand bits with the hidden one (IEEE 754-2019, table 3.5;
# bfloat16 p = 8; tf32 p = 11, NVIDIA A100 whitepaper; E4M3 p = 4, OCP 8-bit floating point rev. 1.0).
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("f64", np.dtype(np.float64), 2.0**-53, 64),
        DType("f32", np.dtype(np.float32), 2.0**-24, 32),
        # tf32 is stored as f32 whose low 13 significand bits are zero.
        DType("tf32", np.dtype(np.float32), 2.0**-11, 32),
        DType("f16", np.dtype(np.float16), 2.0**-11, 16),
        DType("bf16", np.dtype(ml_dtypes.bfloat16), 2.0**-8, 16),
        DType("f8e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 2.0**-4, 8),
        DType("i8", np.dtype(np.int8), 0.0, 8),
        DType("i32", np.dtype(np.int32), 0.0, 32),
    )
}


def dtype(name: str) -> DType:
    """The dtype called ``name``.

    Raises:
        KeyError: no such dtype; the message lists the known names.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise KeyError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}") from None


def widened(values: np.ndarray, wide: npt.DTypeLike) -> np.ndarray:
    """``values``, of any storage here, in a float or integer type that holds them exactly.

    bf16, f16 and f8e4m3 go through their bits, several times faster than they are converted.
    """
    if values.dtype == ml_dtypes.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32).astype(wide, copy=False)
    if values.dtype in (np.float16, ml_dtypes.float8_e4m3fn):
        every = _every(values.dtype, np.dtype(wide))
        return np.asarray(every.take(np.ascontiguousarray(values).view(f"u{values.itemsize}"), mode="wrap"))
    return values.astype(wide)


@cache
def _every(narrow: np.dtype, other: np.dtype) -> np.ndarray:
    """All values of a dtype, in order of their bits, in another."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.arange(1 << 8 * narrow.itemsize).astype(f"u{narrow.itemsize}").view(narrow).astype(other)


def rounded(values: npt.NDArray[np.floating], name: str) -> np.ndarray:
    """``values`` rounded to nearest-even in dtype ``name``, in that dtype's storage.

    For tf32 the result is f32 with the low 13 significand bits zero.
    """
    storage = dtype(name).storage
    if name == "f8e4m3" and values.dtype == np.float32:
        # First to bf16, to odd: rounding again, to less than 7 bits, is then as if at once (Boldo and Melquiond 2008).
        bits = np.ascontiguousarray(values).view(np.uint32)
        odd = (bits >> np.uint32(16)).astype(np.uint16)
        odd |= (bits & np.uint32(0xFFFF)) != 0
        return np.asarray(_every(np.dtype(ml_dtypes.bfloat16), storage).take(odd, mode="wrap"))
    if name != "tf32":
        return np.asarray(values).astype(storage)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    keep_even = (bits >> np.uint32(13)) & np.uint32(1)
    kept = (bits + np.uint32(0x0FFF) + keep_even) & np.uint32(0xFFFFE000)
    return kept.view(np.float32)
