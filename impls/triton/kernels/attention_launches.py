"""What a call of an attention case launches: kernels bound to tensors.

Owns grids, arguments, descriptors, residuals and scratch memory. It does not own tiles (``attention_tiles``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from impls.triton.attention_tiles import Tiles, packed, padded_head, shares
from impls.triton.kernels import attention_backward as kernels
from impls.triton.kernels import attention_decode as decode_kernels
from impls.triton.kernels import attention_forward as forward_kernels
from impls.triton.kernels.program import Launch, Tensors, Work
from impls.workloads.attention import Attention

# How tl.dot multiplies f32: three products of tf32 parts, or one where the case asks for tf32. 16-bit types ignore it.
_PRECISION = {"f32": "tf32x3", "tf32": "tf32", "f16": "ieee", "bf16": "ieee"}
_DELTA_ROWS, _SHARES_AT_A_TIME = 32, 32


def flash(case: Attention, tiles: dict[str, Tiles], tensors: Tensors) -> Work:
    """Loads through pointers."""
    if case.direction == "fwd":
        return Work([_forward(case, tiles["forward"], tensors, tensors["O"], None)])
    o, lse, delta = _residuals(case, tensors)
    pointers = {f"{name.lower()}_ptr": tensors[name] for name in ("Q", "K", "V", "dO")}
    common = _gradients_of(case) | pointers | {"lse_ptr": lse, "delta_ptr": delta, "lse_row": lse.shape[2]}
    launches = [
        _delta(case, tensors, o, delta),
        _by_keys(case, kernels.backward_kv, tiles["backward_kv"], common | _outputs(tensors, "dK", "dV")),
        _by_queries(case, kernels.backward_q, tiles["backward_q"], common | _outputs(tensors, "dQ")),
    ]
    return _work(case, _forward(case, tiles["forward"], tensors, o, lse), launches)


def flash_tma(case: Attention, tiles: dict[str, Tiles], tensors: Tensors) -> Work:
    """Loads through descriptors."""
    if case.direction == "fwd":
        return Work([_forward_tma(case, tiles["forward_tma"], tensors, tensors["O"], None)])
    o, lse, delta = _residuals(case, tensors)
    by_keys, by_queries = tiles["backward_kv_tma"], tiles["backward_q_tma"]
    rows = {
        f"{name}_desc": TensorDescriptor(
            tensor, [case.batch * case.hq, case.sq], [tensor.shape[2], 1], [1, by_keys.block_m]
        )
        for name, tensor in (("lse", lse), ("delta", delta))
    }
    pointers = {"lse_ptr": lse, "delta_ptr": delta, "lse_row": lse.shape[2]}
    common = _gradients_of(case)
    launches = [
        _delta(case, tensors, o, delta),
        _by_keys(
            case,
            kernels.backward_kv_tma,
            by_keys,
            common | _boxes(tensors, by_keys) | rows | _outputs(tensors, "dK", "dV"),
        ),
        _by_queries(
            case,
            kernels.backward_q_tma,
            by_queries,
            common | _boxes(tensors, by_queries) | pointers | _outputs(tensors, "dQ"),
        ),
    ]
    return _work(case, _forward_tma(case, tiles["forward_tma"], tensors, o, lse), launches)


def decode(case: Attention, tiles: dict[str, Tiles], tensors: Tensors) -> Work:
    """Shares of the keys, then their sum."""
    tile = tiles["decode"]
    count = shares(case, tile.block_n)
    if count == 1:
        return Work([_forward(case, tile, tensors, tensors["O"], None, kernel="decode")])
    like = {"dtype": torch.float32, "device": tensors["O"].device}
    parts = torch.empty((count, *tensors["O"].shape), **like)
    lse = torch.empty((count, case.batch, case.hq, case.sq), **like)
    rows = case.batch * case.sq * case.hq
    combine = Launch(
        decode_kernels.combine,
        (rows,),
        {
            "part_ptr": parts,
            "lse_ptr": lse,
            "o_ptr": tensors["O"],
            "rows": rows,
            "hq": case.hq,
            "sq": case.sq,
            "shares": count,
            "D": case.d,
            "BLOCK_D": padded_head(case.d),
            "BLOCK_SHARES": _SHARES_AT_A_TIME,
        },
        {"num_warps": 4},
    )
    return Work([_forward(case, tile, tensors, parts, lse, kernel="decode", count=count), combine])


def _forward(
    case: Attention,
    tile: Tiles,
    tensors: Tensors,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    kernel: str = "forward",
    count: int = 1,
) -> Launch:
    pack = case.group if packed(kernel, case) else 1
    blocks = -(-case.sk // tile.block_n)
    arguments = {
        "q_ptr": tensors["Q"],
        "k_ptr": tensors["K"],
        "v_ptr": tensors["V"],
        "o_ptr": o,
        "lse_ptr": lse,
        "lse_row": case.sq if lse is None else lse.shape[-1],
        "batch": case.batch,
        "share": -(-blocks // count) * tile.block_n,
        "D": case.d,
        "BLOCK_D": padded_head(case.d),
        "PACK": pack,
        "SPLIT": count > 1,
        "KEEP_LSE": lse is not None,
    }
    row_tiles = -(-case.sq * pack // tile.block_m)
    return Launch(
        forward_kernels.forward,
        (row_tiles * (case.hq // pack) * case.batch * count,),
        arguments | _problem(case) | _blocks(tile),
        _options(tile),
    )


def _forward_tma(case: Attention, tile: Tiles, tensors: Tensors, o: torch.Tensor, lse: torch.Tensor | None) -> Launch:
    arguments = {
        "q_desc": _descriptor(tensors["Q"], tile.block_m),
        "k_desc": _descriptor(tensors["K"], tile.block_n),
        "v_desc": _descriptor(tensors["V"], tile.block_n),
        "o_ptr": o,
        "lse_ptr": lse,
        "lse_row": case.sq if lse is None else lse.shape[-1],
        "D": case.d,
        "BLOCK_D": padded_head(case.d),
        "KEEP_LSE": lse is not None,
    }
    return Launch(
        forward_kernels.forward_tma,
        (-(-case.sq // tile.block_m) * case.hq * case.batch,),
        arguments | _problem(case) | _blocks(tile),
        _options(tile),
    )


def _delta(case: Attention, tensors: Tensors, o: torch.Tensor, delta: torch.Tensor) -> Launch:
    rows = case.batch * case.sq * case.hq
    return Launch(
        kernels.delta,
        (-(-rows // _DELTA_ROWS),),
        {
            "o_ptr": o,
            "do_ptr": tensors["dO"],
            "delta_ptr": delta,
            "rows": rows,
            "hq": case.hq,
            "sq": case.sq,
            "lse_row": delta.shape[2],
            "D": case.d,
            "BLOCK_D": padded_head(case.d),
            "BLOCK_M": _DELTA_ROWS,
        },
        {"num_warps": 4},
    )


def _work(case: Attention, forward: Launch, backward: list[Any]) -> Work:
    """The forward pass is a residual of a backward case, and part of the call of both."""
    return Work(backward, [forward]) if case.direction == "bwd" else Work([forward, *backward])


def _residuals(case: Attention, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """O, log2-sum-exp and delta."""
    q = tensors["Q"]
    o = tensors["O"] if "O" in tensors else torch.empty_like(q)
    # TMA steps over rows by multiples of 16 bytes.
    shape = (case.batch, case.hq, -(-case.sq // 4) * 4)
    lse, delta = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    return o, lse, delta


def _by_keys(case: Attention, kernel: Any, tile: Tiles, arguments: dict[str, Any]) -> Launch:
    """dK and dV: a program per tile of keys."""
    grid = -(-case.sk // tile.block_n) * case.hkv * case.batch
    return Launch(kernel, (grid,), arguments | _blocks(tile), _options(tile))


def _by_queries(case: Attention, kernel: Any, tile: Tiles, arguments: dict[str, Any]) -> Launch:
    """dQ: a program per tile of queries."""
    grid = -(-case.sq // tile.block_m) * case.hq * case.batch
    return Launch(kernel, (grid,), arguments | _blocks(tile), _options(tile))


def _gradients_of(case: Attention) -> dict[str, Any]:
    """What all kernels of a backward pass take."""
    return _problem(case) | {"D": case.d, "BLOCK_D": padded_head(case.d), "scale": 1 / math.sqrt(case.d)}


def _outputs(tensors: Tensors, *names: str) -> dict[str, torch.Tensor]:
    return {f"{name.lower()}_ptr": tensors[name] for name in names}


def _boxes(tensors: Tensors, tile: Tiles) -> dict[str, TensorDescriptor]:
    """Descriptors of the inputs of a backward pass."""
    rows = {"Q": tile.block_m, "K": tile.block_n, "V": tile.block_n, "dO": tile.block_m}
    return {f"{name.lower()}_desc": _descriptor(tensors[name], count) for name, count in rows.items()}


def _problem(case: Attention) -> dict[str, Any]:
    """Sizes, mask and arithmetic, by the names that all kernels give them."""
    return {
        "hq": case.hq,
        "hkv": case.hkv,
        "sq": case.sq,
        "sk": case.sk,
        "window": case.window,
        "factor": math.log2(math.e) / math.sqrt(case.d),
        "MASK": case.mask,
        "PRECISION": _PRECISION[case.dtype],
    }


def _blocks(tile: Tiles) -> dict[str, int]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}


def _options(tile: Tiles) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def _descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Of a tensor (B, S, H, D), as (B, H, S, D) in boxes of ``rows`` of one head."""
    b, s, h, d = tensor.shape
    return TensorDescriptor(tensor, [b, h, s, d], [s * h * d, d, h * d, 1], [1, 1, rows, padded_head(d)])
