"""The packed product: what is computed, as a TensorIR function, and its schedule.

Owns the five stages ``a_packed``, ``b_packed``, ``b_sums`` (only where the arithmetic offsets A), ``tiles`` and the
stage that writes C, and how they are blocked, vectorised and run in parallel. It does not own how operands are read or
what becomes of a sum: the caller gives both as expressions.

Shapes, with the letters of ``Tiling``: ``a_packed`` (batch, panels, row_chunks, words, mr), ``b_packed`` (batch,
column_blocks, block_panels, words, nr), ``tiles`` (batch, panels, row_chunks, column_blocks, block_panels, mr, nr).
Rows, columns and words beyond the case's are zeros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule

from impls.tvm.kernels import micro
from impls.tvm.kernels.arithmetic import BY_NAME, Arithmetic, signed_bytes
from impls.tvm.tiling import Tiling

Expr = Any
# Words of K that are transposed together while an operand stored along K is packed: a cache line of f32.
_TRANSPOSED = 16
# Name of the annotation that carries the plan.
_PLAN = "ridgemark.plan"


@dataclass(frozen=True)
class Operand:
    """How an operand is read.

    Attributes:
        read: (batch, row or column, k) -> element in the arithmetic's sum dtype.
        along_k: whether neighbours in memory differ in k.
    """

    read: Callable[[Expr, Expr, Expr], Expr]
    along_k: bool


@dataclass(frozen=True)
class Plan:
    """What the schedule must know of the product that it finds in a function; carried there as text.

    Attributes:
        arithmetic: how operands are multiplied.
        tiling: how they are blocked.
        a_along_k, b_along_k: see ``Operand``.
    """

    arithmetic: Arithmetic
    tiling: Tiling
    a_along_k: bool
    b_along_k: bool

    def as_config(self) -> dict[str, Any]:
        """For a program's ``config``."""
        return {"instruction": self.arithmetic.name, "tiling": asdict(self.tiling)}

    def dumps(self) -> str:
        """As JSON."""
        fields = {"tiling": asdict(self.tiling), "a_along_k": self.a_along_k, "b_along_k": self.b_along_k}
        return json.dumps({"arithmetic": self.arithmetic.name} | fields)

    @classmethod
    def loads(cls, text: str) -> Plan:
        """From ``dumps``."""
        fields = json.loads(text)
        return cls(BY_NAME[fields["arithmetic"]], Tiling(**fields["tiling"]), fields["a_along_k"], fields["b_along_k"])


@dataclass(frozen=True)
class Shape:
    """Of a product; ``m`` may be a symbolic expression."""

    batch: int
    m: Expr
    n: int
    k: int


def sums(
    shape: Shape, a: Operand, b: Operand, arithmetic: Arithmetic, tiling: Tiling
) -> Callable[[Expr, Expr, Expr], Expr]:
    """The product's stages; returns (batch, row, column) -> the sum there. ``schedule`` finds what it needs in them."""
    t, group = tiling, arithmetic.group
    # Symbolic, one panel more than needed may be packed: that it suffices TVM can prove, of the quotient rounded up it
    # cannot. No tile is computed of it.
    panels = tirx.floordiv(shape.m, t.mr * t.row_chunks) + 1 if t.panels is None else t.panels
    words = t.kc * t.k_blocks

    def packed(operand: Operand, pack: Callable[[Sequence[Expr]], Expr], extent: Expr) -> Callable[..., Expr]:
        def word(batch: Expr, at: Expr, w: Expr) -> Expr:
            def element(k: Expr) -> Expr:
                inside = tirx.all(at < extent, k < shape.k)
                return tirx.if_then_else(inside, operand.read(batch, at, k), tirx.const(0, arithmetic.sum))

            return pack([element(w * group + g) for g in range(group)])

        return word

    a_word = packed(a, arithmetic.pack_a, shape.m)
    b_word = packed(b, arithmetic.pack_b, shape.n)
    a_packed = te.compute(
        (shape.batch, panels, t.row_chunks, words, t.mr),
        lambda z, p, c, w, i: a_word(z, (p * t.row_chunks + c) * t.mr + i, w),
        name="a_packed",
    )
    b_packed = te.compute(
        (shape.batch, t.column_blocks, t.block_panels, words, t.nr),
        lambda z, q, r, w, j: b_word(z, (q * t.block_panels + r) * t.nr + j, w),
        name="b_packed",
    )
    outer = te.reduce_axis((0, t.k_blocks), name="k_block")
    inner = te.reduce_axis((0, t.kc), name="k_word")
    tiles = te.compute(
        (shape.batch, panels, t.row_chunks, t.column_blocks, t.block_panels, t.mr, t.nr),
        lambda z, p, c, q, r, i, j: te.sum(
            arithmetic.multiply(a_packed[z, p, c, outer * t.kc + inner, i], b_packed[z, q, r, outer * t.kc + inner, j]),
            axis=[outer, inner],
        ),
        name="tiles",
        attrs={_PLAN: Plan(arithmetic, tiling, a.along_k, b.along_k).dumps()},
    )
    if arithmetic.offset:
        word = te.reduce_axis((0, words), name="k_word")
        b_sums = te.compute(
            (shape.batch, t.column_blocks, t.block_panels, t.nr),
            lambda z, q, r, j: te.sum(sum(signed_bytes(b_packed[z, q, r, word, j])), axis=[word]),
            name="b_sums",
        )

    div, mod = tirx.floordiv, tirx.floormod

    def at(z: Expr, m: Expr, n: Expr) -> Expr:
        panel, column = div(m, t.mr), div(n, t.nr)
        q, r, j = div(n, t.nr * t.block_panels), mod(column, t.block_panels), mod(n, t.nr)
        total = tiles[z, div(m, t.mr * t.row_chunks), mod(panel, t.row_chunks), q, r, mod(m, t.mr), j]
        if arithmetic.offset:
            total = total - tirx.const(arithmetic.offset, "int32") * b_sums[z, q, r, j]
        return total

    return at


