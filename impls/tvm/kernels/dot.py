"""Products of few rows whose operands are both stored along K: vectors run along K, and nothing is packed.

A token or a few through a weight stored as (N, K) reads each element of B once from memory; packing it first would take
longer than the multiplications. A tile of sums is a vector of partial sums for each of its elements, added up across
lanes at the end. Owns the definition of these sums, their kernel and schedule.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule, TensorIntrin
from tvm.script import tirx as T

from impls.tvm.kernels.arithmetic import BY_NAME, Arithmetic
from impls.tvm.kernels.host import Host
from impls.workloads.gemm import Gemm

Expr = Any

# Above this many rows the packed product is the faster: packing an element of a B stored along K takes about 3.5 cycles
# (Zen 4), M / 16 of them multiply it.
_MOST_ROWS = 16
# More of a row of B at a time would not be faster, and smaller tiles wait for their own sums.
_MOST_COLUMNS = 8
_PLAN = "ridgemark.dot"
_ON_STACK = {"disable_lower_tvm_builtin": True}


@dataclass(frozen=True)
class Plan:
    """The tile: ``mr`` rows of A by ``nr`` rows of B, in vectors of ``lanes`` words, ``steps`` of them along K."""

    arithmetic: Arithmetic
    mr: int
    nr: int
    lanes: int
    steps: int
    parallel: bool

    def as_config(self) -> dict[str, Any]:
        """For a program's ``config``."""
        return {"tiling": {name: v for name, v in asdict(self).items() if name != "arithmetic"}} | {
            "instruction": self.arithmetic.name,
            "packed": False,
        }


def choose(case: Gemm, arithmetic: Arithmetic, host: Host) -> Plan | None:
    """The plan, where this is the way to compute ``case``; None where it is not."""
    unit, per_vector = host.unit, host.unit.lanes * arithmetic.group
    storable = case.dtype == "f32" or (case.dtype == "bf16" and arithmetic.group == 2)
    if case.layout != "nt" or not storable or case.m > _MOST_ROWS or case.k < 2 * per_vector:
        return None
    if case.k % per_vector:
        return None
    tiles = [
        (mr, nr)
        for mr in range(1, case.m + 1)
        for nr in range(1, _MOST_COLUMNS + 1)
        # An axis of length one would be lost before the intrinsic could match it; a single row has a kernel of its own.
        if case.m % mr == 0
        and case.n % nr == 0
        and nr > 1
        and (mr > 1 or case.m == 1)
        and mr * nr + mr + 1 < unit.registers
    ]
    if not tiles:
        return None
    # Fewest loads per multiplication, and enough sums in flight: two multiply-adds a cycle of latency 4.
    mr, nr = min(tiles, key=lambda tile: (max(8 / (tile[0] * tile[1]), 1), (tile[0] + tile[1]) / (tile[0] * tile[1])))
    parallel = host.threads > 1 and case.batch * case.n * case.k >= 1 << 15 and case.batch * case.n // nr > 1
    return Plan(arithmetic, mr, nr, unit.lanes, case.k // per_vector, parallel)


def sums(case: Gemm, a: te.Tensor, b: te.Tensor, plan: Plan) -> Callable[[Expr, Expr, Expr], Expr]:
    """The stages; a and b hold words, a batch axis before them where there is one.

    Returns (batch, row, column) -> the sum there.
    """
    lead = case.batch != 1

    def word(operand: te.Tensor, z: Expr, row: Expr, w: Expr) -> Expr:
        return operand[z, row, w] if lead else operand[row, w]

    p, div, mod = plan, tirx.floordiv, tirx.floormod
    step = te.reduce_axis((0, p.steps), name="step")
    lane = te.reduce_axis((0, p.lanes), name="lane")
    # An axis of length one would be lost before the intrinsic could match it.
    tile = (p.mr, p.nr) if p.mr > 1 else (p.nr,)

    def products(z: Expr, x: Expr, y: Expr, *at: Expr) -> Expr:
        *row, j, k = at
        i = x * p.mr + row[0] if row else x
        at_k = step * p.lanes + k
        return te.sum(p.arithmetic.multiply(word(a, z, i, at_k), word(b, z, y * p.nr + j, at_k)), axis=[step])

    partial = te.compute(
        (case.batch, case.m // p.mr, case.n // p.nr, *tile, p.lanes),
        products,
        name="partial",
        attrs={_PLAN: json.dumps(asdict(p) | {"arithmetic": p.arithmetic.name})},
    )

    def lanes(z: Expr, m: Expr, n: Expr) -> Expr:
        row = (mod(m, p.mr),) if p.mr > 1 else ()
        return te.sum(partial(z, div(m, p.mr), div(n, p.nr), *row, mod(n, p.nr), lane), axis=[lane])

    total = te.compute((case.batch, case.m, case.n), lanes, name="total")
    return lambda z, m, n: total[z, m, n]


def schedule(sch: Schedule, output: str) -> Plan:
    """Schedule the stages of ``sums`` and the block named ``output``, in place; the plan they were made by."""
    partial = sch.get_sblock("partial")
    fields = json.loads(str(sch.get(partial).annotations[_PLAN]))
    p = Plan(**{**fields, "arithmetic": BY_NAME[fields["arithmetic"]]})
    *batch, m, n = sch.get_loops(sch.get_sblock(output))
    x, i = sch.split(m, [None, p.mr])
    y, j = sch.split(n, [None, p.nr])
    sch.reorder(*batch, y, x, i, j)
    task = sch.fuse(*batch, y)
    total = sch.get_sblock("total")
    sch.compute_at(total, x, preserve_unit_loops=True)
    sch.compute_at(partial, x, preserve_unit_loops=True)
    *tile, step = sch.get_loops(partial)[-4 if p.mr > 1 else -3 :]
    sch.reorder(step, *tile)
    if p.parallel:
        sch.parallel(task)
    zeros = sch.decompose_reduction(partial, step)
    sch.vectorize(sch.get_loops(zeros)[-1])
    if p.mr > 1:
        kernel = _register(p.arithmetic, p.mr, p.nr, p.lanes, p.steps)
    else:
        kernel = _register_row(p.arithmetic, p.nr, p.lanes, p.steps)
    sch.tensorize(step, kernel)
    return p


@functools.cache
def _register(arithmetic: Arithmetic, mr: int, nr: int, lanes: int, steps: int) -> str:
    """Register the kernel with TVM; its name."""
    word, out, library = arithmetic.word, arithmetic.sum, arithmetic.library
    multiply, accumulate = arithmetic.multiply, arithmetic.accumulate
    width = steps * lanes

    @T.prim_func(s_tir=True)
    def description(
        A: T.Buffer((mr, width), word, offset_factor=1),
        B: T.Buffer((nr, width), word, offset_factor=1),
        C: T.Buffer((mr, nr, lanes), out, offset_factor=1),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0:mr, 0:nr, 0:lanes], A[0:mr, 0:width], B[0:nr, 0:width])
            T.writes(C[0:mr, 0:nr, 0:lanes])
            for s, i, j, k in T.grid(steps, mr, nr, lanes):
                with T.sblock("multiply"):
                    vi, vj, vk, vs = T.axis.remap("SSSR", [i, j, k, s])
                    C[vi, vj, vk] = C[vi, vj, vk] + multiply(A[vi, vs * lanes + vk], B[vj, vs * lanes + vk])

    @T.prim_func(s_tir=True)
    def implementation(
        A: T.Buffer((mr, width), word, offset_factor=1),
        B: T.Buffer((nr, width), word, offset_factor=1),
        C: T.Buffer((mr, nr, lanes), out, offset_factor=1),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0:mr, 0:nr, 0:lanes], A[0:mr, 0:width], B[0:nr, 0:width])
            T.writes(C[0:mr, 0:nr, 0:lanes])
            with T.attr(T.int32(0), "pragma_import_llvm", library):
                tile = T.alloc_buffer((mr * nr * lanes,), out, scope="local", annotations=_ON_STACK)
                for i in T.unroll(mr):
                    for j in T.unroll(nr):
                        tile[T.ramp((i * nr + j) * lanes, 1, lanes)] = C[i, j, T.ramp(0, 1, lanes)]
                for s in range(steps):
                    for j in T.unroll(nr):
                        for i in T.unroll(mr):
                            tile[T.ramp((i * nr + j) * lanes, 1, lanes)] = accumulate(
                                tile[T.ramp((i * nr + j) * lanes, 1, lanes)],
                                A[i, T.ramp(s * lanes, 1, lanes)],
                                B[j, T.ramp(s * lanes, 1, lanes)],
                            )
                for i in T.unroll(mr):
                    for j in T.unroll(nr):
                        C[i, j, T.ramp(0, 1, lanes)] = tile[T.ramp((i * nr + j) * lanes, 1, lanes)]

    name = f"ridgemark.dot.{arithmetic.name}.{mr}x{nr}x{lanes}.{steps}"
    TensorIntrin.register(name, description, implementation)
    return name


