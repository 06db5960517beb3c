"""A GEMM case as MetaSchedule gets it: the sum and what follows it, with B in panels, and no schedule.

Storing B in panels of consecutive columns, and operands raised to f32, are part of the definition: MetaSchedule's rules
do not invent such stages. All loops of all stages are left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from impls.tvm.kernels.elements import STORAGE, activated, raised, rounded
from impls.tvm.kernels.host import Host
from impls.workloads.gemm import Gemm

Expr = Any

# Columns of a panel: two vectors of AVX-512, and of no use where they do not divide N.
_PANELS = (32, 16)
# MetaSchedule inlines stages that only move data unless it is told not to.
_KEEP = {"meta_schedule.inline_rule": "disable"}


def define(case: Gemm) -> tirx.PrimFunc:
    """What ``case`` computes, of A, B [, bias or residual] and C."""
    specs = case.input_specs()
    lead = (case.batch,) if case.batch != 1 else ()
    rank = len(lead)
    a = te.placeholder(specs["A"].shape, STORAGE[case.dtype], name="A")
    b = te.placeholder(specs["B"].shape, STORAGE[case.dtype], name="B")

    def element(operand: te.Tensor, z: Sequence[Expr], at: Expr, k: Expr, k_last: bool) -> Expr:
        return raised(operand(*z, at, k) if k_last else operand(*z, k, at), case.dtype)

    if case.dtype == "f32" and case.layout[0] == "n":
        rows = a
    else:
        rows = te.compute(
            (*lead, case.m, case.k),
            lambda *at: element(a, at[:rank], at[rank], at[rank + 1], case.layout[0] == "n"),
            name="a_rows",
            attrs=_KEEP,
        )
    panel = next((width for width in _PANELS if case.n % width == 0), case.n)
    panels = te.compute(
        (*lead, case.n // panel, case.k, panel),
        lambda *at: element(b, at[:rank], at[rank] * panel + at[rank + 2], at[rank + 1], case.layout[1] == "t"),
        name="b_panels",
        attrs=_KEEP,
    )
    k = te.reduce_axis((0, case.k), name="k")

    def product(*at: Expr) -> Expr:
        *z, i, j = at
        return te.sum(rows(*z, i, k) * panels(*z, tirx.floordiv(j, panel), k, tirx.floormod(j, panel)), axis=[k])

    total = te.compute((*lead, case.m, case.n), product, name="total")
    addends = [
        te.placeholder(specs[name].shape, STORAGE[case.out], name=name)
        for name in ("bias", "residual")
        if name in specs
    ]
    if not addends and case.out in ("f32", "i32"):
        return te.create_prim_func([a, b, total])

    def finished(*at: Expr) -> Expr:
        value = total(*at)
        for addend in addends:
            value = value + raised(addend(*at[-len(addend.shape) :]), case.out)
        return rounded(activated(value, case.epilogue, case.dtype == "i8"), case.out)

    return te.create_prim_func([a, b, *addends, te.compute(total.shape, finished, name="C")])


def target(host: Host) -> tvm.target.Target:
    """The host's target with its threads, which MetaSchedule shares the work out over."""
    return tvm.target.Target({**host.target.export(), "num-cores": host.threads})


def replayed(case: Gemm, trace: list[Any]) -> tvm.IRModule:
    """``define``'s function as a record's trace schedules it, as ``main``."""
    sch = Schedule(define(case))
    Trace.apply_json_to_schedule(trace, sch)
    return sch.mod
