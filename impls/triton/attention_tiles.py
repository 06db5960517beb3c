"""Tiles of the attention kernels: what can be chosen, what fits, what is chosen.

Owns the space that tuning searches, the estimate of shared memory that prunes it, the rule where nothing was tuned, and
how decoding cuts the keys into shares. It imports no Triton. What tuning chose is looked up by ``choices``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from impls.contract import Device
from impls.support.h200 import MULTIPROCESSORS
from impls.triton import choices
from impls.workloads.attention import Attention
from impls.workloads.dtypes import dtype

# The implementation under whose name a kernel's choices are kept.
IMPLEMENTATIONS = {
    "forward": "triton.flash",
    "backward_kv": "triton.flash",
    "backward_q": "triton.flash",
    "forward_tma": "triton.flash_tma",
    "backward_kv_tma": "triton.flash_tma",
    "backward_q_tma": "triton.flash_tma",
    "decode": "triton.decode",
}
# Shared memory that one program may have (CUDA C++ programming guide, table of compute capabilities; CDNA 3: 64 KiB).
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# Programs of decode that make one round: two for each of the multiprocessors of an H200, one after the other where
# their tiles leave no room for both.
PROGRAMS_AT_ONCE = 2 * MULTIPROCESSORS
# What starting a share costs, and putting shares together, in blocks of keys.
_START_BLOCKS, _COMBINE_BLOCKS = 1.0, 4.0
_MOST_SHARES = 1024
# Registers of a thread, of 255, that accumulators may take: beyond, every configuration that was compiled spilled.
_MOST_ACCUMULATED = 192


@dataclass(frozen=True)
class Tiles:
    """One kernel's configuration.

    Attributes:
        block_m: rows of a tile: queries.
        block_n: keys of a block.
        warps: warps of a program.
        stages: blocks that are loaded ahead, the one in use included.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Choice:
    """The tiles of the kernels of one call that are chosen together.

    Attributes:
        tiles: (kernel, its tiles), each kernel once.
    """

    tiles: tuple[tuple[str, Tiles], ...]

    def config(self) -> dict[str, Any]:
        """For the record and the tuned file."""
        return {kernel: asdict(tiles) for kernel, tiles in self.tiles}


def padded_head(d: int) -> int:
    """The head size of a tile: a power of two, of at least what one tensor core instruction takes."""
    return max(16, _power(d))


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
    if kernel.startswith("backward_kv"):
        return 2 * n + 2 * m * tiles.stages
    if kernel.startswith("backward_q"):
        return 2 * m + 2 * n * tiles.stages
    # O of four bytes an element changes its layout through shared memory on its way out.
    return m * (2 if element == 4 else 1) + 2 * n * tiles.stages


def space(kernel: str, case: Attention, arch: str) -> list[Tiles]:
    """The configurations that tuning tries, pruned by registers, by shared memory and by what was seen on an H200.

    There every 64 rows of accumulators want a warpgroup; a program of one warpgroup keeps up with one of two only where
    two such programs share the multiprocessor; and the deepest pipelines that fit, of up to four stages, win.
    """
    head = padded_head(case.d)
    if kernel == "decode":
        blocks = [(16, n, warps) for n in (32, 64, 128) for warps in (4, 8)]
    elif case.sq < 64:
        return []  # what decode is for
    elif kernel.startswith("forward"):
        blocks = [(128, n, 8) for n in ((32, 64) if head > 128 else (64, 128))]
        blocks += [(256, 64, 16)] if head <= 128 else []
        blocks += [(128, 64, 4), (128, 128, 4), (256, 64, 8), (256, 128, 16)] if head <= 64 else []
    elif kernel.startswith("backward_kv"):
        # dK and dV are held at once: registers are what is short.
        blocks = [(64, 64, 8)] if head > 128 else [(64, 64, 4), (32, 64, 4), (64, 128, 8)]
        blocks += [(128, 64, 4), (32, 128, 4)] if head <= 64 else []
    else:
        blocks = [(128, 32, 8)] if head > 128 else [(128, 64, 8), (64, 64, 4)]
        blocks += [(128, 64, 4)] if head <= 64 else []
    most_stages = 3 if kernel.startswith("backward_kv") else 4
    found = []
    for m, n, warps in blocks:
        limit = SHARED_BYTES[arch] // (2 if warps == 4 and kernel != "decode" else 1)
        options = (Tiles(m, n, warps, stages) for stages in range(most_stages, 1, -1))
        fitting = [t for t in options if shared_bytes(kernel, t, case.d, dtype(case.dtype).bytes) <= limit]
        found += fitting[: 1 if kernel.startswith("backward") or head <= 64 else 2]
    return found


