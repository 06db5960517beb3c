"""How far an honest result may lie from the exact one: the error of sums taken in finite precision, in any order.

Owns the model of accumulators and their error bounds. Which other roundings a workload allows belongs to the workload.

The model. A sum of n products p_k is taken one addition after another, in an order that does not look at the values (a
blocked or pairwise sum has shorter chains and a smaller error). The partial sums s_k of zero-mean data walk at random:
given the total S and Q = sum p_k^2, s_k is a Brownian bridge of variance Q plus the straight line to S. Rounding to
nearest makes errors that are independent, of mean zero and uniform between -q |s_k| and q |s_k| at most, hence of
variance q^2 s_k^2 / 3 and as light in the tails as a normal of that variance (Higham and Mary, "A new approach to
probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019; for random data, "Sharper probabilistic backward
error analysis for basic linear algebra kernels with random data", ibid. 42, 2020). With L = ln(2 N / risk) for N
compared elements, none is beyond its bound but with probability ``risk``. For r = q / sqrt(3):

- against the line, whose squares average S^2 / 3: r sqrt(n) |S| sqrt(2 L / 3);
- against the bridge B, whose own size varies: E exp(t d) <= E exp(t^2 r^2 n Q / 2 * integral B^2), which is finite for
  t r sqrt(n Q) < pi (Cramer-von Mises), hence an exponential tail and r sqrt(n Q) L / pi;
- products rounded by themselves where there is no fused multiply-add: r sqrt(Q) sqrt(2 L);
- a start other than zero (bias or residual in the accumulator): r sqrt(n) |start| sqrt(2 L).

Tensor cores truncate instead (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ
Comput. Sci. 7:e330, 2021): every product of a step is cut to the largest addend's quantum, with an error of its own
sign up to q |s_k|, as above; and the accumulator loses q/2 |s_k| on average, always towards zero. Over n / g steps of g
products that adds up to q/2 n/g (|S| / 2 + sqrt(L / 6) sqrt(Q)): the integral of the bridge has variance 1 / 12. g = 4
is the smallest that was seen (V100, T4).

No bound is above the deterministic one, q (n + 1) (sqrt(n Q) + |start|), by Cauchy and Schwarz.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from impls.workloads.dtypes import dtype

# Probability that any compared element of an honest output lies beyond its tolerance.
RISK = 1e-6

# Half the least subnormal: the absolute error of rounding a tiny number to the dtype (IEEE 754-2019; bf16 and tf32 have
# f32's exponents).
UNDERFLOW = {"f32": 2.0**-150, "tf32": 2.0**-137, "f16": 2.0**-25, "bf16": 2.0**-134}


def log_odds(count: int) -> float:
    """L = ln(2 N / risk) for ``count`` compared elements (union bound over two-sided tails)."""
    return math.log(2 * count / RISK)


@dataclass(frozen=True)
class Accumulator:
    """What sums are kept in.

    Attributes:
        quantum: q, largest relative error of one addition.
        step: g, products that enter by one truncating addition; 0 where additions round to nearest.
        promoted: products after which the partial sum moves to an f32 sum; 0 where it never does.
    """

    quantum: float
    step: int = 0
    promoted: int = 0

    @property
    def _deviation(self) -> float:
        """r, standard deviation of the error of one addition to a partial sum of 1."""
        return self.quantum / math.sqrt(3)

    def spread(self, length: int, odds: float) -> float:
        """Bound on the error of a sum that ends at zero, over sqrt(Q)."""
        nearest = self._deviation * (math.sqrt(length) * odds / math.pi + math.sqrt(2 * odds))
        return nearest + self._lost(length) * math.sqrt(odds / 6)

    def slope(self, length: int, odds: float) -> float:
        """What is added to that bound, over |S|, where the sum ends at S."""
        return self._deviation * math.sqrt(length * 2 * odds / 3) + self._lost(length) / 2

    def _lost(self, length: int) -> float:
        """What truncation takes from a partial sum that stays at 1 throughout."""
        return self.quantum / 2 * math.ceil(length / self.step) if self.step else 0.0

    def bound(
        self, total: np.ndarray, squares: np.ndarray, length: int, odds: float, start: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Bound on the error of sums of ``length`` products.

        Args:
            total: S, the exact sums.
            squares: Q, the sums of the squared products; same shape.
            length: n.
            odds: L, from ``log_odds``.
            start: what the accumulator starts from, where that may be other than zero.
        """
        size, root, start = np.abs(total), np.sqrt(squares), np.abs(start)
        if self.promoted and length > self.promoted:
            return self._promoted_bound(size, root, length, odds, start)
        held = self._deviation * math.sqrt(length * 2 * odds) + self._lost(length)
        bound: np.ndarray = self.spread(length, odds) * root + self.slope(length, odds) * size + held * start
        np.minimum(bound, self.quantum * (length + 1) * (math.sqrt(length) * root + start), out=bound)
        return bound

    def _promoted_bound(
        self, size: np.ndarray, root: np.ndarray, length: int, odds: float, start: np.ndarray
    ) -> np.ndarray:
        """Partial sums of c = ``promoted`` products, each from zero, their errors independent of each other.

        In a chunk the partial sums walk freely with variance Q c / n, plus S c / n in a line. The squares of a free
        walk average half its variance, and E exp(t^2 / 2 integral W^2) is finite for t < pi / 2: by Bernstein the
        n / c chunks together err by r c sqrt(Q / n) (sqrt(L n / c) + 2 L / pi). Truncation loses q/2 c/g times the
        integral of the walk (variance 1 / 3), of either sign in each chunk, and of the line, of one sign.
        """
        q, c, n = self.quantum, self.promoted, length
        walk = np.hypot(root, size * math.sqrt(c / n))
        bound: np.ndarray = self._deviation * c / math.sqrt(n) * walk * (math.sqrt(odds * n / c) + 2 * odds / math.pi)
        if self.step:
            bound += q / 2 * (c / self.step) * (size / 2 + math.sqrt(2 * odds / 3) * root)
        outer = Accumulator(dtype("f32").unit_roundoff)
        bound += outer.bound(size, root**2, math.ceil(n / c), odds, start)
        return bound


# By input dtype and accumulation type. f32 rounds to nearest on CPUs and in the CUDA cores of GPUs. The others may run
# on tensor cores. Hopper's keep about 14 bits of an f8 product sum, over 32 products at a time; promotion to f32 after
# 128 products is what libraries do where fast accumulation is off (DeepSeek-V3 technical report, 2024, section 3.3.2).
ACCUMULATORS = {
    ("f32", "f32"): Accumulator(2.0**-24),
    ("tf32", "f32"): Accumulator(2.0**-23, step=4),
    ("f16", "f32"): Accumulator(2.0**-23, step=4),
    ("bf16", "f32"): Accumulator(2.0**-23, step=4),
    ("f16", "f16"): Accumulator(2.0**-11),
    ("f8e4m3", "f32"): Accumulator(2.0**-13, step=32, promoted=128),
    ("f8e4m3", "fast"): Accumulator(2.0**-13, step=32),
}
