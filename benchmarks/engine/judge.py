"""Is an output right? Compares what an implementation returned with the float64 reference.

Owns the verdict on one output. The reference and its tolerance come from the
workload; they never reach a worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from impls.workloads.base import Case, Expected
from impls.workloads.dtypes import dtype, widened
from impls.workloads.sampling import pieces

# Elements of an output that are looked at in one go: they stay in a core's cache.
_ELEMENTS = 2**17
# What a NaN or an infinity looks like in dtypes for which NumPy's own isfinite is slow: (bits, mask, pattern).
_NOT_FINITE = {"bf16": (np.uint16, 0x7F80), "f16": (np.uint16, 0x7C00), "f8e4m3": (np.uint8, 0x7F)}

#: Says what is wrong with outputs as a whole, by name.
Checker = Callable[[Mapping[str, np.ndarray]], str | None]


@dataclass(frozen=True)
class Verdict:
    """What the judge says.

    Attributes:
        reason: None where the outputs are right, else one sentence.
        errors: per output, ``max_abs`` (largest absolute error) and ``worst`` (largest error over its tolerance).
    """

    reason: str | None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return self.reason is None


class Judge:
    """Judges the outputs of one case.

    Inputs come in variants (same shapes, other contents), so that a cached answer is a wrong answer. What follows from
    the inputs alone is made once for each; every output is then compared, which takes no longer than hashing it would.

    Args:
        inputs: per variant, the inputs by name.
        expected: per variant, what is held of each output.
        seed: of random checks.
    """

    def __init__(
        self,
        case: Case,
        inputs: Sequence[Mapping[str, np.ndarray]],
        expected: Sequence[Mapping[str, Expected]],
        seed: int,
    ) -> None:
        self.case = case
        self._inputs = inputs
        self._expected = expected
        self._seed = seed
        self._checkers: dict[int, Checker] = {}
        self._making = threading.Lock()

    @property
    def variants(self) -> int:
        """How many contents the inputs come in."""
        return len(self._inputs)

    def outputs(self, variant: int, outputs: Mapping[str, np.ndarray]) -> Verdict:
        """The verdict on the outputs of one call whose inputs were ``variant``."""
        errors: dict[str, dict[str, float]] = {}
        for name, spec in self.case.output_specs().items():
            output = outputs[name]
            unwritten, first = _not_finite(output, spec.dtype)
            if unwritten:
                where = [int(i) for i in np.unravel_index(first, output.shape)]
                return Verdict(
                    f"{name} has {unwritten} of {output.size} elements never written or not finite, "
                    f"the first at {where}."
                )
            expected = self._expected[variant][name]
            found = _compared(expected.select(output), expected)
            # An exact output (tolerance 0) has no finite share: any error is reported as 1e9 tolerances.
            errors[name] = {"max_abs": found.error, "worst": min(found.share, 1e9)}
            if found.share > 1:
                at = np.unravel_index(found.at, expected.value.shape)
                place = at if expected.index is None else tuple(ax[i] for ax, i in zip(expected.index, at, strict=True))
                return Verdict(
                    f"{name}{[int(i) for i in place]} is {float(output[place]):.6g}, the reference "
                    f"{expected.value[at]:.6g} ± {np.broadcast_to(expected.tolerance, expected.value.shape)[at]:.2g}; "
                    f"{found.off} of {expected.value.size} compared elements are off.",
                    errors,
                )
        return Verdict(self._checker(variant)(outputs), errors)

    def _checker(self, variant: int) -> Checker:
        """Of the whole outputs of this variant; made when first asked for, once, whichever thread asks."""
        with self._making:
            if variant not in self._checkers:
                self._checkers[variant] = self.case.checker(self._inputs[variant], self._seed)
            return self._checkers[variant]


@dataclass
class _Compared:
    """Largest error; largest share of its tolerance, and its flat index; how many are beyond theirs."""

    error: float = 0.0
    share: float = 0.0
    at: int = 0
    off: int = 0


def _compared(chosen: np.ndarray, expected: Expected) -> _Compared:
    """The chosen elements of an output against the reference."""
    found, got, value = _Compared(), chosen.reshape(-1), expected.value.reshape(-1)
    tolerance = np.broadcast_to(expected.tolerance, expected.value.shape).reshape(-1)
    for part in pieces(0, got.size, _ELEMENTS):
        error = widened(got[part], np.float64)
        error -= value[part]
        np.abs(error, out=error)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = error / tolerance[part]
        np.fmax(share, 0.0, out=share)  # 0 / 0: an exact output that is right
        at = int(np.argmax(share))
        if share[at] > found.share:
            found.share, found.at = float(share[at]), part.start + at
        found.error = max(found.error, float(error.max()))
        found.off += int(np.count_nonzero(share > 1))
    return found


def _not_finite(output: np.ndarray, dtype_name: str) -> tuple[int, int]:
    """How many elements are not finite, and the flat index of the first of them."""
    flat, count, first = np.ascontiguousarray(output).reshape(-1), 0, -1
    for part in pieces(0, flat.size, _ELEMENTS):
        good = finite(flat[part], dtype_name)
        if not good.all():
            first = part.start + int(np.argmin(good)) if count == 0 else first
            count += good.size - int(np.count_nonzero(good))
    return count, first


def finite(values: np.ndarray, dtype_name: str) -> np.ndarray:
    """Boolean array, shape of ``values``: which elements are neither NaN nor infinite (integers: not the least value).

    The least integer is what an unwritten integer output was poisoned with; the workloads' integer results cannot
    reach it.
    """
    if dtype(dtype_name).integer:
        return np.asarray(values != np.iinfo(values.dtype).min)
    if dtype_name in _NOT_FINITE:
        bits, mask = _NOT_FINITE[dtype_name]
        return np.asarray((values.view(bits) & bits(mask)) != mask)
    return np.asarray(np.isfinite(values))
