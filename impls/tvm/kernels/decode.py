"""Attention of a few query rows per key head, as in decoding: K and V are read where they lie, once, and never packed.

All query heads that share a key head are rows of one task. Scores are sums along D: a vector of partial sums each,
added up across lanes at the end. The weights times V are sums over keys, with vectors along D. Between them a softmax
over whole rows, which are short enough to wait for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from impls.tvm.kernels import arithmetic, elements
from impls.tvm.kernels.arithmetic import Arithmetic
from impls.tvm.kernels.host import Host
from impls.workloads.attention import Attention

# Rows beyond which ``attention``'s tiles are filled well enough to pay for packing K.
_MOST_ROWS = 8
# Sums in flight of either product: two multiply-adds a cycle of latency 4 need 8, the registers have room for these.
_SUMS = 24
_ON_STACK = {"disable_lower_tvm_builtin": True}


@dataclass(frozen=True)
class Plan:
    """``keys`` that are scored at a time; ``vectors`` of a row of V that are summed at a time; ``lanes`` of each."""

    keys: int
    vectors: int
    lanes: int


def plan(case: Attention, how: Arithmetic, host: Host) -> Plan | None:
    """The plan, where this is the way to compute ``case``; None where it is not."""
    rows, lanes = case.group * case.sq, host.unit.lanes
    storable = case.dtype == "f32" or (case.dtype == "bf16" and how.group == 2)
    if not storable or rows > _MOST_ROWS or case.d % (lanes * how.group):
        return None
    sums = min(_SUMS, host.unit.registers - 4)
    keys = max(n for n in (1, 2, 4) if n == 1 or n * rows <= sums)
    vectors = max(n for n in range(1, case.d // lanes + 1) if case.d // lanes % n == 0 and (n == 1 or n * rows <= sums))
    return Plan(keys, vectors, lanes)


def function(case: Attention, how: Arithmetic, p: Plan) -> tirx.PrimFunc:
    """Of Q and K in words, V and O."""
    batch, hq, hkv, group, sq, sk, d = case.batch, case.hq, case.hkv, case.group, case.sq, case.sk, case.d
    lanes, keys, vectors, word, accumulate = p.lanes, p.keys, p.vectors, how.word, how.accumulate
    storage, rows, words = elements.STORAGE[case.dtype], group * sq, d // how.group
    shift = sk - sq
    # Keys that any row sees: all but the oldest of a window.
    begin = max(0, shift + 1 - case.window) if case.window else 0
    seen = sk - begin
    # Scores are kept for whole vectors of keys; those beyond the last are masked.
    width = -(-seen // lanes) * lanes
    scale, low = T.float32(1 / math.sqrt(d)), T.float32(-3.0e38)
    masked, window = case.mask != "full", case.window
    library = how.library + arithmetic.lane_sum(lanes)
    lane_sum = arithmetic.LANE_SUM

    def visible(row: tirx.PrimExpr, key: tirx.PrimExpr) -> tirx.PrimExpr:
        inside = key < sk
        if masked:
            last = tirx.floormod(row, sq) + shift
            inside = tirx.And(inside, key <= last)
            if window:
                inside = tirx.And(inside, last - window < key)
        return inside

    @T.prim_func(s_tir=True)
    def main(
        Q: T.Buffer((batch, sq, hq, words), word),
        K: T.Buffer((batch, sk, hkv, words), word),
        V: T.Buffer((batch, sk, hkv, d), storage),
        Out: T.Buffer((batch, sq, hq, d), storage),
    ) -> None:
        T.func_attr({"tirx.noalias": True})
        for task in T.parallel(batch * hkv):
            z: T.let = task // hkv
            head: T.let = task % hkv
            scores = T.alloc_buffer((rows, width), "float32")
            peaks = T.alloc_buffer((lanes,), "float32")
            totals = T.alloc_buffer((lanes,), "float32")
            peak = T.alloc_buffer((1,), "float32")
            inverse = T.alloc_buffer((rows,), "float32")
            for some in range(width // keys):
                with T.attr(T.int32(0), "pragma_import_llvm", library):
                    tile = T.alloc_buffer((rows * keys * lanes,), "float32", scope="local", annotations=_ON_STACK)
                    for r in T.unroll(rows * keys):
                        tile[T.ramp(r * lanes, 1, lanes)] = T.broadcast(T.float32(0), lanes)
                    for s in range(words // lanes):
                        for j in T.unroll(keys):
                            for r in T.unroll(rows):
                                tile[T.ramp((r * keys + j) * lanes, 1, lanes)] = accumulate(
                                    tile[T.ramp((r * keys + j) * lanes, 1, lanes)],
                                    Q[z, r % sq, head * group + r // sq, T.ramp(s * lanes, 1, lanes)],
                                    K[z, T.min(begin + some * keys + j, sk - 1), head, T.ramp(s * lanes, 1, lanes)],
                                )
                    for j in T.unroll(keys):
                        for r in T.unroll(rows):
                            scores[r, some * keys + j] = scale * T.call_pure_extern(
                                "float32", lane_sum, tile[T.ramp((r * keys + j) * lanes, 1, lanes)]
                            )
            for r in range(rows):
                for x in T.vectorized(lanes):
                    peaks[x] = low
                    totals[x] = T.float32(0)
                for c in range(width // lanes):
                    for x in T.vectorized(lanes):
                        scores[r, c * lanes + x] = T.Select(
                            visible(r, begin + c * lanes + x), scores[r, c * lanes + x], low
                        )
                        peaks[x] = T.max(peaks[x], scores[r, c * lanes + x])
                peak[0] = low
                for x in range(lanes):
                    peak[0] = T.max(peak[0], peaks[x])
                for c in range(width // lanes):
                    for x in T.vectorized(lanes):
                        scores[r, c * lanes + x] = elements.exp(scores[r, c * lanes + x] - peak[0])
                        totals[x] = totals[x] + scores[r, c * lanes + x]
                inverse[r] = T.float32(0)
                for x in range(lanes):
                    inverse[r] = inverse[r] + totals[x]
                inverse[r] = T.float32(1) / inverse[r]
            for part in range(d // lanes // vectors):
                out = T.alloc_buffer((rows * vectors * lanes,), "float32", scope="local", annotations=_ON_STACK)
                for r in T.unroll(rows * vectors):
                    out[T.ramp(r * lanes, 1, lanes)] = T.broadcast(T.float32(0), lanes)
                for key in range(seen):
                    for v in T.unroll(vectors):
                        for r in T.unroll(rows):
                            for x in T.vectorized(lanes):
                                out[(r * vectors + v) * lanes + x] = out[(r * vectors + v) * lanes + x] + scores[
                                    r, key
                                ] * elements.raised(
                                    V[z, begin + key, head, (part * vectors + v) * lanes + x], case.dtype
                                )
                for v in T.unroll(vectors):
                    for r in T.unroll(rows):
                        for x in T.vectorized(lanes):
                            Out[z, r % sq, head * group + r // sq, (part * vectors + v) * lanes + x] = elements.rounded(
                                out[(r * vectors + v) * lanes + x] * inverse[r], case.dtype
                            )

    return main
