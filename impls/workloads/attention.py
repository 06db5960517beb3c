"""Attention: O = softmax(Q K^T / sqrt(D) + mask) V, its backward pass, or both.

Owns a case's shape, mask and direction, and what follows: FLOPs, exponentials, bytes, inputs, which heads and rows are
compared. The float64 reference and its tolerance are in ``attention_reference``.

Excluded for now: f8 (its scales are not part of a case), a value dimension other than D (MLA), attention sinks, paged
KV, dropout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from impls.workloads.attention_reference import Backward, Bounded, Reference
from impls.workloads.base import Case, CaseError, Expected, TensorSpec
from impls.workloads.draws import normals
from impls.workloads.dtypes import dtype, widened
from impls.workloads.parallel import each
from impls.workloads.rounding import log_odds
from impls.workloads.sampling import tile_sample

DTYPES = ("f32", "tf32", "f16", "bf16")
MASKS = ("full", "causal", "window")
DIRECTIONS = ("fwd", "bwd", "fwdbwd")
MOST_SIZE = 2**31 - 1
MOST_ELEMENTS = 2**40

# What one element of the score matrix costs the reference, in operations of a DGEMM: matmuls of 2 D each, and
# elementwise passes (50 ns per element on one core altogether, measured).
_MATMULS = {"fwd": 3, "bwd": 10}
_PASSES = {"fwd": 400, "bwd": 800}
_OPERATIONS_PER_ELEMENT = 1024
# Operations that a sampled reference may take: a second or two on two cores.
_SAMPLE_BUDGET = 4e10
# Elements of K and V that the whole-output check goes over.
_CHECKED_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Attention(Case):
    """Tensors are (B, S, H, D), contiguous; query head h uses key head h // (Hq / Hkv); the scale is 1/sqrt(D).

    Attributes:
        batch, hq, hkv, sq, sk, d: B, query heads, key and value heads, queries, keys, head size.
        dtype: of all tensors. Sums are kept in f32.
        mask: ``full``; ``causal``, bottom-right aligned: query i sees the keys j <= i + Sk - Sq; or ``window``: causal,
            and of those the last ``window`` only.
        window: keys seen at most, itself included; 0 where the mask is not ``window``.
        direction: ``fwd``; ``bwd``: given Q, K, V, dO and the implementation's own residuals of a forward pass that is
            not timed, dQ, dK and dV; ``fwdbwd``: all four outputs.
    """

    workload: ClassVar[str] = "attention"

    batch: int
    hq: int
    hkv: int
    sq: int
    sk: int
    d: int
    dtype: str
    mask: str = "full"
    window: int = 0
    direction: str = "fwd"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("mask", self.mask, MASKS),
            ("direction", self.direction, DIRECTIONS),
        ):
            if value not in known:
                raise CaseError(f"attention has no {name} {value!r}; write one of {', '.join(known)}")
        sizes = {"b": self.batch, "h": self.hq, "kv": self.hkv, "q": self.sq, "k": self.sk, "d": self.d}
        for name, size in sizes.items():
            if not 0 < size <= MOST_SIZE:
                raise CaseError(f"{name}{size} of an attention; write {name} with a number from 1 to {MOST_SIZE}")
        if self.hq % self.hkv:
            raise CaseError(f"{self.hq} query heads do not share {self.hkv} key heads evenly; write kv with a divisor")
        if self.mask != "full" and self.sq > self.sk:
            raise CaseError(
                f"of {self.sq} queries over {self.sk} keys, the first {self.sq - self.sk} would see no key; "
                f"write k with at least {self.sq}, or leave the mask out"
            )
        if (self.mask == "window") != (self.window > 0) or self.window < 0:
            raise CaseError(f"mask {self.mask} with a window of {self.window} keys; write window=<keys>, from 1")
        if self.window >= self.sk:
            raise CaseError(f"window={self.window} hides none of the {self.sk} keys; write causal")
        for name, spec in (*self.input_specs().items(), *self.output_specs().items()):
            if math.prod(spec.shape) > MOST_ELEMENTS:
                raise CaseError(f"{name} {list(spec.shape)} has more than 2^40 elements; write a smaller shape")

    @property
    def id(self) -> str:
        """``attention:b<B>h<Hq>[kv<Hkv>](s<S>|q<Sq>k<Sk>)d<D>:<dtype>[:causal|:window=<W>][:bwd|:fwdbwd]``."""
        heads = f"h{self.hq}" if self.hq == self.hkv else f"h{self.hq}kv{self.hkv}"
        lengths = f"s{self.sq}" if self.sq == self.sk else f"q{self.sq}k{self.sk}"
        tokens = ["attention", f"b{self.batch}{heads}{lengths}d{self.d}", self.dtype]
        if self.mask != "full":
            tokens.append("causal" if self.mask == "causal" else f"window={self.window}")
        if self.direction != "fwd":
            tokens.append(self.direction)
        return ":".join(tokens)

    @classmethod
    def parse(cls, spec: str) -> Attention:
        """The attention named by ``spec``, such as ``b1h8s1024d64:bf16:causal`` or ``b8h32kv8q1k4096d128:bf16``.

        Options may come in any order. Raises CaseError with what to write.
        """
        shape, *tokens = spec.split(":")
        form = r"b(\d{1,12})h(\d{1,12})(?:kv(\d{1,12}))?(?:s(\d{1,12})|q(\d{1,12})k(\d{1,12}))d(\d{1,12})"
        found = re.fullmatch(form, shape, re.ASCII)
        if not found:
            raise CaseError(
                f"cannot read the shape {shape!r} of attention:{spec}; write b<B>h<Hq>[kv<Hkv>]s<S>d<D>, such as "
                "b1h8s1024d64, or q<Sq>k<Sk> for s<S>, as in b8h32kv8q1k4096d128"
            )
        if not tokens:
            raise CaseError(
                f"attention:{spec} has no dtype; write attention:{shape}:bf16, or one of {', '.join(DTYPES)}"
            )
        batch, hq, hkv, s, sq, sk, d = (None if g is None else int(g) for g in found.groups())
        assert batch is not None and hq is not None and d is not None
        queries, keys = (s, s) if s is not None else (sq, sk)
        assert queries is not None and keys is not None
        mask, window, direction = _options(tokens[1:], spec)
        return cls(batch, hq, hq if hkv is None else hkv, queries, keys, d, tokens[0], mask, window, direction)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.hq // self.hkv

    def visible(self) -> int:
        """Unmasked entries of one head's score matrix: the sum over queries of visible keys."""
        if self.mask == "full":
            return self.sq * self.sk
        most = self.window or self.sk
        first = min(self.sk - self.sq + 1, most)
        growing = most - first + 1
        return growing * (first + most) // 2 + (self.sq - growing) * most

    def flops(self) -> int:
        """Forward 2 B Hq visible (Dqk + Dv); backward 2.5 times that (five matmuls for two); both 3.5 times.

        Softmax, masking and scaling are not counted. One of the five matmuls of a backward pass computes the scores
        again (Dao, FlashAttention-2, 2023).
        """
        forward = 4 * self.batch * self.hq * self.visible() * self.d
        return forward * {"fwd": 2, "bwd": 5, "fwdbwd": 7}[self.direction] // 2

    def exps(self) -> int:
        """One per visible score in the forward pass; the backward pass recomputes each once."""
        return self.batch * self.hq * self.visible() * (2 if self.direction == "fwdbwd" else 1)

    def compulsory_bytes(self) -> int:
        """Inputs read once and outputs written once; rows of K and V that no query sees are not read.

        Their rows of dK and dV are zero but written. A backward pass also reads its residuals: those are the
        implementation's choice and not counted.
        """
        unseen = self.sk - min(self.sk, self.sq + self.window - 1) if self.mask == "window" else 0
        return self.total_bytes() - 2 * self.batch * unseen * self.hkv * self.d * dtype(self.dtype).bytes

    @property
    def compute_dtype(self) -> str:
        """The dtype of the tensors."""
        return self.dtype

    def _query_spec(self) -> TensorSpec:
        return TensorSpec((self.batch, self.sq, self.hq, self.d), self.dtype)

    def _key_spec(self) -> TensorSpec:
        return TensorSpec((self.batch, self.sk, self.hkv, self.d), self.dtype)

    def input_specs(self) -> dict[str, TensorSpec]:
        """``Q``, ``K``, ``V``, and ``dO`` unless forward."""
        specs = {"Q": self._query_spec(), "K": self._key_spec(), "V": self._key_spec()}
        return specs if self.direction == "fwd" else {**specs, "dO": self._query_spec()}

    def output_specs(self) -> dict[str, TensorSpec]:
        """``O`` unless backward; ``dQ``, ``dK``, ``dV`` unless forward."""
        specs = {} if self.direction == "bwd" else {"O": self._query_spec()}
        if self.direction != "fwd":
            specs.update(dQ=self._query_spec(), dK=self._key_spec(), dV=self._key_spec())
        return specs

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        """Standard normals: scores are N(0, 1) after the scale."""
        return {name: normals(seed, name, s.shape, s.dtype) for name, s in self.input_specs().items()}

    def reference_flops(self) -> int:
        """Matmuls and elementwise passes over the visible scores, and the handling of every tensor's elements."""
        specs = (*self.input_specs().values(), *self.output_specs().values())
        elements = sum(math.prod(s.shape) for s in specs)
        return self.batch * self.hq * self.visible() * self._score_cost() + _OPERATIONS_PER_ELEMENT * elements

    def _score_cost(self) -> int:
        passes = {"fwd": ("fwd",), "bwd": ("bwd",), "fwdbwd": ("fwd", "bwd")}[self.direction]
        return sum(2 * self.d * _MATMULS[p] + _PASSES[p] for p in passes)

    def expected(self, inputs: Mapping[str, np.ndarray], *, sample: int | None = None) -> dict[str, Expected]:
        """Reference and tolerance of every output; see ``attention_reference``.

        A sample takes whole heads backward, and rows at and within all 64-wide tiles forward, of the first and last
        batch entry and of the first, the last and a random key head (first and last query head of each; backward all
        that share it), or fewer where these alone would take long: at the least the last key head of one batch entry.
        """
        rows, keys = np.arange(self.sq), np.arange(self.sk)
        batches, kv_heads, heads = np.arange(self.batch), np.arange(self.hkv), np.arange(self.hq)
        if sample is not None:
            generator = np.random.default_rng(sample)
            if self.direction == "fwd":
                rows = tile_sample(self.sq, generator)
            batches, kv_heads = self._chosen(generator, rows.size)
            in_group = np.arange(self.group) if self.direction != "fwd" else np.unique([0, self.group - 1])
            heads = (kv_heads[:, None] * self.group + in_group).reshape(-1)
        mesh: dict[str, tuple[np.ndarray, ...]] = {
            name: (batches, rows, heads, np.arange(self.d))
            if name in ("O", "dQ")
            else (batches, keys, kv_heads, np.arange(self.d))
            for name in self.output_specs()
        }
        value = {name: np.empty(tuple(a.size for a in axes)) for name, axes in mesh.items()}
        tolerance = {name: np.empty_like(v) for name, v in value.items()}
        backward: dict[tuple[int, int], list[Backward]] = {}

        def fill(task: tuple[int, int]) -> Backward | None:
            b, h = task
            batch, head = int(batches[b]), int(heads[h])
            reference = self._reference(inputs, batch, head // self.group)
            q = inputs["Q"][batch, rows, head]
            if "O" in value:
                value["O"][b, :, h], tolerance["O"][b, :, h] = reference.forward(q, rows)
            if "dQ" not in value:
                return None
            one = reference.backward(q, inputs["dO"][batch, rows, head], rows)
            value["dQ"][b, :, h], tolerance["dQ"][b, :, h] = one.dq
            return one

        tasks = [(b, h) for b in range(batches.size) for h in range(heads.size)]
        for (b, h), one in zip(tasks, each(fill, tasks), strict=True):
            if one is None:
                continue
            g = h // self.group  # all query heads of a key head are there, one after the other
            of_group = backward.setdefault((b, g), [])
            of_group.append(one)
            if len(of_group) == self.group:
                reference = self._reference(inputs, int(batches[b]), int(kv_heads[g]))
                at = (b, slice(None), g)
                value["dK"][at], tolerance["dK"][at] = reference.gathered([part.dk for part in of_group])
                value["dV"][at], tolerance["dV"][at] = reference.gathered([part.dv for part in of_group])
                del backward[b, g]
        return {n: Expected(None if sample is None else mesh[n], value[n], tolerance[n]) for n in value}

    def _reference(self, inputs: Mapping[str, np.ndarray], batch: int, kv: int) -> Reference:
        return Reference(
            inputs["K"][batch, :, kv],
            inputs["V"][batch, :, kv],
            self.dtype,
            self._visible_range,
            log_odds(self.batch * max(self.sq * self.hq, self.sk * self.hkv) * self.d),
            self.group * self.sq,
        )

    def _visible_range(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First key that each query sees, and the last plus one."""
        if self.mask == "full":
            return np.zeros_like(rows), np.full_like(rows, self.sk)
        end = rows + (self.sk - self.sq + 1)
        return (np.maximum(end - self.window, 0) if self.window else np.zeros_like(rows)), end

    def _chosen(self, generator: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Batch entries and key heads of a sample, as many as the budget allows."""
        some_batch, some_head = int(generator.integers(self.batch)), int(generator.integers(self.hkv))
        per_head = self.visible() / self.sq * rows * self._score_cost()
        per_group = per_head * (self.group if self.direction != "fwd" else min(self.group, 2))
        choices = (
            ({0, self.batch - 1}, {0, some_head, self.hkv - 1}),
            ({0, self.batch - 1}, {0, self.hkv - 1}),
            ({some_batch}, {0, self.hkv - 1}),
            ({some_batch}, {self.hkv - 1}),
        )
        fitting = (c for c in choices if len(c[0]) * len(c[1]) * per_group <= _SAMPLE_BUDGET)
        batches, heads = next(fitting, choices[-1])
        return np.array(sorted(batches)), np.array(sorted(heads))

    def invariants(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], seed: int) -> str | None:
        """One random row of O or dQ of every head against float64; and sum of dV over keys = sum of dO over queries.

        Sees a head that is wrong as a whole, wherever it is (up to 2^28 elements of K and V: random pairs of batch
        entry and key head beyond). Does not see a wrong tile outside the sample, nor dK there. The sums of dV hold
        since the rows of the softmax add up to 1; rounding P adds errors of variance (u^2 + u_exp^2) / 3 sum dO^2 at
        most, rounding dV (by query head and in the end) 2/3 u^2 sum dV^2.
        """
        return self.checker(inputs, seed)(outputs)

    def checker(self, inputs: Mapping[str, np.ndarray], seed: int) -> Callable[[Mapping[str, np.ndarray]], str | None]:
        """As ``invariants``; the rows and sums that are compared are computed here, once."""
        generator = np.random.default_rng([seed, 0xA7])
        pairs = [(b, h) for b in range(self.batch) for h in range(self.hkv)]
        most = max(1, _CHECKED_ELEMENTS // (2 * self.sk * self.d))
        if len(pairs) > most:
            pairs = [pairs[i] for i in generator.choice(len(pairs), most, replace=False)]
        rows_of = generator.integers(0, self.sq, (len(pairs), self.group))
        made = list(each(lambda task: self._head(inputs, *pairs[task], rows_of[task]), range(len(pairs))))
        return lambda outputs: next(filter(None, (head.wrong(outputs) for head in made)), None)

    def _head(self, inputs: Mapping[str, np.ndarray], batch: int, kv: int, rows: np.ndarray) -> _Head:
        """What is held of one key head and the query heads that share it, one row of each."""
        reference = self._reference(inputs, batch, kv)
        heads = kv * self.group + np.arange(self.group)
        q = inputs["Q"][batch, rows, heads]
        checks, do_sum, tolerance = {}, None, None
        if self.direction != "bwd":
            checks["O"] = reference.forward(q, rows)
        if self.direction != "fwd":
            checks["dQ"] = reference.backward(q, inputs["dO"][batch, rows, heads], rows).dq
            given = widened(inputs["dO"][batch][:, heads], np.float64)
            do_sum, tolerance = given.sum(axis=(0, 1)), reference.sum_tolerance(given.reshape(-1, self.d))
        return _Head(batch, kv, rows, heads, checks, do_sum, tolerance)


@dataclass(frozen=True)
class _Head:
    """What is held of one key head: one row of O and dQ per query head, and the sum of dV over keys."""

    batch: int
    kv: int
    rows: np.ndarray
    heads: np.ndarray
    checks: dict[str, Bounded]
    do_sum: np.ndarray | None
    tolerance: Callable[[np.ndarray], np.ndarray] | None

    def wrong(self, outputs: Mapping[str, np.ndarray]) -> str | None:
        """What is wrong with it, one sentence."""
        batch, rows, heads = self.batch, self.rows, self.heads
        for name, (value, tolerance) in self.checks.items():
            wrong = (np.abs(outputs[name][batch, rows, heads].astype(np.float64) - value) > tolerance).any(axis=1)
            if wrong.any():
                h = int(np.argmax(wrong))
                return f"{name}[{batch}, {rows[h]}, {heads[h]}] differs from the reference beyond its tolerance."
        if self.tolerance is not None:
            got = widened(outputs["dV"][batch, :, self.kv], np.float64)
            if (np.abs(got.sum(axis=0) - self.do_sum) > self.tolerance(got)).any():
                return (
                    f"dV[{batch}, :, {self.kv}] does not add up to the sum of dO over the queries that share this head."
                )
        return None


def _options(tokens: list[str], spec: str) -> tuple[str, int, str]:
    """Mask, window and direction, from tokens in any order."""
    mask, window, direction = "", 0, ""
    for token in tokens:
        width = re.fullmatch(r"window=(\d{1,12})", token, re.ASCII)
        if width:
            if mask in ("full", "window"):
                raise CaseError(f"attention:{spec} has two masks, {mask} and {token}; write one")
            mask, window = "window", int(width[1])
            if window == 0:
                raise CaseError(f"window=0 of attention:{spec} hides every key; write window=<keys>, from 1")
        elif token in ("full", "causal"):
            if mask == "window" and token == "causal":  # a window is causal anyway
                continue
            if mask:
                raise CaseError(f"attention:{spec} has two masks, {mask} and {token}; write one")
            mask = token
        elif token in DIRECTIONS:
            if direction:
                raise CaseError(f"attention:{spec} has two directions, {direction} and {token}; write one")
            direction = token
        else:
            raise CaseError(f"unknown option {token!r} of attention:{spec}; write causal, window=<keys>, bwd or fwdbwd")
    return mask or "full", window, direction or "fwd"
