"""The register-blocked kernel: a tile of C grows by the product of a panel of A and a panel of B.

Registered with TVM as a tensor intrinsic: a description of what is computed, which the schedule's loops must match, and
the implementation that takes their place. The implementation keeps the tile in a local array that is only ever indexed
by constants, so that LLVM keeps it in registers.
"""

from __future__ import annotations

import functools

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from impls.tvm.kernels.arithmetic import Arithmetic

# Lets a local array beyond 1 KiB stay on the stack, whence LLVM moves it into registers.
_ON_STACK = {"disable_lower_tvm_builtin": True}


@functools.cache
def register(arithmetic: Arithmetic, mr: int, nv: int, lanes: int, kc: int, unroll: int) -> str:
    """Register the kernel of one tile shape with TVM; its name.

    Args:
        arithmetic: how words multiply.
        mr, nv, lanes: the tile has ``mr`` rows of ``nv`` vectors.
        kc: words of K in the panels.
        unroll: words of K per iteration; divides kc.
    """
    nr = nv * lanes
    word, total, library = arithmetic.word, arithmetic.sum, arithmetic.library
    multiply, accumulate = arithmetic.multiply, arithmetic.accumulate

    @T.prim_func(s_tir=True)
    def description(
        A: T.Buffer((kc, mr), word, offset_factor=1),
        B: T.Buffer((kc, nr), word, offset_factor=1),
        C: T.Buffer((mr, nr), total, offset_factor=1),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0:mr, 0:nr], A[0:kc, 0:mr], B[0:kc, 0:nr])
            T.writes(C[0:mr, 0:nr])
            for k, i, j in T.grid(kc, mr, nr):
                with T.sblock("multiply"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    C[vi, vj] = C[vi, vj] + multiply(A[vk, vi], B[vk, vj])

    @T.prim_func(s_tir=True)
    def implementation(
        A: T.Buffer((kc, mr), word, offset_factor=1),
        B: T.Buffer((kc, nr), word, offset_factor=1),
        C: T.Buffer((mr, nr), total, offset_factor=1),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0:mr, 0:nr], A[0:kc, 0:mr], B[0:kc, 0:nr])
            T.writes(C[0:mr, 0:nr])
            with T.attr(T.int32(0), "pragma_import_llvm", library):
                tile = T.alloc_buffer((mr * nr,), total, scope="local", annotations=_ON_STACK)
                for i in T.unroll(mr):
                    for j in T.unroll(nv):
                        tile[T.ramp(i * nr + j * lanes, 1, lanes)] = C[i, T.ramp(j * lanes, 1, lanes)]
                for k in range(kc // unroll):
                    for u in T.unroll(unroll):
                        for i in T.unroll(mr):
                            for j in T.unroll(nv):
                                tile[T.ramp(i * nr + j * lanes, 1, lanes)] = accumulate(
                                    tile[T.ramp(i * nr + j * lanes, 1, lanes)],
                                    T.broadcast(A[k * unroll + u, i], lanes),
                                    B[k * unroll + u, T.ramp(j * lanes, 1, lanes)],
                                )
                for i in T.unroll(mr):
                    for j in T.unroll(nv):
                        C[i, T.ramp(j * lanes, 1, lanes)] = tile[T.ramp(i * nr + j * lanes, 1, lanes)]

    name = f"ridgemark.{arithmetic.name}.{mr}x{nv}x{lanes}.{kc}.{unroll}"
    TensorIntrin.register(name, description, implementation)
    return name
