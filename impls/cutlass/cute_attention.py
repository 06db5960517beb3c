"""Attention in the CuTe DSL: which cases the Hopper kernels take, by which tiles, and how a decode step is split.

Owns the decisions and the arithmetic of masks by blocks of keys, which the kernels trace and the tests run; the kernels
are in ``kernels/cute_attention.py`` and ``kernels/cute_decode.py``. Imports no stack library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from impls.contract import Device, Implementation, Program
from impls.workloads.attention import Attention
from impls.workloads.base import Case

# Rows of a warpgroup's tile, which are wgmma's M.
ROWS = 64
# Columns of a swizzled row of 128 bytes: head sizes are padded to multiples of it, in shared memory alone.
_PANEL = 64
_MOST_D = 256
# The kernels count elements within a tensor in 32 bits.
_MOST_ELEMENTS = 2**31
# Shared memory of a CTA and of a multiprocessor, which keeps 1 KiB of each CTA's for itself (CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability", 9.0).
SHARED_BYTES = 227 * 1024
_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 228 * 1024, 1024
# K and V of as many heads are to stay in L2 (50 MB on an H200) while tiles of these heads are under way.
_SECTION_BYTES = 32 * 2**20
_H200_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class ForwardTiles:
    """What one build of the forward kernel is specialised for.

    Attributes:
        dtype: ``bf16`` or ``f16``.
        mask: as a case's.
        head: head size in shared memory, a multiple of 64.
        keys: keys of a block.
        stages: slots of the ring of K and of that of V.
        consumers: warpgroups that multiply, 64 queries each.
        overlap: a warpgroup's exponentials run beside its own product with V.
        ping_pong: warpgroups start their products in turns.
        hold: with ``overlap``, a warpgroup waits for its product with V only when all its exponentials are computed.
        persistent: as many CTAs as multiprocessors take up tiles one after the other, those with most keys first; the
            next tile's loads run beside this one's end.
    """

    dtype: str
    mask: str
    head: int
    keys: int
    stages: int
    consumers: int
    overlap: bool = True
    ping_pong: bool = True
    hold: bool = True
    persistent: bool = False

    @property
    def shared_bytes(self) -> int:
        """Q, the rings, and O if it has a place of its own; barriers and alignment take less than 2 KiB more."""
        own = self.consumers * ROWS if self.own_output else 0
        return 2 * self.head * (self.consumers * ROWS + 2 * self.stages * self.keys + own)

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return self.consumers * ROWS

    @property
    def own_output(self) -> bool:
        """Whether the output leaves from a place of its own, so that the next queries arrive meanwhile."""
        rows = 2 * self.consumers * ROWS + 2 * self.stages * self.keys
        return self.persistent and 2 * self.head * rows <= SHARED_BYTES - 2048


@dataclass(frozen=True)
class DecodeTiles:
    """What one build of the decode kernels is specialised for.

    Attributes:
        dtype, head, keys, stages: as ``ForwardTiles``.
        windowed: of the keys only the last are seen.
        split: keys in shares, put together by a second kernel.
    """

    dtype: str
    windowed: bool
    head: int
    keys: int
    stages: int
    split: bool

    @property
    def shared_bytes(self) -> int:
        """As ``ForwardTiles``."""
        return 2 * self.head * (ROWS + 2 * self.stages * self.keys)

    @property
    def residents(self) -> int:
        """CTAs of a multiprocessor."""
        return _MULTIPROCESSOR_BYTES // (self.shared_bytes + 1024 + _RESERVED_BYTES)


def decodes(case: Attention) -> bool:
    """Whether the decode kernels take it: one query, whose heads are packed into the rows of a tile."""
    return case.sq == 1


def forward_tiles(case: Attention) -> ForwardTiles:
    """The tiles of a forward pass."""
    head = -(-case.d // _PANEL) * _PANEL
    keys, stages, consumers = {64: (128, 2, 3), 128: (128, 2, 2), 192: (112, 2, 2), 256: (80, 2, 2)}[head]
    return ForwardTiles(case.dtype, case.mask, head, keys, stages, consumers)


def section(case: Attention) -> int:
    """Heads whose tiles are under way together: as many as L2 holds K and V of; without a mask one after the other.

    Under a mask tiles with many keys go first, so heads must be interleaved for all of them to have short ones last.
    """
    if case.mask == "full":
        return 1
    return max(1, _SECTION_BYTES // (2 * case.sk * case.d * 2))


def decode_tiles(case: Attention, multiprocessors: int) -> tuple[DecodeTiles, int]:
    """The tiles of a decode step, and shares of the keys of each key head."""
    head = -(-case.d // _PANEL) * _PANEL
    keys, stages = {64: (128, 3), 128: (64, 3), 192: (64, 4), 256: (64, 2)}[head]
    tiles = DecodeTiles(case.dtype, case.mask == "window", head, keys, stages, False)
    shares = split(case, tiles, multiprocessors)
    return replace(tiles, split=shares > 1), shares


# Blocks that a share costs beyond its own, for filling and draining its rings, and what the second kernel costs.
_SHARE_COST, _COMBINE_COST = 3, 12


def split(case: Attention, tiles: DecodeTiles, multiprocessors: int) -> int:
    """Shares of the keys: those with which the busiest place for a CTA works through the fewest blocks."""
    first = (case.sk - case.window) // tiles.keys if tiles.windowed else 0
    blocks = -(-case.sk // tiles.keys) - first
    ctas = case.batch * case.hkv * -(-case.group // ROWS)
    places = multiprocessors * tiles.residents

    def cost(shares: int) -> float:
        rounds = -(-ctas * shares // places)
        return rounds * (-(-blocks // shares) + _SHARE_COST) + (_COMBINE_COST if shares > 1 else 0)

    return min(range(1, min(blocks, places) + 1), key=cost)


def key_blocks(
    row: Any, rows: int, sq: Any, sk: Any, window: Any, keys: int, mask: str, least: Any, most: Any
) -> tuple:
    """Blocks of ``keys`` keys of the queries [row, row + rows): (begin, whole, partial, end).

    Some query sees a key in each block of [begin, end), in no other, and every query sees all keys of [whole, partial).
    Traced with the DSL's integers, its ``least`` and ``most``, as well as run with Python's.
    """
    begin, whole, partial, end = 0, 0, sk // keys, (sk + keys - 1) // keys
    if mask != "full":
        shift = sk - sq
        end = (least(row + rows + shift, sk) + keys - 1) // keys
        partial = least((row + 1 + shift) // keys, partial)
        if mask == "window":
            begin = most(row + shift - window + 1, 0) // keys
            whole = (most(row + rows + shift - window, 0) + keys - 1) // keys
    return begin, whole, partial, end


class Cute(Implementation):
    """FlashAttention-3's techniques, and split decoding, in the CuTe DSL."""

    name: ClassVar[str] = "cutlass.cute"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "CuTe DSL on Hopper: fused, warp-specialised, TMA and wgmma, ping-pong; decode by shares"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other devices than Hopper, other dtypes than of 16 bits, backward passes, rows that TMA cannot step over."""
        assert isinstance(case, Attention)
        if device.arch != "sm_90":
            return f"The kernel is written for sm_90's wgmma, and this device is {device.arch}."
        if case.dtype not in ("f16", "bf16"):
            return "The kernel multiplies operands of 16 bits."
        if case.direction != "fwd":
            return "Only the forward pass is written in the CuTe DSL."
        if case.d > _MOST_D:
            return f"D = {case.d} does not fit the tiles of this kernel: {_MOST_D} does."
        if case.d % 8:
            return f"TMA steps over rows by multiples of 16 bytes, which D = {case.d} of {case.dtype} is not."
        if max(case.batch * case.sq * case.hq, case.batch * case.sk * case.hkv) * case.d >= _MOST_ELEMENTS:
            return "The kernel counts the elements of a tensor in 32 bits."
        return None

    def workspace_bytes(self, case: Case) -> int:
        """In a decode step what every share of the keys leaves behind, as on an H200."""
        assert isinstance(case, Attention)
        if not decodes(case):
            return 0
        _, shares = decode_tiles(case, _H200_MULTIPROCESSORS)
        return _parts(case, shares) * 4

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and these parts written and read."""
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case)

    def prepare(self, case: Case, device: Device) -> Program:
        """Loads what was compiled beforehand, or compiles it where the DSL is installed."""
        assert isinstance(case, Attention)
        from impls.cutlass.kernels.cute_attention_program import AttentionProgram

        return AttentionProgram(case, *self.library(case))

    def library(self, case: Attention) -> tuple[ForwardTiles | DecodeTiles, int, Path]:
        """The tiles of a case, shares of the keys, and what was compiled for these tiles, or is now.

        Shares follow from an H200's multiprocessors: other Hoppers have up to as many.
        """
        from impls.cutlass.kernels import cute_host

        if decodes(case):
            decode, shares = decode_tiles(case, _H200_MULTIPROCESSORS)

            def decode_kernel() -> Any:
                from impls.cutlass.kernels.cute_decode import Decode

                return Decode(decode)

            return decode, shares, cute_host.found(decode, decode_kernel)
        forward = self.tiles(case)

        def forward_kernel() -> Any:
            from impls.cutlass.kernels.cute_attention import Forward

            return Forward(forward)

        return forward, 1, cute_host.found(forward, forward_kernel)

    def tiles(self, case: Attention) -> ForwardTiles:
        """The tiles of a forward pass."""
        return forward_tiles(case)


class CuteNoPingPong(Cute):
    """The same kernel with one technique switched off: what it is worth on this device."""

    name: ClassVar[str] = "cutlass.cute_no_pingpong"
    summary: ClassVar[str] = "cutlass.cute without turns between its warpgroups: what ping-pong is worth"

    def refuses(self, case: Case, device: Device) -> str | None:
        """As cutlass.cute; and one query, for which there is one warpgroup."""
        assert isinstance(case, Attention)
        return super().refuses(case, device) or (
            "Decoding has a single warpgroup: there are no turns to switch off." if decodes(case) else None
        )

    def tiles(self, case: Attention) -> ForwardTiles:
        """Those of cutlass.cute without turns."""
        return replace(forward_tiles(case), ping_pong=False)


def _parts(case: Attention, shares: int) -> int:
    """f32 numbers that the shares of a decode step leave: rows, and of each its maximum and sum."""
    return shares * case.batch * case.hq * (case.d + 2) if shares > 1 else 0
