"""The memory plan: which implementations of a case fit on the device together.

Owns the estimate and the grouping. A worker's real use is watched by the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from impls.contract import Device, Implementation
from impls.workloads.base import Case

# Two loaded input sets alternate, so that no call finds its own inputs where it left them.
INPUT_SETS = 2
# Share of the device's memory that a plan may fill; the rest is for libraries, code and the system.
USABLE = 0.8

T = TypeVar("T")


def footprint(implementation: Implementation, case: Case) -> int:
    """Bytes that one prepared implementation holds: its input sets with their outputs, and its workspace."""
    return INPUT_SETS * case.total_bytes() + implementation.workspace_bytes(case)


def shared(case: Case, variants: int, device: Device) -> int:
    """Bytes that the harness itself keeps of a case in the same memory: its input variants (on a CPU)."""
    return variants * sum(s.nbytes for s in case.input_specs().values()) if device.kind == "cpu" else 0


def kept(case: Case, variants: int) -> int:
    """Bytes that a GPU's host keeps of a case: its input variants, and a few outputs."""
    given = sum(s.nbytes for s in case.input_specs().values())
    return variants * given + INPUT_SETS * (case.total_bytes() - given)


def too_large(case: Case, device: Device, variants: int) -> str | None:
    """Why no implementation can run ``case`` here, in one sentence; None where one fits."""
    needed = INPUT_SETS * case.total_bytes() + shared(case, variants, device)
    usable = int(USABLE * device.memory_bytes)
    if needed <= usable:
        return None
    return f"It needs {needed / 2**30:,.1f} GiB and this {device.kind} has {usable / 2**30:,.1f} GiB to use."


def groups(sizes: Sequence[tuple[T, int]], always: Sequence[tuple[T, int]], usable: int) -> list[list[T]]:
    """Fewest-first-fit groups whose sizes fit ``usable`` bytes, each holding all of ``always``.

    Args:
        sizes: (item, bytes) of what is to be placed, in order.
        always: (item, bytes) of what every group contains: the baseline.
        usable: bytes that one group may take.

    Returns:
        The groups. An item too large beside ``always`` gets a group of its own, where the pool's watch decides.
    """
    base = sum(size for _, size in always)
    placed: list[tuple[list[T], int]] = []
    for item, size in sizes:
        for index, (members, used) in enumerate(placed):
            if used + size <= usable:
                placed[index] = ([*members, item], used + size)
                break
        else:
            placed.append(([*(a for a, _ in always), item], base + size))
    return [members for members, _ in placed] or [[a for a, _ in always]]
