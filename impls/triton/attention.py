"""Attention in Triton: which variant takes which case, and what it moves.

Owns the decisions; tiles are in ``attention_tiles``, launches and kernels in ``kernels/attention_*.py``. Backward
passes keep the forward pass's O and log-sum-exp as residuals.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from impls.contract import Device, Implementation, Program
from impls.triton.attention_tiles import Choice, Tiles, choose, shares, space, tuned_as
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
        config: dict[str, Any] = {name: asdict(tile) | {"from": origin} for name, (tile, origin) in chosen.items()}
        tiles = {kernel: tile for kernel, (tile, _) in chosen.items()}
        return LaunchedProgram(case, device, self._bind(case, tiles), config)

    def space(self, case: Attention) -> list[Choice]:
        """What tuning tries on Hopper: the kernels of the forward or of the backward pass alone, all combinations."""
        kernels = [k for k in self._kernels(case) if tuned_as(k, case) == case]
        options = [[(kernel, tiles) for tiles in space(kernel, case, "sm_90")] for kernel in kernels]
        return [Choice(combination) for combination in product(*options) if combination]

    def build(self, case: Attention, device: Device, choice: Choice) -> Program:
        """The case with the given tiles, to be tuned."""
        from impls.triton.kernels.program import LaunchedProgram

        tiles = self._completed(case, device, choice)
        return LaunchedProgram(case, device, self._bind(case, tiles), choice.config(), describe=False)

    def compile_ahead(self, case: Attention, choice: Choice, arch: str) -> list[Any]:
        """Triton's compiled kernels of a call, for a device that need not be there."""
        from impls.triton.kernels import ahead
        from impls.triton.kernels.program import LaunchedProgram

        ahead.use(arch)
        tiles = self._completed(case, Device("cuda", "", arch, 1, 0), choice)
        return LaunchedProgram.compile_ahead(case, self._bind(case, tiles))

    def _completed(self, case: Attention, device: Device, choice: Choice) -> dict[str, Tiles]:
        """The tiles of all kernels: those of the choice, and of the others what is chosen for them."""
        return {kernel: choose(kernel, case, device)[0] for kernel in self._kernels(case)} | dict(choice.tiles)

    def traffic_bytes(self, case: Case) -> int:
        """Backward the inputs are read by two kernels, O and dO by a third for delta; log-sum-exp and delta besides."""
        assert isinstance(case, Attention)
        if case.direction == "fwd":
            return case.compulsory_bytes()
        inputs = sum(spec.nbytes for spec in case.input_specs().values())
        passes = 2 if case.direction == "fwdbwd" else 1
        rows = case.batch * case.sq * case.hq
        return case.compulsory_bytes() + passes * inputs + 2 * rows * case.d * dtype(case.dtype).bytes + 6 * 4 * rows

    def workspace_bytes(self, case: Case) -> int:
        """Of a backward pass log-sum-exp, delta, and O where it is no output."""
        assert isinstance(case, Attention)
        if case.direction == "fwd":
            return 0
        o = case.d * dtype(case.dtype).bytes if case.direction == "bwd" else 0
        return case.batch * (case.sq + 3) * case.hq * (o + 2 * 4)

    @abstractmethod
    def _kernels(self, case: Attention) -> tuple[str, ...]:
        """The kernels of the case that have tiles to choose."""

    def _bind(self, case: Attention, tiles: dict[str, Tiles]) -> Callable[[Tensors], Work]:
        """From tensors to the launches of a call."""
        from impls.triton.kernels import attention_launches

        work = getattr(attention_launches, self.name.partition(".")[2])
        return lambda tensors: work(case, tiles, tensors)


class Flash(_Attention):
    """FlashAttention with loads through pointers."""

    name: ClassVar[str] = "triton.flash"
    summary: ClassVar[str] = "fused attention, loads through pointers (cp.async); dQ in a kernel of its own"

    def _kernels(self, case: Attention) -> tuple[str, ...]:
        return ("forward",) if case.direction == "fwd" else ("forward", "backward_kv", "backward_q")


class FlashTma(_Attention):
    """FlashAttention with loads through tensor descriptors."""

    name: ClassVar[str] = "triton.flash_tma"
    summary: ClassVar[str] = "fused attention, loads through descriptors (TMA); dQ in a kernel of its own"

    def refuses(self, case: Case, device: Device) -> str | None:
        """As its kind, devices without TMA, and rows that it cannot stride over."""
        assert isinstance(case, Attention)
        if device.arch.startswith("sm_") and int(device.arch[3:]) < 90:
            return f"{device.arch} has no TMA: descriptors would be taken apart into loads that spill registers."
        if case.d * dtype(case.dtype).bytes % 16:
            return f"TMA steps over rows by multiples of 16 bytes, which D = {case.d} of {case.dtype} is not."
        return super().refuses(case, device)

    def _kernels(self, case: Attention) -> tuple[str, ...]:
        return ("forward_tma",) if case.direction == "fwd" else ("forward_tma", "backward_kv_tma", "backward_q_tma")


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
