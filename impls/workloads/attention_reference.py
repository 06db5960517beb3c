"""Attention of one key head in float64, forward and backward, with a tolerance for every element.

Owns the formulas, and which roundings an honest implementation may make; how sums err is in ``rounding``. Scores are
held in blocks of rows, never as a whole matrix.

Per query: s = q k^T / sqrt(D), p = softmax(s), o = p v; dp = do v^T, delta = sum p dp (= do . o), ds = p (dp - delta),
dq = ds k / sqrt(D), dk = ds^T q / sqrt(D), dv = p^T do.

What passes, with u the dtype's unit roundoff: sums in f32 in any order; q and k rescaled in the dtype (torch's unfused
attention splits the scale between them); scores rounded to the dtype before and after the scale; p rounded to the
dtype, normalized or not (half its least subnormal absolutely); dp, ds, scaled ds rounded to the dtype; o, from which
delta is taken, rounded to the dtype; dk and dv rounded once per query head and once for all that share a key head;
exponentials within 4 ulp of f32 with arguments up to 8 (16 u_f32 together), for 16-bit dtypes and tf32 within u / 2
(FlashAttention-4 evaluates exp2 by a polynomial of degree 3, about 1e-4).

Each of these is an independent relative error of p, ds, ..., uniform between its bounds (variance u^2 / 3, and tails no
heavier than a normal's). The error of an output is a sum of independent terms, and with L = ln(2 N / risk) stays below
sqrt(2 L) times the root of the sum of their variances or, where n keys with up to four errors each contribute, below
2 sqrt(3 n) times it (Cauchy and Schwarz). An error e of a score is a relative error e of its p, and shifts the
normalization: sum p e (v - o), of variance p^2 e^2 (v^2 + o^2) at most.

Squares of inner products along D enter by their mean, |q|^2 |k|^2 / D. Variances are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from impls.workloads.dtypes import dtype, widened
from impls.workloads.rounding import ACCUMULATORS, UNDERFLOW
from impls.workloads.sampling import pieces

# Scores held at a time: half a MiB in float64, so that passes over them stay in a core's cache.
_BLOCK = 1 << 16
# Elements of K or V that are widened at a time, for the same reason. Whole heads would take new pages.
_WIDENED = 1 << 16

#: Value and tolerance, float64, same shape.
Bounded = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Backward:
    """One query head's gradients.

    Attributes:
        dq: (rows, D), value and tolerance.
        dk, dv: (Sk, D), value and variance of its error: they are added up over heads.
    """

    dq: Bounded
    dk: Bounded
    dv: Bounded


@dataclass(frozen=True)
class _Block:
    """Rows of the score matrix over the keys that any of them sees, and what follows from them."""

    rows: slice
    keys: slice
    p: np.ndarray  # (rows, keys), float64
    noise: np.ndarray  # (rows, keys), float32: variance of the relative error of p
    seen: np.ndarray | float  # (rows, keys), 1 where visible and 0 elsewhere; 1.0 where all are
    reach: np.ndarray  # (rows, 1): sqrt(2 L), or 2 sqrt(3 visible keys) where that is less


class Reference:
    """Attention over the keys and values of one key head.

    Args:
        k, v: (Sk, D), in the dtype's storage.
        visible: query rows -> first visible key and last plus one, per row.
        odds: L, see ``rounding.log_odds``.
        sharing: queries that may see a key, those of all query heads that share it together.
    """

    def __init__(
        self,
        k: np.ndarray,
        v: np.ndarray,
        dtype_name: str,
        visible: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
        odds: float,
        sharing: int,
    ) -> None:
        self.k, self.v = np.ascontiguousarray(k), np.ascontiguousarray(v)
        self.visible, self.sharing, self.odds = visible, sharing, odds
        self.d = k.shape[1]
        self.k_lengths = np.empty(k.shape[0], np.float32)
        for part in self._parts(slice(0, k.shape[0])):
            self.k_lengths[part] = np.square(widened(self.k[part], np.float32)).sum(axis=1)
        self.scale = 1 / math.sqrt(self.d)
        self.u, self.underflow = dtype(dtype_name).unit_roundoff, UNDERFLOW[dtype_name]
        self.u_exp = 16 * dtype("f32").unit_roundoff + (0.0 if dtype_name == "f32" else self.u / 2)
        self.rounding = self.u**2 / 3
        self.accumulator = ACCUMULATORS[dtype_name, "f32"]
        self.reach = math.sqrt(2 * odds)

    @cached_property
    def k_wide(self) -> np.ndarray:
        """K in float64, (Sk, D); as the following, for backward passes, which go over it many times."""
        return widened(self.k, np.float64)

    @cached_property
    def v_wide(self) -> np.ndarray:
        """V in float64, (Sk, D)."""
        return widened(self.v, np.float64)

    @cached_property
    def k_squares(self) -> np.ndarray:
        """Squares of K's elements in float32, (Sk, D)."""
        return np.asarray(np.square(widened(self.k, np.float32)))

    @cached_property
    def v_lengths(self) -> np.ndarray:
        """Squared lengths of V's rows in float32, (Sk,)."""
        return np.asarray(np.square(widened(self.v, np.float32)).sum(axis=1))

    def forward(self, q: np.ndarray, rows: np.ndarray) -> Bounded:
        """O of the queries ``q`` (rows, D), which are rows ``rows`` of their heads."""
        value, tolerance = np.empty(q.shape), np.empty(q.shape)
        for block in self._blocks(q, rows):
            keys, p = block.keys, block.p
            p_squares = np.square(p.astype(np.float32))
            shifted = p_squares * block.noise
            spread = shifted + p_squares * self._summing(keys) + block.seen * np.float32(self.underflow**2)
            o, squares = np.zeros((p.shape[0], self.d)), np.zeros((p.shape[0], self.d))
            for part in self._parts(keys):
                at = slice(part.start - keys.start, part.stop - keys.start)
                o += p[:, at] @ widened(self.v[part], np.float64)
                squares += spread[:, at] @ np.square(widened(self.v[part], np.float32))
            squares += o**2 * shifted.sum(axis=1, keepdims=True)
            # Numerator and denominator are sums over the same keys.
            error = block.reach * np.sqrt(squares) + 2 * self._slope(keys) * np.abs(o)
            value[block.rows] = o
            tolerance[block.rows] = error + self.u * (np.abs(o) + error) + self.underflow
        return value, tolerance

    def backward(self, q: np.ndarray, do: np.ndarray, rows: np.ndarray) -> Backward:
        """Gradients of the queries ``q`` (rows, D), with ``do`` (rows, D); dk and dv are these rows' share."""
        dq, dq_tolerance = np.empty(q.shape), np.empty(q.shape)
        dk, dk_squares, dv, dv_squares = (np.zeros(self.k.shape) for _ in range(4))
        sharing = (self.accumulator.spread(self.sharing, self.odds) / self.reach) ** 2
        along_d = (self.accumulator.spread(self.d, self.odds) / self.reach) ** 2
        u2, tiny = self.rounding, np.float32(self.underflow**2)
        q, do = q.astype(np.float64), do.astype(np.float64)
        for block in self._blocks(q, rows):
            keys, p, noise = block.keys, block.p, block.noise
            k, v, own_q, own_do = self.k_wide[keys], self.v_wide[keys], q[block.rows], do[block.rows]
            q_squares, do_squares = (np.square(x.astype(np.float32)) for x in (own_q, own_do))
            o = p @ v
            dp = own_do @ v.T
            delta = (own_do * o).sum(axis=1, keepdims=True)
            ds = p * (dp - delta)
            dq[block.rows] = self.scale * (ds @ k)
            dk[keys] += self.scale * (ds.T @ own_q)
            dv[keys] += p.T @ own_do

            p_squares, dp_squares = np.square(p.astype(np.float32)), np.square(dp.astype(np.float32))
            ds_squares = np.square(ds.astype(np.float32))
            delta_squares = (p_squares * dp_squares * (noise + np.float32(u2 + self._summing(keys)))).sum(
                axis=1, keepdims=True
            ) + (u2 + along_d) * (do_squares * np.square(o)).sum(axis=1, keepdims=True)
            dp_sum = (along_d / self.d * do_squares.sum(axis=1, keepdims=True)).astype(np.float32)
            ds_noise = ds_squares * (noise + np.float32(2 * u2)) + block.seen * tiny
            ds_noise += p_squares * (np.float32(u2) * dp_squares + dp_sum * self.v_lengths[keys])

            squares = self.scale**2 * ((ds_noise + ds_squares * np.float32(self._summing(keys))) @ self.k_squares[keys])
            common = self.reach * np.sqrt(delta_squares) * self.scale * np.abs(p @ k)
            size = np.abs(dq[block.rows])
            error = block.reach * np.sqrt(squares) + common + self._slope(keys) * size
            dq_tolerance[block.rows] = error + 2 * self.u * (size + error) + self.underflow

            ds_noise += p_squares * delta_squares.astype(np.float32) + ds_squares * np.float32(sharing)
            dk_squares[keys] += self.scale**2 * (ds_noise.T @ q_squares)
            dv_squares[keys] += (p_squares * (noise + np.float32(sharing)) + block.seen * tiny).T @ do_squares
        return Backward((dq, dq_tolerance), (dk, dk_squares), (dv, dv_squares))

    def gathered(self, parts: list[Bounded]) -> Bounded:
        """dK or dV, value and tolerance, from the query heads that share this key head."""
        value: np.ndarray = np.sum([one for one, _ in parts], axis=0)
        squares = np.sum([variance + self.rounding * one**2 for one, variance in parts], axis=0)
        size = np.abs(value)
        reach = min(self.reach, math.sqrt(12 * self.sharing))
        error = reach * np.sqrt(squares) + self.accumulator.slope(self.sharing, self.odds) * size
        return value, error + 2 * self.u * (size + error) + self.underflow

    def sum_tolerance(self, do: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Tolerance of the sum of dV over keys, (D,), given dO of all queries that share this head, (queries, D).

        Returns:
            A function of dV (keys, D), which holds on to nothing of the size of an input.
        """
        reach, rounding, underflow = self.reach, self.rounding, self.underflow
        relative = rounding + self.u_exp**2 / 3 + (self.accumulator.spread(self.sharing, self.odds) / reach) ** 2
        of_do = relative * np.square(do).sum(axis=0)

        def tolerance(dv: np.ndarray) -> np.ndarray:
            dv_squares = np.square(dv).sum(axis=0)
            return np.asarray(reach * np.sqrt(of_do + 2 * rounding * dv_squares + underflow**2 * dv.shape[0]))

        return tolerance

    def _blocks(self, q: np.ndarray, rows: np.ndarray) -> Iterator[_Block]:
        """Consecutive rows with their probabilities."""
        first, end = self.visible(rows)
        at = 0
        while at < rows.size:
            # As many rows as fit if they all see as many keys as this one, or twice that for a growing mask.
            width = int(end[at] - first[at])
            stop = min(rows.size, at + max(1, _BLOCK // width))
            while stop - at > 1 and (stop - at) * int(end[at:stop].max() - first[at:stop].min()) > 2 * _BLOCK:
                stop = at + (stop - at) // 2
            part = slice(at, stop)
            low, high = int(first[part].min()), int(end[part].max())
            yield self._block(q[part].astype(np.float64), part, slice(low, high), first[part], end[part])
            at = stop

    def _block(self, q: np.ndarray, rows: slice, keys: slice, first: np.ndarray, end: np.ndarray) -> _Block:
        columns = np.arange(keys.start, keys.stop)
        s = np.empty((q.shape[0], columns.size))
        for part in self._parts(keys):
            at = slice(part.start - keys.start, part.stop - keys.start)
            s[:, at] = q @ widened(self.k[part], np.float64).T
        s *= self.scale
        seen: np.ndarray | float = 1.0
        if (first > keys.start).any() or (end < keys.stop).any():
            hidden = (columns < first[:, None]) | (columns >= end[:, None])
            s[hidden] = -np.inf
            seen = (~hidden).astype(np.float32)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        if isinstance(seen, np.ndarray):
            s[seen == 0] = 0.0
        u2 = self.rounding
        along_d = self.accumulator.spread(self.d, self.odds) / self.reach
        by_score = 2 * u2 + (self.accumulator.slope(self.d, self.odds) / self.reach) ** 2
        lengths = np.square(q).sum(axis=1, keepdims=True) * ((2 * u2 + along_d**2) / self.d**2)
        noise = np.square(s.astype(np.float32)) * np.float32(by_score)
        noise += lengths.astype(np.float32) * self.k_lengths[keys]
        noise += np.float32(u2 + self.u_exp**2 / 3)
        reach = np.minimum(self.reach, np.sqrt(12 * (end - first)))[:, None]
        return _Block(rows, keys, p, noise, seen, reach)

    def _parts(self, keys: slice) -> Iterator[slice]:
        """Keys that are widened at a time."""
        return pieces(keys.start, keys.stop, max(1, _WIDENED // self.d))

    def _summing(self, keys: slice) -> float:
        """What summing over these keys adds to the relative variance of each term."""
        return (self.accumulator.spread(keys.stop - keys.start, self.odds) / self.reach) ** 2

    def _slope(self, keys: slice) -> float:
        return self.accumulator.slope(keys.stop - keys.start, self.odds)
