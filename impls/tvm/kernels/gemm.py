"""A GEMM case as a TensorIR function, and the same scheduled by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import te, tirx

from impls.tvm import tiling
from impls.tvm.kernels import arithmetic, product
from impls.tvm.kernels.elements import STORAGE, activated, raised, rounded
from impls.tvm.kernels.host import Host
from impls.tvm.kernels.product import Operand, Plan, Shape
from impls.workloads.gemm import Gemm

Expr = Any


def define(case: Gemm, host: Host, symbolic: bool = False) -> tirx.PrimFunc:
    """What ``case`` computes, of A, B [, bias or residual] and C. With ``symbolic`` M is a variable."""
    m: Expr = tirx.Var("m", "int32") if symbolic else case.m
    chosen = arithmetic.choose(case.dtype, host)
    blocks = tiling.choose(
        None if symbolic else case.m,
        case.n,
        -(-case.k // chosen.group),
        batch=case.batch,
        threads=host.threads,
        unit=chosen.unit(host.unit),
        l2_bytes=host.l2_bytes,
        whole_k=chosen.offset != 0,
    )
    specs = {**case.input_specs(), **case.output_specs()}
    lead = (case.batch,) if case.batch != 1 else ()
    rows = (m, case.k) if case.layout[0] == "n" else (case.k, m)
    columns = (case.k, case.n) if case.layout[1] == "n" else (case.n, case.k)
    a = te.placeholder((*lead, *rows), STORAGE[case.dtype], name="A")
    b = te.placeholder((*lead, *columns), STORAGE[case.dtype], name="B")
    operand_a = Operand(_reader(a, case.dtype, bool(lead), case.layout[0] == "n"), case.layout[0] == "n")
    operand_b = Operand(_reader(b, case.dtype, bool(lead), case.layout[1] == "t"), case.layout[1] == "t")
    total = product.sums(Shape(case.batch, m, case.n, case.k), operand_a, operand_b, chosen, blocks)

    addends: list[te.Tensor] = []
    if "bias" in specs:
        addends.append(te.placeholder((case.n,), STORAGE[case.out], name="bias"))
    elif "residual" in specs:
        addends.append(te.placeholder((*lead, m, case.n), STORAGE[case.out], name="residual"))

    def finished(*at: Expr) -> Expr:
        z, i, j = at if lead else (0, *at)
        value = total(z, i, j)
        for addend in addends:
            value = value + raised(addend[j] if "bias" in specs else addend(*at), case.out)
        return rounded(activated(value, case.epilogue, case.dtype == "i8"), case.out)

    c = te.compute((*lead, m, case.n), finished, name="C")
    return te.create_prim_func([a, b, *addends, c])


def scheduled(function: tirx.PrimFunc) -> tuple[tvm.IRModule, Plan]:
    """``define``'s function by the hand schedule, as ``main``; and the plan it follows."""
    sch = tvm.s_tir.Schedule(function)
    plan = product.schedule(sch, "C")
    return sch.mod, plan


def _reader(operand: te.Tensor, dtype: str, batched: bool, k_last: bool) -> Callable[[Expr, Expr, Expr], Expr]:
    def read(z: Expr, at: Expr, k: Expr) -> Expr:
        lead: Sequence[Expr] = (z,) if batched else ()
        return raised(operand(*lead, at, k) if k_last else operand(*lead, k, at), dtype)

    return read