def choose(kernel: str, case: Attention, device: Device) -> tuple[Tiles, str]:
    """The tiles of a kernel, and where they come from: tuned for a case, by the rule, or simulated.

    The interpreter gets small tiles, so that small cases have several.
    """
    if device.kind == "cpu":
        return Tiles(64, 32, 4, 2), "simulated"
    about = tuned_as(kernel, case)
    found = choices.nearest(IMPLEMENTATIONS[kernel], about, device.name, _alike, _sizes)
    if found and kernel in found.choice:
        tiles, origin = Tiles(**found.choice[kernel]), found.origin
    else:
        tiles, origin = _rule(kernel, case), "rule"
    return _fitted(kernel, tiles, case, device.arch), origin


def tuned_as(kernel: str, case: Attention) -> Attention:
    """The case whose tuned choice a kernel of ``case`` takes: the forward or the backward pass alone."""
    return replace(case, direction="bwd" if kernel.startswith("backward") else "fwd")


def _alike(case: Attention) -> tuple[Any, ...]:
    return padded_head(case.d), dtype(case.dtype).bits, case.mask != "full", case.direction


def _sizes(case: Attention) -> tuple[float, ...]:
    return case.batch * case.hq, case.group, case.sq, case.sk


def packed(kernel: str, case: Attention) -> bool:
    """Whether the query heads that share a key head share a tile: where one head's queries would not fill it."""
    return kernel == "decode" or (kernel == "forward" and case.sq < 64)


def _rule(kernel: str, case: Attention) -> Tiles:
    """For what was not tuned: wide tiles for 16-bit types, small ones for f32."""
    wide = padded_head(case.d) > 128
    if dtype(case.dtype).bytes == 4:
        return Tiles(32, 32, 4, 2) if kernel.startswith("backward_kv") else Tiles(64, 32, 4, 2)
    if kernel == "decode":
        return Tiles(16, 128, 4, 3)
    if kernel == "forward":
        return Tiles(128, 64, 8, 2) if wide else Tiles(256, 64, 16, 3)
    if kernel == "forward_tma":
        return Tiles(128, 64, 8, 2) if wide else Tiles(128, 128, 8, 3)
    if kernel.startswith("backward_q"):
        return Tiles(128, 32, 8, 3) if wide else Tiles(128, 64, 8, 4)
    if wide:
        return Tiles(64, 64, 8, 2)
    return Tiles(64, 64, 4, 2) if kernel == "backward_kv_tma" else Tiles(64, 128, 8, 3)


def _fitted(kernel: str, tiles: Tiles, case: Attention, arch: str) -> Tiles:
    """No more rows than there are, and within shared memory: fewer stages first, then fewer keys, then fewer rows."""
    if kernel == "decode":
        tiles = replace(tiles, block_m=max(16, _power(case.sq * case.group)))
    elif kernel.startswith("forward") or kernel.startswith("backward_q"):
        rows = max(16, _power(case.sq * (case.group if packed(kernel, case) else 1)))
        if rows < tiles.block_m:
            tiles = replace(tiles, block_m=rows, warps=max(4, tiles.warps * rows // tiles.block_m))
    if tiles.warps == 16 and arch != "sm_90":
        # Four warpgroups to a tile are Hopper's: with as many warps Triton leaves tcgen05 alone on sm_100.
        tiles = replace(tiles, block_m=128, warps=8)
    limit = SHARED_BYTES.get(arch, SHARED_BYTES["sm_90"])
    for smaller in (
        *(replace(tiles, stages=stages) for stages in range(tiles.stages, 1, -1)),
        *(replace(tiles, stages=2, block_n=n) for n in _halved(tiles.block_n, 32)),
        *(replace(tiles, stages=2, block_n=min(tiles.block_n, 32), block_m=m) for m in _halved(tiles.block_m, 32)),
        *(Tiles(min(tiles.block_m, 32), n, tiles.warps, 1) for n in _halved(min(tiles.block_n, 32), 16)),
        *(Tiles(m, min(tiles.block_n, 16), tiles.warps, 1) for m in _halved(min(tiles.block_m, 32), 16)),
    ):
        if shared_bytes(kernel, smaller, case.d, dtype(case.dtype).bytes) <= limit:
            return smaller
    raise ValueError(f"no tiles of {kernel} fit {limit} bytes of shared memory at D = {case.d}, {case.dtype}")


def _halved(size: int, least: int) -> list[int]:
    """``size`` and its halves, down to ``least``."""
    return [size >> n for n in range(size.bit_length()) if size >> n >= min(size, least)]


def _power(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << (n - 1).bit_length()
