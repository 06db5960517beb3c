"""Attention in the CuTe DSL: which cases the Hopper kernels take, by which tiles, and how a decode step is split.

Owns the decisions and the arithmetic of masks by blocks of keys, which the kernels trace and the tests run; the kernels
are in ``kernels/cute_attention.py`` and ``kernels/cute_decode.py``. Imports no stack library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from impls.contract import Device, Implementation, Program
from impls.support.h200 import MULTIPROCESSORS
from impls.workloads.attention import Attention
from impls.workloads.base import Case

# Rows of a warpgroup's tile, which are wgmma's M.
ROWS = 64
# Columns of a swizzled row of 128 bytes: head sizes are padded to multiples of it, in shared memory alone.
_PANEL = 64
_MOST_D, _MOST_BACKWARD_D = 256, 128
# The kernels count elements within a tensor in 32 bits.
_MOST_ELEMENTS = 2**31
# Shared memory of a CTA and of a multiprocessor, which keeps 1 KiB of each CTA's for itself (CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability", 9.0).
SHARED_BYTES = 227 * 1024
_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 228 * 1024, 1024
# K and V of as many heads are to stay in L2 (50 MB on an H200) while tiles of these heads are under way.
_SECTION_BYTES = 32 * 2**20


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
        lazy: sums and O are rescaled only when a row's maximum has grown by more than 2^8.
        persistent: as many CTAs as multiprocessors take up tiles one after the other, those with most keys first; the
            next tile's loads run beside this one's end.
        residuals: the logarithms of the rows' sums are written, too, for a backward pass.
    """

    dtype: str
    mask: str
    head: int
    keys: int
    stages: int
    consumers: int
    overlap: bool = True
    ping_pong: bool = True
    lazy: bool = False
    persistent: bool = False
    residuals: bool = False

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


# Keys of a CTA of the backward pass.
BACKWARD_KEYS = 128


@dataclass(frozen=True)
class BackwardTiles:
    """What one build of the backward kernels is specialised for.

    Attributes:
        dtype, mask, head: as ``ForwardTiles``.
        stages: slots of the rings of Q and of dO, 64 queries each.
        by_keys: CTAs of one key head follow each other; else those of the same keys of all heads.
    """

    dtype: str
    mask: str
    head: int
    stages: int
    by_keys: bool = False

    @property
    def shared_bytes(self) -> int:
        """K, V, the rings, and twice the gradients of the scores; barriers, vectors, alignment take less than 4 KiB."""
        return 2 * (2 * self.head * (BACKWARD_KEYS + self.stages * ROWS) + 2 * BACKWARD_KEYS * ROWS)


def decodes(case: Attention) -> bool:
    """Whether the decode kernels take it: one query, whose heads are packed into the rows of a tile."""
    return case.sq == 1 and case.direction == "fwd"


def forward_tiles(case: Attention) -> ForwardTiles:
    """The tiles of a forward pass.

    On an H200 in burst, (B, S, H) = (2, 8192, 16): at head size 128 without a mask 176 keys beat 128 by 1 %, and a
    persistent kernel gained nothing; at 64 and at 256 it gained up to 2 %. Rescaling lazily gained 7 % at 256, where O
    takes half of the registers, nothing at 128, and cost 4 % at 64.
    """
    head = _padded(case)
    tiles = ForwardTiles(case.dtype, case.mask, head, keys=128, stages=2, consumers=2)
    if head == 64:
        return replace(tiles, consumers=3, persistent=True)
    if head == 128:
        return replace(tiles, keys=176) if case.mask == "full" else tiles
    return replace(tiles, keys={192: 112, 256: 80}[head], lazy=True, ping_pong=False)


