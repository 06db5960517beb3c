"""Series of cases along one size: square GEMMs over n, GEMMs over their rows, attention over sequence or context.

Owns which cases belong together and what their axis is. The values are the results' own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pandas as pd

from impls.workloads.attention import Attention
from impls.workloads.base import CaseError, parse_case
from impls.workloads.gemm import Gemm

LEAST_POINTS = 3


def of(made: pd.DataFrame) -> list[dict[str, Any]]:
    """The series in ``made`` (of ``analysis.table.tabulate``, with ``place``) that have at least three timed sizes.

    Returns:
        ``place``, ``workload``, ``title`` (the case ids with the size left open), ``axis`` (what the size is),
        ``size`` and ``case``, ascending; square GEMMs and whole sequences first, the longest first.
    """
    timed = made.loc[(made["time_us"] > 0) & (made["workload"] != "ceiling"), ["place", "case"]].drop_duplicates()
    found: dict[tuple[int, str, str], dict[int, str]] = defaultdict(dict)
    for place, case in timed.itertuples(index=False):
        for title, axis, size in _families(case):
            found[int(place), title, axis][size] = case
    listed = [
        {
            "place": place,
            "workload": title.partition(":")[0],
            "title": title,
            "axis": axis,
            "size": sorted(cases),
            "case": [cases[size] for size in sorted(cases)],
        }
        for (place, title, axis), cases in found.items()
        if len(cases) >= LEAST_POINTS
    ]
    order = [_SQUARE, _SEQUENCE, _ROWS, _CONTEXT]
    return sorted(listed, key=lambda s: (s["place"], order.index(s["axis"]), -len(s["size"]), s["title"]))


_SQUARE = "n = M = N = K"
_ROWS = "M (rows of A)"
_SEQUENCE = "sequence length"
_CONTEXT = "keys (context length)"


def _families(case_id: str) -> list[tuple[str, str, int]]:
    """The series that a case may belong to: title, axis, and its size there."""
    try:
        case = parse_case(case_id)
    except CaseError:
        return []
    if isinstance(case, Gemm) and not case.groups:
        families = [(re.sub(r"(?<=[:x])\d+(?=x\d+x\d+:)", "M", case_id, count=1), _ROWS, case.m)]
        if case.m == case.n == case.k:
            families.append((re.sub(r"(?<=[:x])\d+x\d+x\d+(?=:)", "nxnxn", case_id, count=1), _SQUARE, case.m))
        return families
    if isinstance(case, Attention):
        if case.sq == case.sk:
            return [(re.sub(r"s\d+(?=d\d)", "sS", case_id, count=1), _SEQUENCE, case.sq)]
        return [(re.sub(r"k\d+(?=d\d)", "kS", case_id, count=1), _CONTEXT, case.sk)]
    return []