def schedule(sch: Schedule, output: str) -> Plan:
    """Schedule the stages of ``sums`` and the block named ``output``, which writes C, in place.

    ``output`` has the axes (row, column), with those of a batch before them.

    Returns:
        The plan that the stages were made by.
    """
    plan = Plan.loads(str(sch.get(sch.get_sblock("tiles")).annotations[_PLAN]))
    t, arithmetic = plan.tiling, plan.arithmetic
    tiles, written = sch.get_sblock("tiles"), sch.get_sblock(output)
    *batch, m, n = sch.get_loops(written)
    panel, chunk, i = sch.split(m, [t.panels, t.row_chunks, t.mr])
    q, r, j = sch.split(n, [t.column_blocks, t.block_panels, t.nr])
    sch.reorder(*batch, chunk, q, panel, r, i, j)
    if t.tasks_over == "batch":
        task, block = sch.fuse(*batch), q
    else:
        task = block = sch.fuse(*batch, chunk, q)
    _vectorise(sch, j, t.lanes)
    # Where K is one block, a tile goes to C as soon as it is complete; else all tiles of a task wait for all blocks.
    sch.compute_at(tiles, r if t.k_blocks == 1 else block, preserve_unit_loops=True)
    z, p, c, q, r, i, j, k_block, k_word = sch.get_loops(tiles)[-9:]
    sch.reorder(k_block, z, c, q, p, r, k_word, i, j)
    if arithmetic.offset:
        sch.compute_at(sch.get_sblock("b_sums"), block, preserve_unit_loops=True)
    packed_b = sch.get_sblock("b_packed")
    sch.compute_at(packed_b, block if t.k_blocks == 1 else k_block, preserve_unit_loops=True)
    _schedule_packing(sch, packed_b, plan.b_along_k, t.lanes)
    packed_a = sch.get_sblock("a_packed")
    if t.tasks_over == "batch":
        sch.compute_at(packed_a, task, preserve_unit_loops=True)
    elif t.parallel_pack:
        z, p, c, _, _ = sch.get_loops(packed_a)
        sch.parallel(sch.fuse(z, p, c))
    _schedule_packing(sch, packed_a, plan.a_along_k, None)
    if t.parallel:
        sch.parallel(task)
    if arithmetic.offset:
        _schedule_sums(sch, t.lanes)
    zeros = sch.decompose_reduction(tiles, k_block)
    _vectorise(sch, sch.get_loops(zeros)[-1], t.lanes)
    sch.tensorize(k_word, micro.register(arithmetic, t.mr, t.nv, t.lanes, t.kc, t.unroll))
    return plan


def _schedule_packing(sch: Schedule, block: Any, along_k: bool, lanes: int | None) -> None:
    """Inner loops of a packing stage, whose last three axes are (panel or chunk, word, row or column)."""
    panel, word, across = sch.get_loops(block)[-3:]
    if along_k:
        _, inner = sch.split(word, [None, _TRANSPOSED])
        sch.reorder(across, inner)
        sch.unroll(inner)
    elif lanes is not None:
        sch.reorder(word, panel)  # a row of B is read in one go
        _vectorise(sch, across, lanes)


def _schedule_sums(sch: Schedule, lanes: int) -> None:
    column_sums = sch.get_sblock("b_sums")
    j, word = sch.get_loops(column_sums)[-2:]
    sch.reorder(word, j)
    _vectorise(sch, j, lanes)
    zeros = sch.decompose_reduction(column_sums, word)
    _vectorise(sch, sch.get_loops(zeros)[-1], lanes)


def _vectorise(sch: Schedule, loop: Any, lanes: int) -> None:
    _, inner = sch.split(loop, [None, lanes])
    sch.vectorize(inner)
