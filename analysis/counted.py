"""The table of counted traffic: what Nsight Compute saw of each call, beside what the case makes compulsory.

Owns the columns and their form for a terminal. Counting is ``benchmarks.profile``'s; what counts mean for a class is
``analysis.roofline``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from analysis import roofline
from analysis.table import printable

_HEADINGS = ("implementation", "DRAM read", "written", "of it after", "of compulsory", "L2", "FLOP/instr.", "kernels")
_LEGEND = (
    "MB (1e6 bytes) of one call on a cold L2. written: to DRAM, with the lines that were dirty in L2 when the call's "
    "kernels had ended (of it after). of compulsory: read and written over each input once and each output once. "
    "FLOP/instr.: nominal FLOPs over the tensor instructions of all warps."
)


def rich_table(lines: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Lines of kind ``profile`` for a terminal, one section per case, in their order."""
    grid = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        grid.add_column(heading, justify="left" if heading == "implementation" else "right", no_wrap=True)
    for case in dict.fromkeys(line["case"] for line in lines):
        grid.add_row(Text(printable(case), style="bold"))
        for line in (line for line in lines if line["case"] == case):
            grid.add_row(*(Text(printable(cell)) for cell in _cells(line)))
    reasons = [
        f"{line['impl']}, {line['case']}: {line['status']}. {line['reason']}" for line in lines if line["reason"]
    ]
    notes = [Text(printable(reason)) for reason in reasons]
    return Group(grid, Text(), *notes, Text(_LEGEND, style="dim"))


def _cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    counters = line["counters"]
    if counters is None:
        return (f"  {line['impl']}", line["status"])
    work = roofline.work(line["case"])
    written = counters["dram_write_bytes"] + counters["write_back_bytes"]
    tensor = counters["tensor_instructions"]["all"]
    return (
        f"  {line['impl']}",
        f"{counters['dram_read_bytes'] / 1e6:.1f}",
        f"{written / 1e6:.1f}",
        f"{counters['write_back_bytes'] / 1e6:.1f}",
        f"{(counters['dram_read_bytes'] + written) / work.compulsory_bytes:.3f}",
        f"{counters['l2_bytes'] / 1e6:.1f}",
        f"{work.flops / tensor:.0f}" if tensor else "",
        str(len(line["kernels"])),
    )
