"""What asv follows of a result: time, ratio to the baseline, share of the limit, error, compilation.

Owns the metrics' values. All are views of one measurement: times, ratios and fractions are one figure per round, so
that asv's intervals rest on rounds, as the analysis's do. It knows nothing of asv's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from analysis import roofline, statistics
from analysis.frame import Frame

#: One figure per round; a single figure; or None where it failed. A metric that does not apply is left out.
Value: TypeAlias = list[float] | float | None
Values: TypeAlias = dict[str, Value]

FAILURES = ("wrong", "failed", "crashed", "timeout")


def of(frame: Frame) -> dict[int, Values]:
    """The metrics of every result in ``frame`` that has any, by the result's number. Replicas above 0 have none.

    - ``time``: seconds, a block's median per round;
    - ``ratio``: time over the baseline's, per round; not of the baseline itself;
    - ``sol_fraction``: the least time that the measured ceilings allow over the time, per round;
    - ``error``: the largest error over its tolerance, also of what is wrong;
    - ``compile``: seconds that ``prepare`` took.

    Shares and ratios are rounded to five digits: asv shows all that there are. A result that is wrong, failed, crashed
    or ran out of time has None for what it should have had.
    """
    timed = frame.results[frame.results["rounds"] > 0]
    blocks = frame.blocks[frame.blocks["result"].isin(timed.index)]
    times = dict(_by_result(blocks["result"].to_numpy(), blocks["median_us"].to_numpy(float) * 1e-6))
    pairs = statistics.paired_ratios(frame)
    ratios = dict(_by_result(pairs["result"].to_numpy(), np.exp(pairs["log_ratio"].to_numpy(float))))
    typical = blocks.groupby("result")["median_us"].median()
    limits = {
        number: place.sol_fraction * typical[number] * 1e-6
        for number, place in roofline.placements(frame, typical).items()
        if place.sol_fraction is not None
    }
    found: dict[int, Values] = {}
    for row in frame.results[frame.results["replica"] == 0].itertuples():
        values = _values(row, times.get(row.Index), ratios.get(row.Index), limits.get(row.Index))
        if values:
            found[row.Index] = values
    return found


def _values(
    row: Any,
    times: npt.NDArray[np.float64] | None,
    ratios: npt.NDArray[np.float64] | None,
    limit_s: float | None,
) -> Values:
    error = _rounded(row.error_worst) if math.isfinite(row.error_worst) else None
    if row.status in FAILURES:
        failed: Values = dict.fromkeys(("time", "ratio", "sol_fraction", "error", "compile"))
        return failed | {"error": error if row.status == "wrong" else None}
    values: Values = {}
    if times is not None:
        values["time"] = times.tolist()
        if limit_s is not None:
            values["sol_fraction"] = [_rounded(limit_s / t) for t in times]
    if ratios is not None:
        values["ratio"] = [_rounded(ratio) for ratio in ratios]
    if row.status in ("ok", "checked"):
        if error is not None:
            values["error"] = error
        if not math.isnan(row.prepare_s):
            values["compile"] = float(row.prepare_s)
    return values


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _by_result(
    result: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """(result, its values in the order in which they came), for every result."""
    order = np.argsort(result, kind="stable")
    ids, starts = np.unique(result[order], return_index=True)
    return zip(ids.tolist(), np.split(values[order], starts[1:]), strict=True) if len(ids) else iter(())