def section(case: Attention) -> int:
    """Heads whose tiles are under way together: as many as L2 holds K and V of; without a mask one after the other.

    Under a mask tiles with many keys go first, so heads must be interleaved for all of them to have short ones last.
    """
    if case.mask == "full":
        return 1
    return max(1, _SECTION_BYTES // (2 * case.sk * case.d * 2))


def decode_tiles(case: Attention, multiprocessors: int) -> tuple[DecodeTiles, int]:
    """The tiles of a decode step, and shares of the keys of each key head."""
    head = _padded(case)
    keys, stages = {64: (128, 3), 128: (64, 3), 192: (64, 4), 256: (64, 2)}[head]
    tiles = DecodeTiles(case.dtype, case.mask == "window", head, keys, stages, False)
    shares = split(case, tiles, multiprocessors)
    return replace(tiles, split=shares > 1), shares


def backward_tiles(case: Attention) -> BackwardTiles:
    """The tiles of a backward pass.

    On an H200 in burst, (B, S, H, D) = (2, 8192, 16, 128): head by head 2 % faster without a mask, where Q, dO and the
    sums of dQ stay in L2, and 3 % slower under one, where CTAs with few queries should come last; a third slot gained
    nothing.
    """
    return BackwardTiles(case.dtype, case.mask, _padded(case), 2, by_keys=case.mask == "full")


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


def query_blocks(
    key: Any, keys: int, sq: Any, sk: Any, window: Any, rows: int, mask: str, least: Any, most: Any
) -> tuple:
    """Blocks of ``rows`` queries of the keys [key, key + keys): (begin, whole, partial, end).

    Some query of each block of [begin, end) sees a key, of no other, and every query of [whole, partial) sees all keys,
    none of which is beyond the last. ``whole`` and ``partial`` may lie outside. Traced as well as run, as
    ``key_blocks``.
    """
    begin, partial, end = 0, (sq + rows - 1) // rows, (sq + rows - 1) // rows
    whole = least(most(key + keys - sk, 0) * end, end)
    if mask != "full":
        shift = sk - sq
        begin = most(key - shift, 0) // rows
        whole = (most(key + keys - 1 - shift, 0) + rows - 1) // rows
        if mask == "window":
            last = least(key + keys, sk) - 1 + window - 1 - shift
            end = most(least((most(last, -1) + rows) // rows, end), begin)
            partial = most(key + window - shift, 0) // rows
    return begin, whole, partial, end


@dataclass(frozen=True)
class Built:
    """One library that a case needs.

    Attributes:
        tiles: what it was built for.
        path: where it lies.
        shares: of the keys, in a decode step.
    """

    tiles: ForwardTiles | DecodeTiles | BackwardTiles
    path: Path
    shares: int = 1


class Cute(Implementation):
    """FlashAttention-3's techniques, and split decoding, in the CuTe DSL."""

    name: ClassVar[str] = "cutlass.cute"
    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "CuTe DSL on Hopper: fused, warp-specialised, TMA and wgmma, ping-pong; decode by shares"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Other devices than Hopper, dtypes of other than 16 bits, rows that TMA cannot step over; wide heads."""
        assert isinstance(case, Attention)
        if device.arch != "sm_90":
            return f"The kernel is written for sm_90's wgmma, and this device is {device.arch}."
        if case.dtype not in ("f16", "bf16"):
            return "The kernel multiplies operands of 16 bits."
        if case.d > _MOST_D:
            return f"D = {case.d} does not fit the tiles of this kernel: {_MOST_D} does."
        if case.direction != "fwd" and case.d > _MOST_BACKWARD_D:
            return f"The backward kernel holds dK and dV in registers: heads of up to {_MOST_BACKWARD_D}."
        if case.d % 8:
            return f"TMA steps over rows by multiples of 16 bytes, which D = {case.d} of {case.dtype} is not."
        if (
            max(case.batch * (case.sq + ROWS) * case.hq, case.batch * case.sk * case.hkv) * _padded(case)
            >= _MOST_ELEMENTS
        ):
            return "The kernel counts the elements of a tensor in 32 bits."
        return None

    def workspace_bytes(self, case: Case) -> int:
        """In a decode step what every share of the keys leaves behind, as on an H200; backward residuals and f32 dQ."""
        assert isinstance(case, Attention)
        if case.direction != "fwd":
            rows = case.batch * case.hq * -(-case.sq // ROWS) * ROWS
            o = case.input_specs()["Q"].nbytes if case.direction == "bwd" else 0
            return o + rows * (2 + _padded(case)) * 4
        if not decodes(case):
            return 0
        _, shares = decode_tiles(case, MULTIPROCESSORS)
        return shares * case.batch * case.hq * (case.d + 2) * 4 if shares > 1 else 0

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and these parts written and read.

        Backward, dQ in f32 is set to zero, added to and read; O and dO are read for the sums of their products.
        """
        assert isinstance(case, Attention)
        if case.direction == "fwd":
            return case.compulsory_bytes() + 2 * self.workspace_bytes(case)
        rows = case.batch * case.hq * -(-case.sq // ROWS) * ROWS
        return case.compulsory_bytes() + 2 * case.input_specs()["Q"].nbytes + rows * (3 * _padded(case) + 4) * 4

    def prepare(self, case: Case, device: Device) -> Program:
        """Loads what was compiled beforehand, or compiles it where the DSL is installed.

        Raises:
            Unsupported: it was not, and the DSL is not there.
        """
        assert isinstance(case, Attention)
        from impls.cutlass.kernels.cute_attention_program import AttentionProgram

        return AttentionProgram(case, *self.libraries(case))

    def libraries(self, case: Attention) -> list[Built]:
        """What was compiled for a case, or is now: the forward kernel, and where the case is backward, that one's.

        Shares follow from an H200's multiprocessors: other Hoppers have up to as many.

        Raises:
            Unsupported: it was not, and the DSL is not there.
        """
        from impls.cutlass.kernels import cute_host

        if decodes(case):
            decode, shares = decode_tiles(case, MULTIPROCESSORS)
            return [Built(decode, cute_host.found(decode), shares)]
        forward = replace(self.tiles(case), residuals=case.direction != "fwd")
        built = [Built(forward, cute_host.found(forward))]
        if case.direction != "fwd":
            backward = backward_tiles(case)
            built.append(Built(backward, cute_host.found(backward)))
        return built

    def tiles(self, case: Attention) -> ForwardTiles:
        """The tiles of a forward pass."""
        return forward_tiles(case)


class CuteNoPingPong(Cute):
    """The same kernel with one technique switched off: what it is worth on this device."""

    name: ClassVar[str] = "cutlass.cute_no_pingpong"
    summary: ClassVar[str] = "cutlass.cute without turns between its warpgroups: what ping-pong is worth"

    def refuses(self, case: Case, device: Device) -> str | None:
        """As cutlass.cute; and where that has no turns."""
        assert isinstance(case, Attention)
        if (reason := super().refuses(case, device)) is not None:
            return reason
        if decodes(case) or case.direction != "fwd" or not forward_tiles(case).ping_pong:
            return "cutlass.cute has no turns to switch off in this case."
        return None

    def tiles(self, case: Attention) -> ForwardTiles:
        """Those of cutlass.cute without turns."""
        return replace(forward_tiles(case), ping_pong=False)


def _padded(case: Attention) -> int:
    """Head size in shared memory."""
    return -(-case.d // _PANEL) * _PANEL
