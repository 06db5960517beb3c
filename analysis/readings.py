"""What a GPU's results are read by: time and ratio beside clock, power and counted traffic, case by case, in Markdown.

Owns the tables that pages such as docs/h200.md quote, so that no figure there is copied by hand:

    python -m analysis.readings results/records/h200 [--run RUN]

Ratios, intervals and shares of the limit are ``analysis.table``'s. Added are the medians over a result's rounds of the
clock and the power that the harness read, and what follows from them:

``of its clock``
    The rate per cycle over the measured ceiling's rate per cycle: how busy the units were, whatever power left of the
    clock. Only where the clock was read over little more than the call (``LONG_US``), and some per cent too low where a
    stack is slow to notice the end, and the clock therefore high (XLA, Pallas): to be compared within a stack.
``power``
    Sustained: by the board's energy counter. In burst it is one reading beside a block, mostly of an idle device, and
    left out.
``DRAM``
    What Nsight Compute counted of one call on a cold L2, over the compulsory bytes.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import frame as frames
from analysis import roofline, table
from analysis.frame import Frame

#: The clock is read from the gate's opening until the host finds the device idle, 20 us and more after the call's end.
LONG_US = 200.0
_HEADINGS = ("entry", "time", "ratio", "rate", "of limit", "bound by", "clock", "of its clock", "power", "DRAM", "note")
_REASON = 90


def tables(frame: Frame, run: str | None = None) -> str:
    """Every case of the latest results, or of one run, in Markdown: per regime a section, per case a table."""
    made = table.tabulate(frame, run=run)
    made = made[made["workload"] != "ceiling"]
    medians = frame.blocks.groupby("result")[["clock_mhz", "power_w"]].median()
    made = made.join(medians.reindex(made.index))
    roofs = roofline.ceilings(frame)
    lines: list[str] = []
    for (machine, device, threads, regime), section in made.groupby(
        ["machine", "device", "threads", "regime"], sort=False, dropna=False
    ):
        below = roofs.get((machine, device, threads, regime))
        lines += [f"## {machine}, {regime}", "", *_ceilings(below)]
        for case, rows in section.groupby("case", sort=False):
            lines += ["", f"### {case}{_noise(rows)}", "", f"| {' | '.join(_HEADINGS)} |"]
            lines.append("|" + "---|" * len(_HEADINGS))
            lines += [f"| {' | '.join(_cells(row, below))} |" for row in rows.to_dict("records")]
        lines.append("")
    return "\n".join(lines)


def _ceilings(roofs: roofline.Ceilings | None) -> list[str]:
    """The ceilings that the section's shares are of, with their clocks."""
    if roofs is None:
        return ["No ceilings were measured."]
    lines = ["| ceiling | value | clock |", "|---|---|---|"]
    for probe in roofs.probes:
        work = probe.case.split(":")[1]
        value = f"{probe.value * 1e6:.2f} us" if work == "launch" else f"{probe.value / 1e12:.4g}e12/s"
        lines.append(f"| {probe.case} | {value} | {_number(probe.clock_mhz, '.0f', ' MHz')} |")
    return lines


def _noise(rows: pd.DataFrame) -> str:
    """The case's A/A ratio, for its heading."""
    found = rows["aa_ratio"].dropna()
    return f" (A/A {found.iloc[0]:.4f})" if len(found) else ""


def _cells(row: dict[str, Any], roofs: roofline.Ceilings | None) -> list[str]:
    if not row["time_us"] > 0:
        return [row["impl"], row["status"], *[""] * (len(_HEADINGS) - 3), str(row["reason"] or "")[:_REASON]]
    work = roofline.work(row["case"])
    ratio = ""
    if row["ratio"] > 0:
        ratio = f"{row['ratio']:.4f}"
        if row["ratio_low"] > 0:
            ratio += f" [{row['ratio_low']:.4f}, {row['ratio_high']:.4f}]"
        ratio += f" {row['verdict']}"
    memory = row["sol_roof"] == "memory"
    rate = f"{row['gb_per_s'] / 1e3:.3f} TB/s" if memory else f"{row['tflop_per_s']:.1f} TFLOP/s"
    traffic = ""
    if row["counted_bytes"] > 0:
        traffic = f"{row['counted_bytes'] / 1e6:.1f} MB, {row['counted_bytes'] / work.compulsory_bytes:.2f}"
    return [
        row["impl"],
        f"{row['time_us']:.5g} us",
        ratio or str(row["verdict"] or ""),
        rate,
        _number(row["sol_fraction"] * 100, ".1f", " %"),
        str(row["bound_by"] or ""),
        _number(row["clock_mhz"], ".0f", " MHz"),
        _number(100 * _of_clock(row, roofs), ".1f", " %"),
        _number(row["power_w"], ".0f", " W") if row["regime"] == "sustained" else "",
        traffic,
        row["flags"][:_REASON],
    ]


def _of_clock(row: dict[str, Any], roofs: roofline.Ceilings | None) -> float:
    """FLOPs per cycle over those of the dtype's rate probe; NaN where one of them or its clock is not known."""
    if roofs is None or row["time_us"] < LONG_US or row["sol_roof"] != "compute":
        return math.nan
    work = roofline.work(row["case"])
    probes = [p for p in roofs.probes if p.case.startswith(f"ceiling:rate:{work.dtype}")]
    per_cycle = max((p.value / p.clock_mhz for p in probes), default=math.nan)
    return float(row["tflop_per_s"] * 1e12 / row["clock_mhz"] / per_cycle)


def _number(value: float, form: str, unit: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}{unit}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="+", help="records files or folders")
    parser.add_argument("--run", help="only this run's results (default: the latest of every case and entry)")
    arguments = parser.parse_args()
    print(tables(frames.load(arguments.path), arguments.run))


if __name__ == "__main__":
    main()