@functools.cache
def _register_row(arithmetic: Arithmetic, nr: int, lanes: int, steps: int) -> str:
    """The kernel of a single row, whose axis TVM drops."""
    word, out, library = arithmetic.word, arithmetic.sum, arithmetic.library
    multiply, accumulate = arithmetic.multiply, arithmetic.accumulate
    width = steps * lanes

    @T.prim_func(s_tir=True)
    def description(
        A: T.Buffer((width,), word, offset_factor=1),
        B: T.Buffer((nr, width), word, offset_factor=1),
        C: T.Buffer((nr, lanes), out, offset_factor=1),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0:nr, 0:lanes], A[0:width], B[0:nr, 0:width])
            T.writes(C[0:nr, 0:lanes])
            for s, j, k in T.grid(steps, nr, lanes):
                with T.sblock("multiply"):
                    vj, vk, vs = T.axis.remap("SSR", [j, k, s])
                    C[vj, vk] = C[vj, vk] + multiply(A[vs * lanes + vk], B[vj, vs * lanes + vk])

    @T.prim_func(s_tir=True)
    def implementation(
        A: T.Buffer((width,), word, offset_factor=1),
        B: T.Buffer((nr, width), word, offset_factor=1),
        C: T.Buffer((nr, lanes), out, offset_factor=1),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0:nr, 0:lanes], A[0:width], B[0:nr, 0:width])
            T.writes(C[0:nr, 0:lanes])
            with T.attr(T.int32(0), "pragma_import_llvm", library):
                tile = T.alloc_buffer((nr * lanes,), out, scope="local", annotations=_ON_STACK)
                for j in T.unroll(nr):
                    tile[T.ramp(j * lanes, 1, lanes)] = C[j, T.ramp(0, 1, lanes)]
                for s in range(steps):
                    for j in T.unroll(nr):
                        tile[T.ramp(j * lanes, 1, lanes)] = accumulate(
                            tile[T.ramp(j * lanes, 1, lanes)],
                            A[T.ramp(s * lanes, 1, lanes)],
                            B[j, T.ramp(s * lanes, 1, lanes)],
                        )
                for j in T.unroll(nr):
                    C[j, T.ramp(0, 1, lanes)] = tile[T.ramp(j * lanes, 1, lanes)]

    name = f"ridgemark.dot.{arithmetic.name}.{nr}x{lanes}.{steps}"
    TensorIntrin.register(name, description, implementation)
    return name
