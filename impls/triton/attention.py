"""Attention in Triton: which variant takes which case, and what it moves.

Owns the decisions; tiles are in ``attention_tiles``, launches and kernels in ``kernels/attention_*.py``. Backward
passes keep the forward pass's O and log-sum-exp as residuals.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from impls.contract import Device, Implementation, Program
from impls.triton.attention_tiles import Tiles, choose, shares
from impls.workloads.attention import Attention
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype

if TYPE_CHECKING:
    from impls.triton.kernels.program import Tensors, Work

_MOST_D = 256
# Rows of queries that decode takes in one tile.
_MOST_DECODED = 64


class _Attention(Implementation):
    """What all variants have in common."""

    workload: ClassVar[str] = "attention"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    simulated_on: ClassVar[tuple[str, ...]] = ("cpu",)

    def refuses(self, case: Case, device: Device) -> str | None:
        """Head sizes beyond what a tile holds in registers."""
        assert isinstance(case, Attention)
        return f"D = {case.d} does not fit a tile: 256 does." if case.d > _MOST_D else None

    def prepare(self, case: Case, device: Device) -> Program:
        """Kernels are compiled on a GPU; nothing is tuned."""
        assert isinstance(case, Attention)
        from impls.triton.kernels.program import LaunchedProgram

        chosen = {kernel: choose(kernel, case, device) for kernel in self._kernels(case)}
        tiles = {kernel: tile for kernel, (tile, _) in chosen.items()}
        config: dict[str, Any] = {name: asdict(tile) | {"from": origin} for name, (tile, origin) in chosen.items()}
        return LaunchedProgram(case, device, lambda tensors: self._bind(case, tiles, tensors), config)

    @abstractmethod
    def _kernels(self, case: Attention) -> tuple[str, ...]:
        """The kernels of the case that have tiles to choose."""

    @abstractmethod
    def _bind(self, case: Attention, tiles: dict[str, Tiles], tensors: Tensors) -> Work:
        """The launches of a call."""


class Flash(_Attention):
    """FlashAttention with loads through pointers; dQ has a kernel of its own, so that gradients repeat bit for bit."""

    name: ClassVar[str] = "triton.flash"
    summary: ClassVar[str] = "fused attention, loads through pointers (cp.async); backward in seven products"

    def traffic_bytes(self, case: Case) -> int:
        """Backward the inputs are read by two kernels, O and dO once more for delta."""
        assert isinstance(case, Attention)
        return case.compulsory_bytes() + _backward_bytes(case, _input_bytes(case))

    def workspace_bytes(self, case: Case) -> int:
        """O, log-sum-exp and delta of a backward pass."""
        assert isinstance(case, Attention)
        return _residual_bytes(case)

    def _kernels(self, case: Attention) -> tuple[str, ...]:
        return ("forward",) if case.direction == "fwd" else ("forward", "backward_kv", "backward_q")

    def _bind(self, case: Attention, tiles: dict[str, Tiles], tensors: Tensors) -> Work:
        from impls.triton.kernels import attention_launches

        return attention_launches.flash(case, tiles, tensors)


class FlashTma(_Attention):
    """FlashAttention with loads through tensor descriptors; dQ is added up in memory."""

    name: ClassVar[str] = "triton.flash_tma"
    summary: ClassVar[str] = (
        "fused attention, loads through descriptors (TMA); backward in five products, dQ added up in f32"
    )

    def refuses(self, case: Case, device: Device) -> str | None:
        """As its kind, and rows that TMA cannot stride over."""
        assert isinstance(case, Attention)
        if case.d * dtype(case.dtype).bytes % 16:
            return f"TMA steps over rows by multiples of 16 bytes, which D = {case.d} of {case.dtype} is not."
        return super().refuses(case, device)

    def traffic_bytes(self, case: Case) -> int:
        """Backward the f32 sums of dQ are cleared, added to and read; O and dO are read once more for delta."""
        assert isinstance(case, Attention)
        return case.compulsory_bytes() + _backward_bytes(case, 4 * _sum_bytes(case))

    def workspace_bytes(self, case: Case) -> int:
        """O, log-sum-exp, delta and sums of a backward pass."""
        assert isinstance(case, Attention)
        return _residual_bytes(case) + (0 if case.direction == "fwd" else _sum_bytes(case))

    def _kernels(self, case: Attention) -> tuple[str, ...]:
        return ("forward_tma",) if case.direction == "fwd" else ("forward_tma", "backward_tma")

    def _bind(self, case: Attention, tiles: dict[str, Tiles], tensors: Tensors) -> Work:
        from impls.triton.kernels import attention_launches

        return attention_launches.flash_tma(case, tiles, tensors)


class Decode(_Attention):
    """Few queries over many keys, which are shared out among programs; query heads of a key head share a tile."""

    name: ClassVar[str] = "triton.decode"
    summary: ClassVar[str] = "few queries: keys shared out among programs, query heads packed, a reduction over shares"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Backward passes, and more queries than one tile holds."""
        assert isinstance(case, Attention)
        if case.direction != "fwd":
            return "Decoding has no backward pass."
        if case.sq * case.group > _MOST_DECODED:
            return f"{case.sq * case.group} queries share a key head, a tile of this kernel holds {_MOST_DECODED}."
        return super().refuses(case, device)

    def traffic_bytes(self, case: Case) -> int:
        """Parts of O and their log-sum-exp are written and read."""
        assert isinstance(case, Attention)
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """Parts of O and their log-sum-exp, in f32; the most that any choice of tiles makes of them."""
        assert isinstance(case, Attention)
        count = max(shares(case, block_n) for block_n in (32, 64, 128, 256))
        return 0 if count == 1 else 4 * count * case.batch * case.sq * case.hq * (case.d + 1)

    def _kernels(self, case: Attention) -> tuple[str, ...]:
        return ("decode",)

    def _bind(self, case: Attention, tiles: dict[str, Tiles], tensors: Tensors) -> Work:
        from impls.triton.kernels import attention_launches

        return attention_launches.decode(case, tiles, tensors)


def _rows(case: Attention) -> int:
    return case.batch * case.sq * case.hq


def _input_bytes(case: Attention) -> int:
    return sum(spec.nbytes for spec in case.input_specs().values())


def _sum_bytes(case: Attention) -> int:
    return 4 * _rows(case) * case.d


def _residual_bytes(case: Attention) -> int:
    """O, unless it is an output, log-sum-exp and delta."""
    if case.direction == "fwd":
        return 0
    o = 0 if case.direction == "fwdbwd" else _rows(case) * case.d * dtype(case.dtype).bytes
    return o + 2 * 4 * _rows(case)


def _backward_bytes(case: Attention, own: int) -> int:
    """Beyond compulsory bytes: ``own``, O and dO for delta, log-sum-exp read, delta written and read."""
    if case.direction == "fwd":
        return 0
    forward_again = _input_bytes(case) if case.direction == "fwdbwd" else 0
    return own + forward_again + 2 * _rows(case) * case.d * dtype(case.dtype).bytes + 3 * 4 * _rows(case)
