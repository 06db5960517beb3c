"""The Relax pipeline: TVM's own for CPUs, with matmul, softmax and GELU lowered our way and schedules after fusion.

TVM leaves a matmul on a CPU as three nested loops (0.3 GFLOP/s). Here ``relax.matmul`` becomes the packed product, to
which FuseOps may join the elementwise work that follows; FuseTIR makes one function of both, and a rule in the manner
of TVM's dlight schedules it. TVM's exp and tanh call libm element by element; softmax and GELU take the polynomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.s_tir import Schedule, dlight

from impls.tvm import tiling
from impls.tvm.kernels import arithmetic, elements, product
from impls.tvm.kernels.host import Host
from impls.tvm.kernels.product import Operand, Shape

Expr = Any

# TVM's OpPatternKind (relax/op_attr_types.h): elementwise work after it may be fused.
_OUT_FUSABLE = 4
# Workloads' dtypes by TVM's.
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "float8_e4m3fn": "f8e4m3"}


def compile_module(module: tvm.IRModule, host: Host) -> tuple[tvm.IRModule, tvm.runtime.Executable]:
    """Fuse, schedule and compile a Relax module.

    Returns:
        The module as it was handed to the code generator, and the executable.
    """
    with host.target:
        scheduled = tvm.transform.Sequential(
            [
                # A product looks through the transpose that it reads: those come last.
                relax.transform.LegalizeOps(_lowerings(host), skip_ops=["relax.permute_dims"]),
                relax.transform.LegalizeOps(),
                relax.transform.DeadCodeElimination(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FoldConstant(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                dlight.ApplyDefaultSchedule(ProductRule(), SoftmaxRule(host), ElementwiseRule(host)),
            ]
        )(module)
        return scheduled, tvm.compile(scheduled, target=host.target)


def kernels(scheduled: tvm.IRModule) -> list[str]:
    """Names of the functions that fusion left, as they are called: one pass over memory each."""
    return sorted(str(name.name_hint) for name, f in scheduled.functions.items() if isinstance(f, tirx.PrimFunc))


def _lowerings(host: Host) -> dict[str, Callable[[relax.BlockBuilder, relax.Call], relax.Expr]]:
    return {
        "relax.matmul": lambda builder, call: _matmul(builder, call, host),
        "relax.nn.softmax": lambda builder, call: _softmax(builder, call, host),
        "relax.nn.gelu_tanh": lambda builder, call: builder.call_te(_gelu, call.args[0], primfunc_name_hint="gelu"),
    }


def _shape(expr: relax.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in expr.ty.shape.values)


def _matmul(builder: relax.BlockBuilder, call: relax.Call, host: Host) -> relax.Expr:
    """The packed product, reading a transposed operand where it lies."""
    (x, x_transposed), (y, y_transposed) = (_untransposed(builder, arg) for arg in call.args)
    (*lead, m, k), n = _shape(call.args[0]), _shape(call.args[1])[-1]
    if tuple(lead) != _shape(call.args[1])[:-2]:
        raise NotImplementedError("The operands of a matmul have different batch axes here: broadcast them first.")
    batch, dtype, out = math.prod(lead), _DTYPES[str(call.args[0].ty.dtype)], str(call.ty.dtype)
    how = arithmetic.choose(dtype, host)
    blocks = tiling.choose(
        m, n, -(-k // how.group), batch=batch, threads=host.threads, unit=how.unit(host.unit), l2_bytes=host.l2_bytes,
        whole_k=how.offset != 0,
    )  # fmt: skip

    def packed(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        def reader(operand: te.Tensor, k_last: bool) -> Callable[[Expr, Expr, Expr], Expr]:
            def read(z: Expr, at: Expr, w: Expr) -> Expr:
                value = operand(*_unfused(z, lead), *((at, w) if k_last else (w, at)))
                return elements.raised_native(value, dtype)

            return read

        total = product.sums(
            Shape(batch, m, n, k),
            Operand(reader(a, not x_transposed), not x_transposed),
            Operand(reader(b, y_transposed), y_transposed),
            how,
            blocks,
        )

        def finished(*at: Expr) -> Expr:
            *outer, i, j = at
            value = total(_fused(outer, lead), i, j)
            return value if out == how.sum else tirx.Cast(out, value)

        return te.compute((*lead, m, n), finished, name="matmul")

    return builder.call_te(packed, x, y, primfunc_name_hint="matmul", primfunc_attrs={"op_pattern": _OUT_FUSABLE})


def _untransposed(builder: relax.BlockBuilder, operand: relax.Expr) -> tuple[relax.Expr, bool]:
    """The tensor that ``operand`` is, or is the transpose of (last two axes); and which."""
    bound = builder.lookup_binding(operand) if isinstance(operand, relax.Var) else None
    if isinstance(bound, relax.Call) and bound.op == tvm.ir.Op.get("relax.permute_dims"):
        rank = len(_shape(operand))
        axes = bound.attrs.axes  # None reverses them all
        order = list(reversed(range(rank))) if axes is None else [int(axis) for axis in axes]
        if order == [*range(rank - 2), rank - 1, rank - 2]:
            return bound.args[0], True
    return operand, False


def _fused(axes: Sequence[Expr], extents: Sequence[int]) -> Expr:
    fused: Expr = 0
    for axis, extent in zip(axes, extents, strict=True):
        fused = fused * extent + axis
    return fused


def _unfused(index: Expr, extents: Sequence[int]) -> list[Expr]:
    axes: list[Expr] = []
    for extent in reversed(extents):
        axes.insert(0, tirx.floormod(index, extent))
        index = tirx.floordiv(index, extent)
    return axes


def _gelu(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda *at: elements.gelu(x(*at)), name="gelu")


def _softmax(builder: relax.BlockBuilder, call: relax.Call, host: Host) -> relax.Expr:
    """Softmax over the last axis of an f32 tensor, its reductions first lane by lane, then across lanes."""
    *lead, width = _shape(call.args[0])
    assert int(call.attrs.axis) in (-1, len(lead))
    lanes = host.unit.lanes
    chunks = -(-width // lanes)
    low = tirx.min_value("float32")

    def rows(x: te.Tensor) -> te.Tensor:
        def inside(j: Expr, value: Expr, otherwise: Expr) -> Expr:
            return value if width % lanes == 0 else tirx.if_then_else(j < width, value, otherwise)

        chunk, lane = te.reduce_axis((0, chunks), "chunk"), te.reduce_axis((0, lanes), "lane")
        peaks = te.compute(
            (*lead, lanes),
            lambda *at: te.max(inside(chunk * lanes + at[-1], x(*at[:-1], chunk * lanes + at[-1]), low), axis=chunk),
            name="lane_peaks",
        )
        peak = te.compute(lead, lambda *at: te.max(peaks(*at, lane), axis=lane), name="peak")
        powers = te.compute(
            (*lead, chunks * lanes),
            lambda *at: inside(at[-1], elements.exp(x(*at) - peak(*at[:-1])), tirx.const(0.0, "float32")),
            name="powers",
        )
        chunk, lane = te.reduce_axis((0, chunks), "chunk"), te.reduce_axis((0, lanes), "lane")
        totals = te.compute(
            (*lead, lanes), lambda *at: te.sum(powers(*at[:-1], chunk * lanes + at[-1]), axis=chunk), name="lane_totals"
        )
        total = te.compute(lead, lambda *at: te.sum(totals(*at, lane), axis=lane), name="total")
        inverse = te.compute(lead, lambda *at: tirx.const(1.0, "float32") / total(*at), name="inverse")
        return te.compute((*lead, width), lambda *at: powers(*at) * inverse(*at[:-1]), name="softmax")

    return builder.call_te(
        rows, call.args[0], primfunc_name_hint="softmax", primfunc_attrs={"op_pattern": _OUT_FUSABLE}
    )


def _blocks(sch: Schedule) -> list[Any]:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _names(sch: Schedule) -> list[str]:
    return [str(sch.get(block).name_hint) for block in _blocks(sch)]


def _inline_after(sch: Schedule, name: str) -> str:
    """Inline block ``name`` and those after it into the last; its name."""
    names = _names(sch)
    for inner in names[names.index(name) : -1]:
        sch.compute_inline(sch.get_sblock(inner))
    return names[-1]


class ProductRule(dlight.ScheduleRule):
    """The packed product with whatever elementwise work was fused after it."""

    def apply(self, func: tirx.PrimFunc, target: tvm.target.Target, tunable: bool) -> Schedule | None:
        """None where ``func`` holds no product."""
        sch = Schedule(func)
        if "tiles" not in _names(sch):
            return None
        product.schedule(sch, _inline_after(sch, "matmul"))
        return sch


class SoftmaxRule(dlight.ScheduleRule):
    """Softmax: a task per group of rows, all stages of a row while it is in the cache, vectors along it."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def apply(self, func: tirx.PrimFunc, target: tvm.target.Target, tunable: bool) -> Schedule | None:
        """None where ``func`` is no softmax."""
        sch = Schedule(func)
        if "lane_peaks" not in _names(sch):
            return None
        last = sch.get_sblock(_inline_after(sch, "softmax"))
        *outer, across = sch.get_loops(last)
        row = sch.fuse(*outer) if len(outer) > 1 else outer[0]
        if self._host.threads > 1:
            sch.parallel(row)
        stages = ("inverse", "total", "lane_totals", "powers", "peak", "lane_peaks")
        for name in stages:
            sch.compute_at(sch.get_sblock(name), row, preserve_unit_loops=True)
        lanes = self._host.unit.lanes
        for loop in (across, sch.get_loops(sch.get_sblock("powers"))[-1]):
            sch.vectorize(sch.split(loop, [None, lanes])[1])
        for name in ("lane_peaks", "lane_totals"):
            block = sch.get_sblock(name)
            lane, chunk = sch.get_loops(block)[-2:]
            sch.reorder(chunk, lane)
            sch.vectorize(lane)
            start = sch.decompose_reduction(block, chunk)
            sch.vectorize(sch.get_loops(start)[-1])
        return sch


class ElementwiseRule(dlight.ScheduleRule):
    """Whatever computes each element by itself: threads over the outer axes, vectors along the last."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def apply(self, func: tirx.PrimFunc, target: tvm.target.Target, tunable: bool) -> Schedule | None:
        """None where a block reduces."""
        sch = Schedule(func)
        blocks = _blocks(sch)
        if not all(all(axis.iter_type == tirx.IterVar.DataPar for axis in sch.get(b).iter_vars) for b in blocks):
            return None
        last = sch.get_sblock(_inline_after(sch, _names(sch)[0]))
        loops = sch.get_loops(last)
        if not loops:  # a single element
            return sch
        *outer, inner = loops
        if not outer:
            first, inner = sch.split(inner, [None, self._host.unit.lanes])
            outer = [first]
        task = sch.fuse(*outer) if len(outer) > 1 else outer[0]
        if self._host.threads > 1:
            sch.parallel(task)
        sch.vectorize(sch.split(inner, [None, self._host.unit.lanes])[1])
        return sch
