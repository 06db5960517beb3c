"""From a case, its tensors and a choice of tile to the launches of one call."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from impls.triton.choices import Tile
from impls.triton.kernels import gemm_grouped, gemm_pointer, gemm_tma
from impls.triton.kernels.gemm_transpose import k_major
from impls.triton.kernels.program import Launch, Tensors, Work, multiprocessors
from impls.workloads.gemm import Gemm

# How ``gemm_tile.step`` multiplies, by input dtype and accumulation.
PRECISION = {
    ("f32", "f32"): "ieee",
    ("tf32", "f32"): "tf32",
    ("f16", "f32"): "f32",
    ("f16", "f16"): "f16",
    ("bf16", "f32"): "f32",
    ("f8e4m3", "f32"): "promoted",
    ("f8e4m3", "fast"): "f32",
    ("i8", "i32"): "i32",
}


def work(variant: str, case: Gemm, tile: Tile, tensors: Tensors) -> Work:
    """The launches of ``variant``: ``tiled``, ``persistent``, ``split_k``, ``persistent_tma``, ``persistent_tma_ws`` or
    ``grouped``."""
    if variant == "grouped":
        return _grouped(case, tile, tensors)
    if variant.startswith("persistent_tma"):
        return _by_descriptors(variant, case, tile, tensors)
    return _by_pointers(variant, case, tile, tensors)


def _addend(tensors: Tensors) -> torch.Tensor:
    """Bias or residual; where there is none any pointer, which is not followed."""
    return tensors.get("bias", tensors.get("residual", tensors["C"]))


def _common(case: Gemm, tile: Tile) -> dict[str, Any]:
    """Constants that every kernel has."""
    return {
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "GROUP": tile.group,
        "WHOLE": case.m % tile.bm == 0 and case.n % tile.bn == 0,
        "WIDE": max(case.m * case.k, case.n * case.k, case.m * case.n) >= 2**31,
        "PRECISION": PRECISION[case.dtype, case.acc],
        "EPILOGUE": case.epilogue,
    }


def _in_units(**sizes: int) -> dict[str, int]:
    """Each size over the largest power of two up to 16 that divides it, and that power: ``n`` and ``UN``."""
    units = {name: math.gcd(16, size) for name, size in sizes.items()}
    return {n: sizes[n] // unit for n, unit in units.items()} | {f"U{n.upper()}": unit for n, unit in units.items()}


def _transposed(case: Gemm) -> dict[str, bool]:
    """How A and B are stored."""
    return {"A_TRANSPOSED": case.layout[0] == "t", "B_TRANSPOSED": case.layout[1] == "t"}


def _programs(tile: Tile, tiles: int) -> tuple[int]:
    return (min(tiles, multiprocessors() * tile.per_sm),)


def _by_pointers(variant: str, case: Gemm, tile: Tile, tensors: Tensors) -> Work:
    tiles = case.batch * triton.cdiv(case.m, tile.bm) * triton.cdiv(case.n, tile.bn)
    arguments = {
        "a": tensors["A"],
        "b": tensors["B"],
        "c": tensors["C"],
        "addend": _addend(tensors),
        **_in_units(m=case.m, n=case.n, k=case.k),
        **_transposed(case),
        **_common(case, tile),
        "WHOLE_K": case.k % (tile.bk * tile.split) == 0,
    }
    grid: tuple[int, ...] = (tiles,)
    if variant == "persistent":
        arguments |= {"batches": case.batch, "FLATTEN": tile.flatten}
        grid = _programs(tile, tiles)
    elif variant == "split_k":
        # One program has nothing to leave to others.
        parts = tile.split if tile.split > 1 else 0
        kind = {"i32": torch.int32, "f16": torch.float16}.get(case.acc, torch.float32)
        where = tensors["C"].device
        arguments["partial"] = torch.empty(max(1, tiles * parts * tile.bm * tile.bn), dtype=kind, device=where)
        arguments["arrived"] = torch.zeros(tiles, dtype=torch.int32, device=where)
        arguments |= {"SPLIT": tile.split, "TMA": tile.tma}
        if tile.tma:
            arguments |= _operands(case, tile, tensors, stacked=True)
        grid = (tiles * tile.split,)
    return Work([Launch(getattr(gemm_pointer, variant), grid, arguments, tile.options())])


def _described(tensor: torch.Tensor, rows: int, columns: int, stacked: bool) -> TensorDescriptor:
    """A descriptor of a matrix, or of a batch of them, with tiles of rows x columns."""
    height, width = tensor.shape[-2:]
    if stacked:
        return TensorDescriptor.from_tensor(tensor.view(-1, width), [rows, columns])
    return TensorDescriptor.from_tensor(tensor.view(-1, height, width), [1, rows, columns])


def _operands(case: Gemm, tile: Tile, tensors: Tensors, stacked: bool) -> dict[str, TensorDescriptor]:
    """A and B, as they are stored, with the tiles that a step takes."""
    rows = tile.bm // (1 + tile.pair)
    a_tile = (rows, tile.bk) if case.layout[0] == "n" else (tile.bk, rows)
    b_tile = (tile.bk, tile.bn) if case.layout[1] == "n" else (tile.bn, tile.bk)
    return {"a": _described(tensors["A"], *a_tile, stacked), "b": _described(tensors["B"], *b_tile, stacked)}


def stacks(case: Gemm, tile: Tile) -> bool:
    """Whether no tile of C, and no step along K, reaches from one matrix of a batch into the next."""
    return case.batch == 1 or (case.m % tile.bm == 0 and case.k % tile.bk == 0)


def _by_descriptors(variant: str, case: Gemm, tile: Tile, tensors: Tensors) -> Work:
    case, tensors, before = k_major(case, tensors)
    tiles = case.batch * triton.cdiv(case.m, tile.bm) * triton.cdiv(case.n, tile.bn)
    arguments = {
        "a": tensors["A"],
        "b": tensors["B"],
        "c": tensors["C"],
        "addend": _addend(tensors),
        "batches": case.batch,
        "m": case.m,
        "n": case.n,
        "k": case.k,
        **_common(case, tile),
        **_transposed(case),
    }
    kernel = getattr(gemm_tma, variant)
    if variant == "persistent_tma":
        stacked = stacks(case, tile)
        arguments |= {
            **_operands(case, tile, tensors, stacked),
            "c": _described(tensors["C"], tile.bm // (1 + tile.pair), tile.bn // (1 + tile.halves), stacked),
            "FLATTEN": tile.flatten,
            "STACKED": stacked,
        }
        if tile.defer:
            kernel = gemm_tma.persistent_tma_deferred
        else:
            arguments |= {"HALVES": tile.halves, "PAIR": tile.pair}
    return Work([*before, Launch(kernel, _programs(tile, tiles), arguments, tile.options())])


def _grouped(case: Gemm, tile: Tile, tensors: Tensors) -> Work:
    assert case.groups is not None
    transposed = case.layout[1] == "t"
    a, b = tensors["A"], tensors["B"]
    if tile.tma:
        a = _described(a, tile.bm, tile.bk, stacked=True)
        b = _described(b, *((tile.bn, tile.bk) if transposed else (tile.bk, tile.bn)), stacked=False)
    constants = _common(case, tile)
    del constants["EPILOGUE"]
    # As many tiles as there could be: how long the groups are the device knows.
    most = (triton.cdiv(case.m, tile.bm) + len(case.groups)) * triton.cdiv(case.n, tile.bn)
    arguments = {
        "a": a,
        "b": b,
        "c": tensors["C"],
        "sizes": tensors["group_sizes"],
        **_in_units(n=case.n, k=case.k),
        "GROUPS": len(case.groups),
        "LANES": triton.next_power_of_2(len(case.groups)),
        **constants,
        "FLATTEN": tile.flatten,
        "WHOLE_K": case.k % tile.bk == 0,
        "TMA": tile.tma,
        "B_TRANSPOSED": transposed,
    }
    return Work([Launch(gemm_grouped.grouped, _programs(tile, most), arguments, tile.options())])
