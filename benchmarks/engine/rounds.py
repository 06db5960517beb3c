"""How many rounds, and how many samples in a block: a fixed plan made from a pilot.

Owns the numbers. The plan does not change once measurement has begun: stopping when an interval looks narrow would make
the interval cover less than it says (Wald's sequential sampling bias).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# An entry takes part in at most so many seconds of a case, but in some rounds whatever they cost.
ENTRY_SECONDS, LEAST_TURNS = 15.0, 3
SLOW_CALL_SECONDS = 0.5
# Aim for the ratio's 95 % interval: half-width relative to the ratio.
HALF_WIDTH = 0.005


@dataclass(frozen=True)
class Scale:
    """The bounds of a plan.

    Attributes:
        block_s: seconds of calls that a block should hold.
        samples: least and largest number of counted calls of a block.
        rounds: least and largest number of rounds.
        pilot: rounds of the pilot; none where there is nothing to choose, and the checked calls tell what one takes.
    """

    block_s: float
    samples: tuple[int, int]
    rounds: tuple[int, int]
    pilot: int


# A block is long against a scheduler's time slice, and short enough for many rounds.
CPU = Scale(0.08, (3, 50), (8, 30), 3)
# On an H200 rounds scatter, not the calls of one: of 40 recorded ratios of calls of 0.15 ms and more, each of 8 to 30
# rounds of up to 50 calls, the first 8 rounds of their first 6 calls give the same within 0.5 %, as they do of their
# first 24, with rounds that scatter alike (0.1 to 0.3 %). Calls of 30 us need some 24 for theirs (0.5 to 1 %).
GPU = Scale(0.004, (6, 24), (8, 10), 0)
# A ceiling is the best of what was seen, not a ratio: few rounds tell.
CPU_CEILING = Scale(0.08, (3, 50), (5, 5), 1)
GPU_CEILING = Scale(0.016, (3, 24), (5, 5), 0)


def scale(device: str, workload: str) -> Scale:
    """The bounds for a workload's cases on this kind of device."""
    if workload == "ceiling":
        return CPU_CEILING if device == "cpu" else GPU_CEILING
    return CPU if device == "cpu" else GPU


@dataclass(frozen=True)
class Plan:
    """What each entry of a case gets: blocks of ``samples[i]`` counted calls in the first ``turns[i]`` rounds."""

    rounds: int
    samples: dict[str, int]
    turns: dict[str, int]


def samples_for(seconds: float, scale: Scale = CPU) -> int:
    """Counted calls of a block, for a call that takes ``seconds``."""
    if slow(seconds):
        return 1
    return int(np.clip(math.ceil(scale.block_s / max(seconds, 1e-9)), *scale.samples))


def slow(seconds: float) -> bool:
    """Whether a call takes so long that blocks of several would only cost time."""
    return seconds > SLOW_CALL_SECONDS


def plan(
    pilot: Mapping[str, Sequence[float]],
    overhead_s: float,
    available_s: float | None,
    scale: Scale = CPU,
) -> Plan:
    """The plan for one case.

    Args:
        pilot: per entry, the medians of its pilot blocks in seconds per call, or what its checked calls took.
        overhead_s: what a block costs beside its calls.
        available_s: time left for this case; None where no budget was given.
        scale: the bounds.

    Returns:
        Rounds enough for a 95 % interval of the median ratio of ±0.5 % if round medians scatter as in the pilot
        (the standard error of a median is 1.25 sigma / sqrt(n)), within the bounds and the time available; without a
        pilot as many as the bounds allow. The least number of rounds is kept even where time is short.
    """
    samples = {name: samples_for(float(np.median(values)), scale) for name, values in pilot.items()}
    scatter = max((float(np.std(v, ddof=1) / np.mean(v)) for v in pilot.values() if len(v) > 1), default=0.0)
    wanted = math.ceil((1.96 * 1.25 * math.sqrt(2) * scatter / HALF_WIDTH) ** 2) if scale.pilot else scale.rounds[1]
    if available_s is not None:
        cost = sum((samples[n] + 1) * float(np.median(v)) + overhead_s for n, v in pilot.items())
        wanted = min(wanted, int(available_s / max(cost, 1e-9)))
    count = int(np.clip(wanted, *scale.rounds))
    turns = {
        name: int(np.clip(ENTRY_SECONDS / max((samples[name] + 1) * float(np.median(v)), 1e-9), LEAST_TURNS, count))
        for name, v in pilot.items()
    }
    return Plan(count, samples, turns)
