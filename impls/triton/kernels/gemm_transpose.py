"""Operands of tf32 laid out along K beforehand: wgmma takes those of 32 bits in no other way.

Owns the kernel that transposes, and the case that is left to multiply. Within a product's own kernel an operand would
go through registers at every step: five times the product's time at 8192^3 on an H200.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from impls.triton.kernels.program import Launch, Tensors
from impls.workloads.gemm import Gemm

_TILE = 64


@triton.jit
def transpose(source, target, rows, columns, TILE: tl.constexpr):
    """Each matrix of ``source``, (batch, rows, columns), into ``target``, (batch, columns, rows): a tile a program."""
    across = tl.cdiv(columns, TILE)
    each = tl.cdiv(rows, TILE) * across
    matrix = (tl.program_id(0) // each).to(tl.int64) * rows * columns
    tile = tl.program_id(0) % each
    row = tile // across * TILE + tl.arange(0, TILE).to(tl.int64)
    column = tile % across * TILE + tl.arange(0, TILE).to(tl.int64)
    within = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(source + matrix + row[:, None] * columns + column[None, :], mask=within)
    tl.store(target + matrix + column[:, None] * rows + row[None, :], values.T, mask=within.T)


def k_major(case: Gemm, tensors: Tensors) -> tuple[Gemm, Tensors, list[Launch]]:
    """The case with both operands K-major, its tensors, and what has to run before: nothing but for tf32."""
    launches = []
    if case.dtype == "tf32":
        tensors = dict(tensors)
        for name, stored, wanted in zip("AB", case.layout, "nt", strict=True):
            if stored != wanted:
                source = tensors[name]
                *_, rows, columns = source.shape
                target = torch.empty((*source.shape[:-2], columns, rows), dtype=source.dtype, device=source.device)
                tiles = case.batch * triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE)
                arguments = {"source": source, "target": target, "rows": rows, "columns": columns, "TILE": _TILE}
                launches.append(Launch(transpose, (tiles,), arguments, {"num_warps": 4}))
                tensors[name] = target
        case = replace(case, layout="nt")
    return case, tensors, launches
