"""A GEMM on an NVIDIA GPU in plain torch: which of torch's products takes which case, and what none takes.

Owns the choice of operator (``mm``, ``bmm``, ``_scaled_mm``, ``_int_mm``, ``_grouped_mm``) and what precedes and
follows it. What Inductor makes of it is capture's to say. It imports torch inside functions only.

torch multiplies f8 with scales: both are one here, a tensor that every call is given. f8 with a scale per matrix runs
cuBLASLt's kernels, promoted or fast as ``use_fast_accum`` says. Grouped bf16 is one call that reads the group sizes on
the device; groups that its kernel cannot align, and other dtypes, are one product each, with sizes compiled in.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

if TYPE_CHECKING:
    import torch

# torch._int_mm on CUDA: more than 16 rows of A, K and N multiples of 8 (aten/src/ATen/native/cuda/Blas.cpp, 2.11).
_INT_ROWS, _INT_MULTIPLE = 17, 8
# TMA, by which the grouped kernel reads its operands, wants strides of whole 16 bytes.
_TMA_BYTES = 16


def refusal(case: Gemm) -> str | None:
    """Why torch has no product for ``case`` on a GPU, one sentence; None where it has."""
    if case.acc == "f16":
        return "torch's compiled products accumulate f16 in f32: ask for the default accumulation."
    if case.dtype == "f8e4m3":
        if case.layout != "nt":
            return "torch._scaled_mm takes f8 with both operands K-major only: ask for layout nt."
        if case.k % 16 or case.n % 16:
            return "torch._scaled_mm takes f8 where K and N are multiples of 16."
        if case.batch > 1:
            return "torch has no batched product of f8."
        if case.groups is not None:
            return "torch's grouped product of f8 wants a scale for every row, which is another case."
    if case.dtype == "i8":
        if case.batch > 1:
            return "torch has no batched product of i8."
        rows = min((g for g in case.groups if g), default=_INT_ROWS) if case.groups else case.m
        if rows < _INT_ROWS or case.k % _INT_MULTIPLE or case.n % _INT_MULTIPLE:
            return "torch._int_mm takes more than 16 rows on a GPU, and K and N that are multiples of 8."
    return None


def grouped_in_one_call(case: Gemm) -> bool:
    """Whether ``torch._grouped_mm`` takes this grouped case: bf16 in and out, rows of whole 16 bytes."""
    aligned = all(size * dtype(case.dtype).bytes % _TMA_BYTES == 0 for size in (case.k, case.n))
    return case.groups is not None and case.dtype == case.out == "bf16" and aligned


def computation(case: Gemm) -> Callable[..., torch.Tensor]:
    """C from A, B, the bias, residual or group sizes where the case has them, and for f8 a scale of one."""
    import torch

    from impls.support.torch_arrays import torch_dtype

    out, epilogue = torch_dtype(case.out), case.epilogue
    a_transposed, b_transposed = (stored == "t" for stored in case.layout)
    if case.dtype == "f8e4m3":
        fast = case.acc == "fast"

        def scaled(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            *addends, one = rest
            c = torch._scaled_mm(a, b.mT, one, one, out_dtype=out, use_fast_accum=fast)
            return _finished(c, addends, epilogue)

        return scaled
    if case.groups is not None:
        return _grouped(case, b_transposed)
    if case.dtype == "i8":

        def whole(a: torch.Tensor, b: torch.Tensor, *addends: torch.Tensor) -> torch.Tensor:
            c = torch._int_mm(a.mT if a_transposed else a, b.mT if b_transposed else b)
            return _finished(c, addends, epilogue)

        return whole
    bare, added = (torch.bmm, torch.baddbmm) if case.batch > 1 else (torch.mm, torch.addmm)
    wide = case.out != case.dtype and case.dtype != "tf32"

    def product(a: torch.Tensor, b: torch.Tensor, *addends: torch.Tensor) -> torch.Tensor:
        a, b = a.mT if a_transposed else a, b.mT if b_transposed else b
        if wide:
            return _finished(bare(a, b, out_dtype=out), addends, epilogue)
        if addends:
            # The library's own bias where it has one: Inductor takes it apart where an activation follows.
            return _activated(added(addends[0], a, b), epilogue)
        return bare(a, b)

    return product


def _grouped(case: Gemm, b_transposed: bool) -> Callable[..., torch.Tensor]:
    import torch

    from impls.support.torch_arrays import torch_dtype

    if grouped_in_one_call(case):

        def one_call(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            ends = torch.cumsum(sizes, 0, dtype=torch.int32)
            return torch._grouped_mm(a, b.mT if b_transposed else b, offs=ends)

        return one_call
    assert case.groups is not None
    ends = enumerate(zip(case.groups, accumulate(case.groups), strict=True))
    parts = [(g, stop - rows, stop) for g, (rows, stop) in ends if rows]
    integer, out, wide = case.dtype == "i8", torch_dtype(case.out), case.out != case.dtype and case.dtype != "tf32"

    def each(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        products = []
        for g, start, stop in parts:
            x, y = a[start:stop], b[g].mT if b_transposed else b[g]
            if integer:
                products.append(torch._int_mm(x, y))
            else:
                products.append(torch.mm(x, y, out_dtype=out) if wide else torch.mm(x, y))
        return torch.cat(products)

    return each


def _finished(c: torch.Tensor, addends: tuple[torch.Tensor, ...] | list[torch.Tensor], epilogue: str) -> torch.Tensor:
    """C with its bias or residual and its activation."""
    for addend in addends:
        c = c + addend
    return _activated(c, epilogue)


def _activated(c: torch.Tensor, epilogue: str) -> torch.Tensor:
    import torch

    if epilogue == "bias+relu":
        return torch.relu(c)
    if epilogue == "bias+gelu":
        return torch.nn.functional.gelu(c, approximate="tanh")
    return c
