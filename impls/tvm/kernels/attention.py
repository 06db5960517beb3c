"""Attention forward as one TensorIR function, loops written out: scores never leave the cache.

Keys are rows of a register tile and queries its lanes: S^T = K Q^T and O^T = V^T P^T. So the softmax runs along lanes,
without a sum across any, and the weights come out in the order in which the second product wants them packed. Keys are
taken in chunks, with the running maximum and rescaling of Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018), as in FlashAttention (Dao et al., 2022). What no query of a block sees is not computed.

Shapes: ``k_packed`` (batch, key head, panel, words of D, ``keys``), ``v_packed`` (batch, key head, panel of D, words of
Sk, ``columns``), both zero beyond Sk and D. A task takes ``block`` rows: queries of one head, or, where there are fewer
queries than lanes, of all heads that share a key head.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from impls.tvm.kernels import arithmetic, decode, elements
from impls.tvm.kernels.arithmetic import Arithmetic
from impls.tvm.kernels.host import Host
from impls.tvm.tiling import VectorUnit, register_tiles
from impls.workloads.attention import Attention

Expr = Any

# Keys of a chunk, about: its weights, 32 queries wide, fill half of a 64 KiB L1 or a corner of L2.
_CHUNK = 256
# A tile's loop costs about this many multiplications on entry and exit.
_OVERHEAD = 4
_ON_STACK = {"disable_lower_tvm_builtin": True}


@dataclass(frozen=True)
class Plan:
    """The blocks.

    Attributes:
        keys, columns: rows of the register tiles of the first and second product: keys, columns of V.
        vectors: vectors per row of both.
        lanes: lanes of a vector.
        chunk: panels of keys that are taken at once.
        over_group: whether a block's rows are of all heads that share a key head.
    """

    keys: int
    columns: int
    vectors: int
    lanes: int
    chunk: int
    over_group: bool

    @property
    def block(self) -> int:
        """Rows of a task."""
        return self.vectors * self.lanes


def plan(case: Attention, how: Arithmetic, unit: VectorUnit) -> Plan:
    """Blocks for ``case``: tiles that waste least of D and fill the registers."""
    over_group = case.sq < unit.lanes
    rows = case.sq * case.group if over_group else case.sq
    vectors = 1 if rows <= unit.lanes else 2
    heights = [mr for mr, nv in register_tiles(unit) if nv == vectors]
    keys = max(mr for mr in heights if mr % how.group == 0)
    columns = min(heights, key=lambda mr: (-(-case.d // mr)) * (mr * vectors + _OVERHEAD))
    return Plan(keys, columns, vectors, unit.lanes, max(1, min(_CHUNK, case.sk) // keys), over_group)


@dataclass(frozen=True)
class Scheduled:
    """Attention as a module.

    Attributes:
        module: ``main`` of Q, K, V and O.
        words: whether Q and K are taken as 32-bit words of several elements.
        config: how it is computed, for the record.
    """

    module: tvm.IRModule
    words: bool
    config: dict[str, Any]


def scheduled(case: Attention, host: Host) -> Scheduled:
    """``case`` in the form that suits it: tiles, or, where there are few rows, straight from memory."""
    how = arithmetic.choose(case.dtype, host)
    few = decode.plan(case, how, host)
    if few is not None:
        function, words, blocks = decode.function(case, how, few), how.group > 1, asdict(few)
    else:
        tiles = plan(case, how, how.unit(host.unit))
        function, words, blocks = _function(case, how, tiles), False, asdict(tiles)
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    return Scheduled(module, words, {"instruction": how.name, "packed": few is None, "blocks": blocks})


def _function(case: Attention, how: Arithmetic, p: Plan) -> tirx.PrimFunc:
    batch, hq, hkv, group, sq, sk, d = case.batch, case.hq, case.hkv, case.group, case.sq, case.sk, case.d
    g, word, lanes, vectors, block, mk, mv = how.group, how.word, p.lanes, p.vectors, p.block, p.keys, p.columns
    storage, accumulate, library = elements.STORAGE[case.dtype], how.accumulate, how.library
    chunk_panels = p.chunk
    chunk_keys = chunk_panels * mk
    chunks = -(-sk // chunk_keys)
    key_panels = chunks * chunk_panels
    d_words, d_panels = -(-d // g), -(-d // mv)
    key_words = key_panels * mk // g
    heads, rows = (hkv, group * sq) if p.over_group else (hq, sq)
    row_blocks = -(-rows // block)
    masked, window, shift = case.mask != "full", case.window, sk - sq
    scale, low = T.float32(1 / math.sqrt(d)), T.float32(-3.0e38)

    def zero_or(inside: Expr, value: Expr) -> Expr:
        return tirx.if_then_else(inside, elements.raised(value, case.dtype), tirx.const(0.0, "float32"))

    def head_of(head: Expr, row: Expr) -> Expr:
        return head * group + tirx.floordiv(row, sq) if p.over_group else head

    def query_of(row: Expr) -> Expr:
        return tirx.floormod(row, sq) if p.over_group else row

    def key_head_of(head: Expr) -> Expr:
        return head if p.over_group else tirx.floordiv(head, group)

    def q_word(q: Any, z: Expr, head: Expr, row: Expr, w: Expr) -> Expr:
        at = [w * g + i for i in range(g)]
        return how.pack_b(
            [zero_or(tirx.all(row < rows, c < d), q[z, query_of(row), head_of(head, row), c]) for c in at]
        )

    def k_word(k: Any, z: Expr, head: Expr, key: Expr, w: Expr) -> Expr:
        at = [w * g + i for i in range(g)]
        return how.pack_a([zero_or(tirx.all(key < sk, c < d), k[z, key, head, c]) for c in at])

    def v_word(v: Any, z: Expr, head: Expr, w: Expr, column: Expr) -> Expr:
        at = [w * g + i for i in range(g)]
        return how.pack_a([zero_or(tirx.all(key < sk, column < d), v[z, key, head, column]) for key in at])

    def weights_word(weights: list[Expr]) -> Expr:
        if g == 1:
            return weights[0]
        # Rounded to bf16 and back to f32, which is what packing takes.
        whole = [elements.raised(elements.rounded(weight, "bf16"), "bf16") for weight in weights]
        return how.pack_b(whole)

    def last_key(row: Expr) -> Expr:
        """The last key that a row sees."""
        return query_of(row) + shift if masked else T.int32(sk - 1)

    def first_key(row: Expr) -> Expr:
        return tirx.max(query_of(row) + (shift + 1 - window), 0) if window else T.int32(0)

    def range_of(at: Expr) -> tuple[Expr, Expr]:
        """First key and last key plus one that any row of a block sees."""
        if not masked:
            return T.int32(0), T.int32(sk)
        top, bottom = (0, sq - 1) if p.over_group else (at * block, tirx.min(at * block + block, sq) - 1)
        first = tirx.max(top + (shift + 1 - window), 0) if window else T.int32(0)
        return first, bottom + (shift + 1)

    @T.prim_func(s_tir=True)
    def main(
        Q: T.Buffer((batch, sq, hq, d), storage),
        K: T.Buffer((batch, sk, hkv, d), storage),
        V: T.Buffer((batch, sk, hkv, d), storage),
        Out: T.Buffer((batch, sq, hq, d), storage),
    ) -> None:
        T.func_attr({"tirx.noalias": True})
        k_packed = T.alloc_buffer((batch, hkv, key_panels, d_words, mk), word)
        v_packed = T.alloc_buffer((batch, hkv, d_panels, key_words, mv), word)
        for task in T.parallel(batch * hkv * chunks):
            z: T.let = task // (hkv * chunks)
            head: T.let = task // chunks % hkv
            chunk: T.let = task % chunks
            for panel, i, w in T.grid(chunk_panels, mk, d_words):
                k_packed[z, head, chunk * chunk_panels + panel, w, i] = k_word(
                    K, z, head, (chunk * chunk_panels + panel) * mk + i, w
                )
            for panel, w, i in T.grid(d_panels, chunk_keys // g, mv):
                v_packed[z, head, panel, chunk * (chunk_keys // g) + w, i] = v_word(
                    V, z, head, chunk * (chunk_keys // g) + w, panel * mv + i
                )
        for task in T.parallel(batch * heads * row_blocks):
            z: T.let = task // (heads * row_blocks)
            head: T.let = task // row_blocks % heads
            at: T.let = task % row_blocks
            key_head: T.let = key_head_of(head)
            begin: T.let = range_of(at)[0]
            end: T.let = range_of(at)[1]
            q_packed = T.alloc_buffer((d_words, block), word)
            scores = T.alloc_buffer((chunk_keys, block), "float32")
            weights = T.alloc_buffer((chunk_keys // g, block), word)
            sums = T.alloc_buffer((d_panels * mv, block), "float32")
            peak = T.alloc_buffer((block,), "float32")
            shrink = T.alloc_buffer((block,), "float32")
            total = T.alloc_buffer((block,), "float32")
            first = T.alloc_buffer((block,), "int32")
            last = T.alloc_buffer((block,), "int32")
            for x, w in T.grid(block, d_words):
                q_packed[w, x] = q_word(Q, z, head, at * block + x, w)
            for x in range(block):
                peak[x] = low
                total[x] = T.float32(0)
                first[x] = first_key(at * block + x)
                last[x] = last_key(at * block + x)
            for c in range(d_panels * mv):
                for v in T.unroll(vectors):
                    for x in T.vectorized(lanes):
                        sums[c, v * lanes + x] = T.float32(0)
            for step in range((end + chunk_keys - 1) // chunk_keys - begin // chunk_keys):
                chunk: T.let = begin // chunk_keys + step
                from_panel: T.let = T.max(begin // mk - chunk * chunk_panels, 0)
                to_panel: T.let = T.min((end + mk - 1) // mk - chunk * chunk_panels, chunk_panels)
                for panel in range(to_panel - from_panel):
                    p_at: T.let = from_panel + panel
                    with T.attr(T.int32(0), "pragma_import_llvm", library):
                        tile = T.alloc_buffer((mk * block,), "float32", scope="local", annotations=_ON_STACK)
                        for i in T.unroll(mk):
                            for v in T.unroll(vectors):
                                tile[T.ramp(i * block + v * lanes, 1, lanes)] = T.broadcast(T.float32(0), lanes)
                        for w in range(d_words):
                            for i in T.unroll(mk):
                                for v in T.unroll(vectors):
                                    tile[T.ramp(i * block + v * lanes, 1, lanes)] = accumulate(
                                        tile[T.ramp(i * block + v * lanes, 1, lanes)],
                                        T.broadcast(k_packed[z, key_head, chunk * chunk_panels + p_at, w, i], lanes),
                                        q_packed[w, T.ramp(v * lanes, 1, lanes)],
                                    )
                        for i in T.unroll(mk):
                            for v in T.unroll(vectors):
                                scores[p_at * mk + i, T.ramp(v * lanes, 1, lanes)] = tile[
                                    T.ramp(i * block + v * lanes, 1, lanes)
                                ]
                for v in T.unroll(vectors):
                    for x in T.vectorized(lanes):
                        shrink[v * lanes + x] = peak[v * lanes + x]
                for row in range((to_panel - from_panel) * mk):
                    key: T.let = from_panel * mk + row
                    for v in T.unroll(vectors):
                        for x in T.vectorized(lanes):
                            scores[key, v * lanes + x] = T.Select(
                                T.And(
                                    chunk * chunk_keys + key <= last[v * lanes + x],
                                    first[v * lanes + x] <= chunk * chunk_keys + key,
                                ),
                                scores[key, v * lanes + x] * scale,
                                low,
                            )
                            peak[v * lanes + x] = T.max(peak[v * lanes + x], scores[key, v * lanes + x])
                for v in T.unroll(vectors):
                    for x in T.vectorized(lanes):
                        shrink[v * lanes + x] = elements.exp(shrink[v * lanes + x] - peak[v * lanes + x])
                        total[v * lanes + x] = total[v * lanes + x] * shrink[v * lanes + x]
                for row in range((to_panel - from_panel) * mk // g):
                    w: T.let = from_panel * mk // g + row
                    for v in T.unroll(vectors):
                        for x in T.vectorized(lanes):
                            for i in T.unroll(g):
                                scores[w * g + i, v * lanes + x] = elements.exp(
                                    scores[w * g + i, v * lanes + x] - peak[v * lanes + x]
                                )
                                total[v * lanes + x] = total[v * lanes + x] + scores[w * g + i, v * lanes + x]
                            weights[w, v * lanes + x] = weights_word(
                                [scores[w * g + i, v * lanes + x] for i in range(g)]
                            )
                for panel in range(d_panels):
                    with T.attr(T.int32(0), "pragma_import_llvm", library):
                        out = T.alloc_buffer((mv * block,), "float32", scope="local", annotations=_ON_STACK)
                        for i in T.unroll(mv):
                            for v in T.unroll(vectors):
                                out[T.ramp(i * block + v * lanes, 1, lanes)] = (
                                    sums[panel * mv + i, T.ramp(v * lanes, 1, lanes)]
                                    * shrink[T.ramp(v * lanes, 1, lanes)]
                                )
                        for row in range((to_panel - from_panel) * mk // g):
                            for i in T.unroll(mv):
                                for v in T.unroll(vectors):
                                    out[T.ramp(i * block + v * lanes, 1, lanes)] = accumulate(
                                        out[T.ramp(i * block + v * lanes, 1, lanes)],
                                        T.broadcast(
                                            v_packed[
                                                z,
                                                key_head,
                                                panel,
                                                chunk * (chunk_keys // g) + from_panel * mk // g + row,
                                                i,
                                            ],
                                            lanes,
                                        ),
                                        weights[from_panel * mk // g + row, T.ramp(v * lanes, 1, lanes)],
                                    )
                        for i in T.unroll(mv):
                            for v in T.unroll(vectors):
                                sums[panel * mv + i, T.ramp(v * lanes, 1, lanes)] = out[
                                    T.ramp(i * block + v * lanes, 1, lanes)
                                ]
            for x in range(block):
                if at * block + x < rows:
                    for c in range(d):
                        Out[z, query_of(at * block + x), head_of(head, at * block + x), c] = elements.rounded(
                            sums[c, x] / total[x], case.dtype
                        )

    return main
