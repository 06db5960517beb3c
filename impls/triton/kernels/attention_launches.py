"""What a call of an attention case launches: kernels bound to tensors.

Owns grids, arguments, descriptors, residuals and scratch memory. It does not own tiles (``attention_tiles``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from impls.triton.attention_tiles import Tiles, packed, padded_head, shares
from impls.triton.kernels import attention_backward as backward_kernels
from impls.triton.kernels import attention_decode as decode_kernels
from impls.triton.kernels import attention_forward as forward_kernels
from impls.triton.kernels.program import Launch, Tensors, Work
from impls.workloads.attention import Attention

# How tl.dot multiplies f32: three products of tf32 parts, or one where the case asks for tf32. 16-bit types ignore it.
_PRECISION = {"f32": "tf32x3", "tf32": "tf32", "f16": "ieee", "bf16": "ieee"}
_DELTA_ROWS, _FINISH_ELEMENTS, _SHARES_AT_A_TIME = 32, 2048, 32


def flash(case: Attention, tiles: dict[str, Tiles], tensors: Tensors) -> Work:
    """Pointer loads; dQ in a kernel of its own."""
    if case.direction == "fwd":
        return Work([_forward(case, tiles["forward"], tensors, tensors["O"], None)])
    o, lse, delta = _residuals(case, tensors)
    forward = _forward(case, tiles["forward"], tensors, o, lse)
    common = _common(case, tensors, lse, delta)
    backward = [
        _delta(case, tensors, o, delta),
        Launch(
            backward_kernels.backward_kv,
            (-(-case.sk // tiles["backward_kv"].block_n) * case.hkv * case.batch,),
            common | {"dk_ptr": tensors["dK"], "dv_ptr": tensors["dV"]} | _blocks(tiles["backward_kv"]),
            _options(tiles["backward_kv"]),
        ),
        Launch(
            backward_kernels.backward_q,
            (-(-case.sq // tiles["backward_q"].block_m) * case.hq * case.batch,),
            common | {"dq_ptr": tensors["dQ"]} | _blocks(tiles["backward_q"]),
            _options(tiles["backward_q"]),
        ),
    ]
    return _work(case, forward, backward)


def flash_tma(case: Attention, tiles: dict[str, Tiles], tensors: Tensors) -> Work:
    """Loads through descriptors; dQ added up in f32 in memory."""
    if case.direction == "fwd":
        return Work([_forward_tma(case, tiles["forward_tma"], tensors, tensors["O"], None)])
    o, lse, delta = _residuals(case, tensors)
    forward = _forward_tma(case, tiles["forward_tma"], tensors, o, lse)
    tile = tiles["backward_tma"]
    sums = torch.empty(tensors["Q"].shape, dtype=torch.float32, device=o.device)
    adds = sums.is_cuda  # the interpreter has no reduction through a descriptor
    query, keys = (lambda t: _descriptor(t, tile.block_m)), (lambda t: _descriptor(t, tile.block_n))
    arguments = {
        "q_desc": query(tensors["Q"]),
        "k_desc": keys(tensors["K"]),
        "v_desc": keys(tensors["V"]),
        "do_desc": query(tensors["dO"]),
        "sums": query(sums) if adds else sums,
        "TMA_ADDS": adds,
        "dk_desc": keys(tensors["dK"]),
        "dv_desc": keys(tensors["dV"]),
        "lse_ptr": lse,
        "delta_ptr": delta,
        "scale": 1 / math.sqrt(case.d),
        "D": case.d,
        "BLOCK_D": padded_head(case.d),
    }
    backward = [
        _delta(case, tensors, o, delta),
        sums.zero_,
        Launch(
            backward_kernels.backward_tma,
            (-(-case.sk // tile.block_n) * case.hkv * case.batch,),
            arguments | _problem(case) | _blocks(tile),
            _options(tile),
        ),
        Launch(
            backward_kernels.finish_dq,
            (-(-sums.numel() // _FINISH_ELEMENTS),),
            {
                "sum_ptr": sums,
                "dq_ptr": tensors["dQ"],
                "elements": sums.numel(),
                "scale": 1 / math.sqrt(case.d),
                "BLOCK": _FINISH_ELEMENTS,
            },
            {"num_warps": 4},
        ),
    ]
    return _work(case, forward, backward)


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
        "D": case.d,
        "BLOCK_D": padded_head(case.d),
        "KEEP_LSE": lse is not None,
        "AHEAD": tile.ahead,
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
        backward_kernels.delta,
        (-(-rows // _DELTA_ROWS),),
        {
            "o_ptr": o,
            "do_ptr": tensors["dO"],
            "delta_ptr": delta,
            "rows": rows,
            "hq": case.hq,
            "sq": case.sq,
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
    lse, delta = (torch.empty((case.batch, case.hq, case.sq), dtype=torch.float32, device=q.device) for _ in range(2))
    return o, lse, delta


def _common(case: Attention, tensors: Tensors, lse: torch.Tensor, delta: torch.Tensor) -> dict[str, Any]:
    """What both kernels of the backward pass through pointers take."""
    pointers = {f"{name.lower()}_ptr": tensors[name] for name in ("Q", "K", "V", "dO")}
    head = {"D": case.d, "BLOCK_D": padded_head(case.d), "scale": 1 / math.sqrt(case.d)}
    return pointers | {"lse_ptr": lse, "delta_ptr": delta} | _problem(case) | head


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
