"""Attention's forward pass as MLIR with ``iree_linalg_ext.attention``: scores are never stored.

Owns the text of the module, its tiles and its bands. The compiler's own StableHLO pipeline does not arrive at that
operation, so it is written by hand: the operation computes softmax(scale Q K^T [masked]) V by the online softmax, tile
by tile (Milakov and Gimelshein 2018; Dao et al. 2022).

Three things make it fast on a CPU; times are of 8 heads, 512 x 512, D = 64, f32, two cores of an AMD Zen 4:

- Tiles. By itself IREE 3.13 gives every vector one query, 16 of V's columns and 4 keys, and computes the scores anew
  for every 16 columns: 88 ms. With 4 queries, all columns and 32 keys it takes 20.
- K transposed before, to (D, Sk), and the heads gathered: 4.1 ms with both passes. Left to itself the compiler fuses
  the transposition into the attention, which repeats it for every 4 queries (9 ms): hence the barriers. 16-bit inputs
  are raised to f32 in the same pass: left as they are they take 8 ms.
- Bands. A mask hides tiles but does not skip them, so that queries are cut into bands, each with the keys that its
  mask shows.

Query heads that share a key head are rows of one product: K's tiles are read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from impls.iree.mlir import Tensor, Text
from impls.workloads.attention import Attention

#: Wider vectors than IREE thinks wise: the tiles below unroll into about a hundred lines of FMAs each.
FLAGS = (
    "--iree-llvmcpu-max-allowed-number-of-native-vectors=4096",
    "--iree-llvmcpu-stack-allocation-limit=262144",
)

# Queries of a workgroup; it reads all keys of its band once for every few queries.
_WORKGROUP = 64
# Bands at most, and queries that a band has at least: each band is compiled by itself, about a second.
_BANDS, _BAND_ROWS = 4, 128

_ELEMENT = {"f32": "f32", "f16": "f16", "bf16": "bf16"}


@dataclass(frozen=True)
class Tile:
    """What one step of the online softmax holds in registers.

    Attributes:
        rows: queries; with D / 16 vectors of output each, they should fit 32 registers with room to spare.
        keys: keys: the vectors of scores of a query.
    """

    rows: int
    keys: int


def tile(d: int) -> Tile:
    """The tile for a head size: 1024 x 1024 with D = 128 takes 64, 53, 54 and 62 ms with 2, 4, 6 and 8 queries."""
    return Tile(4, 32) if d <= 128 else Tile(2, 64)


@dataclass(frozen=True)
class Band:
    """Queries ``[first, stop)`` and the keys ``[low, high)`` that any of them sees."""

    first: int
    stop: int
    low: int
    high: int


def bands(case: Attention) -> list[Band]:
    """All queries, cut where a mask is worth it; a band's keys are whole tiles where there are so many keys."""
    if case.mask == "full":
        return [Band(0, case.sq, 0, case.sk)]
    rows = max(_BAND_ROWS, -(-case.sq // _BANDS))
    rows = -(-rows // _WORKGROUP) * _WORKGROUP
    keys, shift = tile(case.d).keys, case.sk - case.sq
    found = []
    for first in range(0, case.sq, rows):
        stop = min(case.sq, first + rows)
        low = max(0, first + shift - case.window + 1) // keys * keys if case.mask == "window" else 0
        high = min(case.sk, -(-(stop + shift) // keys) * keys)
        found.append(Band(first, stop, low, high))
    return found


def module(case: Attention) -> str:
    """The MLIR module of a forward pass: ``main`` of Q, K, V gives O, all (B, S, H, D)."""
    text = Text()
    storage = _ELEMENT[case.dtype]
    b, hkv, d = case.batch, case.hkv, case.d
    q = Tensor("%Q", (b, case.sq, case.hq, d), storage)
    k = Tensor("%K", (b, case.sk, hkv, d), storage)
    v = Tensor("%V", (b, case.sk, hkv, d), storage)
    keys = text.heads(text.apart(text.permuted(k, (0, 2, 3, 1), "f32")), b * hkv)
    values = text.heads(text.apart(text.permuted(v, (0, 2, 1, 3), "f32")), b * hkv)
    o = text.op("tensor.empty() : {}", q.shape, storage)
    for band in bands(case):
        part = text.sliced(q, 1, band.first, band.stop)
        queries = text.rows(text.apart(text.permuted(part, (0, 2, 1, 3), "f32")), b * hkv)
        attended = _attention(
            text,
            case,
            band,
            queries,
            text.sliced(keys, keys.rank - 1, band.low, band.high),
            text.sliced(values, values.rank - 2, band.low, band.high),
        )
        by_head = text.unrolled(text.apart(attended), (b, case.hq, band.stop - band.first, d))
        o = text.inserted(text.permuted(by_head, (0, 2, 1, 3), storage), o, 1, band.first)
    signature = ", ".join(f"{x.name}: {x.type}" for x in (q, k, v))
    body = "\n".join(f"    {line}" for line in text.lines)
    return (
        "module @attention {\n"
        f"  func.func @main({signature}) -> {o.type} {{\n{body}\n    return {o.name} : {o.type}\n  }}\n"
        "}\n"
    )


def _attention(text: Text, case: Attention, band: Band, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O of a band's rows: q ([heads,] rows, D), k ([heads,] D, keys), v ([heads,] keys, D)."""
    lead = ["h"] if q.rank == 3 else []
    rows, keys = q.shape[-2], v.shape[-2]
    operands = [(q, "m", "k"), (k, "k", "s"), (v, "s", "n")]
    maps = [_map(lead, (*lead, x, y)) for _, x, y in operands] + [_map(lead, ())]
    scale = text.op(f"arith.constant {case.d**-0.5!r} : f32", (), "f32")
    given = [x for x, _, _ in operands] + [scale]
    mask = _mask(text, case, band, rows, keys)
    if mask is not None:
        given.append(mask)
        maps.append(_map(lead, ("m", "s")))
    maps.append(_map(lead, (*lead, "m", "n")))
    empty = text.op("tensor.empty() : {}", q.shape, "f32")
    config = ""
    # Axes of one element are dropped before the tiles are looked at, which would then be too many.
    if min(rows, keys, case.d) > 1:
        chosen = tile(case.d)
        heads = [1] * len(lead)
        tiles = {
            "distribution": [*heads, min(rows, _WORKGROUP), 0, 0, 0],
            "vector_common_parallel": [*heads, min(rows, chosen.rows), 0, 0, case.d],
            "vector_reduction": [0] * len(heads) + [0, min(keys, chosen.keys), 0, 0],
        }
        levels = ", ".join(f"{level} = {sizes}" for level, sizes in tiles.items())
        config = (
            f"{{compilation_info = #iree_codegen.compilation_info<"
            f"lowering_config = #iree_cpu.lowering_config<{levels}>, "
            "translation_info = <pipeline = #iree_cpu.pipeline<LinalgExtTileAndVectorize>>>} "
        )
    return text.op(
        f"iree_linalg_ext.attention <{{indexing_maps = [{', '.join(maps)}]}}> {config}"
        f"ins({', '.join(x.name for x in given)} : {', '.join(x.type for x in given)}) "
        f"outs({empty.name} : {empty.type}) {{ ^bb0(%score: f32): iree_linalg_ext.yield %score : f32 }} -> {{}}",
        q.shape,
        "f32",
    )


def _map(lead: list[str], results: tuple[str, ...]) -> str:
    """An operand's axes: of heads, rows m, keys s, the summed k and V's columns n."""
    return f"affine_map<({', '.join([*lead, 'm', 's', 'k', 'n'])}) -> ({', '.join(results)})>"


def _mask(text: Text, case: Attention, band: Band, rows: int, keys: int) -> Tensor | None:
    """Which of a band's rows see which keys, (rows, keys), its queries once for each head; None where all see all."""
    shift, queries = case.sk - case.sq, band.stop - band.first
    sees_last = band.first + shift >= band.high - 1
    sees_first = case.mask != "window" or band.stop - 1 + shift - case.window < band.low
    if case.mask == "full" or (sees_last and sees_first):
        return None
    lines = [
        "%row = linalg.index 0 : index",
        "%column = linalg.index 1 : index",
        f"%queries = arith.constant {queries} : index",
        f"%shift = arith.constant {band.first + shift - band.low} : index",
        "%query = arith.remui %row, %queries : index",
        "%last = arith.addi %query, %shift : index",
        "%causal = arith.cmpi sle, %column, %last : index",
    ]
    visible = "%causal"
    if case.mask == "window":
        lines += [
            f"%window = arith.constant {case.window} : index",
            "%before = arith.subi %last, %window : index",
            "%near = arith.cmpi sgt, %column, %before : index",
            "%both = arith.andi %causal, %near : i1",
        ]
        visible = "%both"
    empty = text.op("tensor.empty() : {}", (rows, keys), "i1")
    axes = "affine_map<(i, j) -> (i, j)>"
    return text.op(
        f'linalg.generic {{indexing_maps = [{axes}], iterator_types = ["parallel", "parallel"]}} '
        f"outs({empty.name} : {empty.type}) {{ ^bb0(%unused: i1): "
        + " ".join([*lines, f"linalg.yield {visible} : i1"])
        + " } -> {}",
        (rows, keys),
        "i1",
    )
