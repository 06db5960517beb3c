"""Tiles of the attention kernels: what can be chosen, what fits, what is chosen.

Owns the space that tuning searches, the estimate of shared memory that prunes it, the choices where nothing was tuned,
and how decoding cuts the keys into shares. It imports no Triton. Tuned choices lie in ``tuned/<device>.json`` under
``attention``; tuning writes them, nothing here does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from impls.contract import Device
from impls.workloads.attention import Attention
from impls.workloads.dtypes import dtype

KERNELS = ("forward", "forward_tma", "decode", "backward_kv", "backward_q", "backward_tma")
# Shared memory that one program may have (CUDA C++ programming guide, table of compute capabilities; CDNA 3: 64 KiB).
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# Programs of decode that run at a time: two on each of the 132 multiprocessors of an H200.
PROGRAMS_AT_ONCE = 264
# What starting a share costs, and putting shares together, in blocks of keys.
_START_BLOCKS, _COMBINE_BLOCKS = 1.0, 4.0
_MOST_SHARES = 1024


@dataclass(frozen=True)
class Tiles:
    """One kernel's configuration.

    Attributes:
        block_m: rows of a tile: queries.
        block_n: keys of a block.
        warps: warps of a program.
        stages: blocks that are loaded ahead, the one in use included.
        ahead: a block's scores are computed before the block before is done with (``forward_tma`` only).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    ahead: bool = False


def padded_head(d: int) -> int:
    """The head size of a tile: a power of two, of at least what one tensor core instruction takes."""
    return max(16, 1 << (d - 1).bit_length())


def key_blocks(case: Attention, block_n: int) -> int:
    """Blocks of keys of one head."""
    return -(-case.sk // block_n)


def shares(case: Attention, block_n: int) -> int:
    """How many programs share one key head's keys: as many as make the rounds of programs, so the time, shortest."""
    blocks, heads = key_blocks(case, block_n), case.batch * case.hkv

    def cost(count: int) -> float:
        rounds = -(-heads * count // PROGRAMS_AT_ONCE)
        return rounds * (-(-blocks // count) + _START_BLOCKS) + (_COMBINE_BLOCKS if count > 1 else 0.0)

    return min(range(1, min(blocks, _MOST_SHARES) + 1), key=lambda count: (cost(count), count))


def shared_bytes(kernel: str, tiles: Tiles, d: int, element: int) -> int:
    """Estimate of a program's shared memory: operands that stay, and blocks loaded ahead."""
    head = padded_head(d) * element
    m, n = tiles.block_m * head, tiles.block_n * head
    scores = tiles.block_m * tiles.block_n * element
    if kernel in ("forward", "forward_tma", "decode"):
        return m + 2 * n * tiles.stages
    if kernel == "backward_q":
        return 2 * m + 2 * n * tiles.stages + scores
    sums = tiles.block_m * padded_head(d) * 4 if kernel == "backward_tma" else 0
    return 2 * n + 2 * m * tiles.stages + scores + sums


def space(kernel: str, d: int, element: int, arch: str) -> Iterator[Tiles]:
    """The configurations that tuning tries: whole warpgroups, accumulators of at most 160 registers a thread."""
    head = padded_head(d)
    block_m, block_n = {
        "forward": ((64, 128, 256), (32, 64, 128)),
        "forward_tma": ((64, 128, 256), (32, 64, 128, 256)),
        "decode": ((16,), (32, 64, 128, 256)),
        "backward_kv": ((32, 64, 128), (64, 128)),
        "backward_q": ((64, 128), (32, 64, 128)),
        "backward_tma": ((32, 64, 128), (64, 128)),
    }[kernel]
    for m, n, warps, stages in product(block_m, block_n, (4, 8), (2, 3, 4)):
        accumulated = {"backward_kv": 2 * n * head + m * n, "backward_tma": 2 * n * head + m * n}.get(
            kernel, m * head + m * n
        )
        if accumulated / (32 * warps) > 192:
            continue
        for ahead in (False, True) if kernel == "forward_tma" else (False,):
            tiles = Tiles(m, n, warps, stages, ahead)
            if shared_bytes(kernel, tiles, d, element) <= SHARED_BYTES[arch]:
                yield tiles


def key(kernel: str, case: Attention) -> str:
    """The class of cases that share a tuned choice, e.g. ``forward d128 causal 16``: kernel, padded D, mask, bits."""
    return f"{kernel} d{padded_head(case.d)} {case.mask} {dtype(case.dtype).bits}"


def choice(kernel: str, case: Attention, device: Device) -> Tiles:
    """The tuned tiles, those of the nearest mask, or what fits; block_m is no larger than the rows there are."""
    tuned = _tuned(device.name)
    name = key(kernel, case)
    tiles = tuned.get(name) or tuned.get(name.replace("window", "causal")) or _untuned(kernel, case, device.arch)
    if kernel == "backward_q" or kernel.startswith("forward"):
        rows = case.sq * (case.group if packed(kernel, case) else 1)
        least = max(16, 1 << (rows - 1).bit_length())
        if least < tiles.block_m:
            tiles = Tiles(least, tiles.block_n, min(tiles.warps, 4), tiles.stages)
    return tiles


def packed(kernel: str, case: Attention) -> bool:
    """Whether the query heads that share a key head share a tile: where one head's queries would not fill it."""
    return kernel == "decode" or (kernel == "forward" and case.sq < 64)


@cache
def _tuned(device_name: str) -> dict[str, Tiles]:
    path = tuned_file(device_name)
    if not path.is_file():
        return {}
    entries = json.loads(path.read_text()).get("attention", {})
    return {name: Tiles(**entry["config"]) for name, entry in entries.items()}


def tuned_file(device_name: str) -> Path:
    """Where the choices for a device are."""
    short = next((part for part in device_name.lower().split() if any(c.isdigit() for c in part)), "unknown")
    return Path(__file__).parent / "tuned" / f"{short}.json"


def _untuned(kernel: str, case: Attention, arch: str) -> Tiles:
    """A choice that fits: wide tiles for 16-bit types, small ones for f32, fewer stages and keys until it fits."""
    head, element = padded_head(case.d), dtype(case.dtype).bytes
    narrow = element == 4
    if kernel == "decode":
        tiles = Tiles(max(16, 1 << (case.sq * case.group - 1).bit_length()), 32 if narrow else 64, 4, 3)
    elif kernel.startswith("forward"):
        tiles = Tiles(64, 32, 4, 2) if narrow else Tiles(128, 128 if head <= 128 else 64, 8, 3)
    elif kernel == "backward_q":
        tiles = Tiles(64, 32, 4, 2) if narrow else Tiles(128, 64, 8, 2) if head <= 128 else Tiles(64, 64, 8, 2)
    else:
        tiles = Tiles(32, 32, 4, 2) if narrow else Tiles(64, 128, 8, 2) if head <= 128 else Tiles(64, 64, 8, 2)
    limit = SHARED_BYTES.get(arch, SHARED_BYTES["sm_90"])
    while shared_bytes(kernel, tiles, case.d, element) > limit:
        if tiles.stages > 2:
            tiles = Tiles(tiles.block_m, tiles.block_n, tiles.warps, tiles.stages - 1)
        elif tiles.block_n > 16:
            tiles = Tiles(tiles.block_m, tiles.block_n // 2, tiles.warps, tiles.stages)
        elif tiles.block_m > 16:
            tiles = Tiles(tiles.block_m // 2, tiles.block_n, tiles.warps, tiles.stages)
        else:
            break
    return tiles
