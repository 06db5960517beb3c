"""A GEMM case as a TensorIR function, and the same scheduled by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from impls.tvm import tiling
from impls.tvm.kernels import arithmetic, dot, product
from impls.tvm.kernels.arithmetic import Arithmetic
from impls.tvm.kernels.elements import STORAGE, activated, raised, rounded
from impls.tvm.kernels.host import Host
from impls.tvm.kernels.product import Operand, Shape
from impls.workloads.gemm import Gemm

Expr = Any


@dataclass(frozen=True)
class Definition:
    """A GEMM that is not scheduled yet.

    Attributes:
        function: of A, B [, bias or residual] and C.
        words: whether A and B are taken as 32-bit words of several elements.
    """

    function: tirx.PrimFunc
    words: bool = False


def define(case: Gemm, host: Host, symbolic: bool = False) -> Definition:
    """What ``case`` computes, in the form that suits it. With ``symbolic`` M is a variable."""
    how = arithmetic.choose(case.dtype, host)
    plan = None if symbolic else dot.choose(case, how, host)
    if plan is not None:
        return Definition(_unpacked(case, how, plan), words=how.group > 1)
    return Definition(_packed(case, host, how, symbolic))


def _packed(case: Gemm, host: Host, how: Arithmetic, symbolic: bool) -> tirx.PrimFunc:
    m: Expr = tirx.Var("m", "int32") if symbolic else case.m
    blocks = tiling.choose(
        None if symbolic else case.m,
        case.n,
        -(-case.k // how.group),
        batch=case.batch,
        threads=host.threads,
        unit=how.unit(host.unit),
        l2_bytes=host.l2_bytes,
        whole_k=how.offset != 0,
    )
    lead = (case.batch,) if case.batch != 1 else ()
    rows = (m, case.k) if case.layout[0] == "n" else (case.k, m)
    columns = (case.k, case.n) if case.layout[1] == "n" else (case.n, case.k)
    a = te.placeholder((*lead, *rows), STORAGE[case.dtype], name="A")
    b = te.placeholder((*lead, *columns), STORAGE[case.dtype], name="B")
    operand_a = Operand(_reader(a, case.dtype, bool(lead), case.layout[0] == "n"), case.layout[0] == "n")
    operand_b = Operand(_reader(b, case.dtype, bool(lead), case.layout[1] == "t"), case.layout[1] == "t")
    total = product.sums(Shape(case.batch, m, case.n, case.k), operand_a, operand_b, how, blocks)
    return _finished(case, [a, b], m, total)


def _unpacked(case: Gemm, how: Arithmetic, plan: dot.Plan) -> tirx.PrimFunc:
    words = case.k // how.group
    lead = (case.batch,) if case.batch != 1 else ()
    a, b = (te.placeholder((*lead, r, words), how.word, name=name) for name, r in (("A", case.m), ("B", case.n)))
    return _finished(case, [a, b], case.m, dot.sums(case, a, b, plan))


def _finished(
    case: Gemm, operands: list[te.Tensor], m: Expr, total: Callable[[Expr, Expr, Expr], Expr]
) -> tirx.PrimFunc:
    """The function whose last stage, ``C``, applies the epilogue to the sums."""
    specs = case.input_specs()
    lead = (case.batch,) if case.batch != 1 else ()
    addends: list[te.Tensor] = []
    if "bias" in specs:
        addends.append(te.placeholder((case.n,), STORAGE[case.out], name="bias"))
    elif "residual" in specs:
        addends.append(te.placeholder((*lead, m, case.n), STORAGE[case.out], name="residual"))

    def element(*at: Expr) -> Expr:
        z, i, j = at if lead else (0, *at)
        value = total(z, i, j)
        for addend in addends:
            value = value + raised(addend[j] if "bias" in specs else addend(*at), case.out)
        return rounded(activated(value, case.epilogue, case.dtype == "i8"), case.out)

    c = te.compute((*lead, m, case.n), element, name="C")
    return te.create_prim_func([*operands, *addends, c])


def scheduled(definition: Definition) -> tuple[tvm.IRModule, product.Plan | dot.Plan]:
    """The function by the hand schedule, as ``main``; and the plan it follows."""
    sch = tvm.s_tir.Schedule(definition.function)
    names = {str(sch.get(block).name_hint) for block in sch.get_child_blocks(sch.get_sblock("root"))}
    plan = (dot if "partial" in names else product).schedule(sch, "C")
    return sch.mod, plan


def _reader(operand: te.Tensor, dtype: str, batched: bool, k_last: bool) -> Callable[[Expr, Expr, Expr], Expr]:
    def read(z: Expr, at: Expr, k: Expr) -> Expr:
        lead: Sequence[Expr] = (z,) if batched else ()
        return raised(operand(*lead, at, k) if k_last else operand(*lead, k, at), dtype)

    return read
