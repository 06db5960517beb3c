"""The coverage table of the README: what each implementation covers, on which device, and how that was exercised.

Owns the table. It is made from the registry (what there is) and the committed records (what ran);
``python -m analysis.coverage`` writes it between its marks in README.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.engine import records
from impls import registry
from impls.contract import Implementation

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"
DEVICES = ("cpu", "cuda")


def exercised(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(implementation, workload, device kind) -> how many cases were right and timed, and how many right, not timed."""
    kinds: dict[str, str] = {}
    timed: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    judged: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for line in lines:
        if line["kind"] == "run":
            kinds[line["run"]] = line["device"]["kind"]
        elif line["kind"] == "result" and line["status"] in ("ok", "checked"):
            place = (line["impl"], line["case"].partition(":")[0], kinds[line["run"]])
            (timed if line["status"] == "ok" else judged)[place].add(line["case"])
    return {place: (len(timed[place]), len(judged[place] - timed[place])) for place in {*timed, *judged}}


def table(implementations: Iterable[Implementation], seen: dict[tuple[str, str, str], tuple[int, int]]) -> str:
    """The table in Markdown: one row per stack and workload, variants and how they were exercised per device kind.

    Timed or judged says in how many cases of the records; ``conformance`` that no record has it and the conformance
    tests judge it there, which run on CPUs; ``-`` that nothing has run it.
    """
    rows: dict[tuple[str, str], list[Implementation]] = defaultdict(list)
    for one in implementations:
        if one.workload != "ceiling":
            rows[one.stack, one.workload].append(one)
    lines = ["| stack | workload | on a CPU | on a GPU |", "|---|---|---|---|"]
    for (stack, workload), variants in sorted(rows.items()):
        cells = [_cell(variants, workload, kind, seen) for kind in DEVICES]
        lines.append(f"| {stack} | {workload} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(
    variants: list[Implementation], workload: str, kind: str, seen: dict[tuple[str, str, str], tuple[int, int]]
) -> str:
    parts = []
    for one in variants:
        if kind in one.devices:
            timed, judged = seen.get((one.name, workload, kind), (0, 0))
            if timed or judged:
                how = f"{timed} timed" if timed else f"{judged} judged"
            else:
                how = "conformance" if kind == "cpu" else "-"
            if kind in one.simulated_on:
                how = f"simulated: {how}"
            parts.append(f"{one.name.partition('.')[2]} ({how})")
    return ", ".join(parts) or "-"


def written(readme: str, made: str) -> str:
    """``readme`` with the table between its marks replaced.

    Raises:
        ValueError: the marks are missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no place for the table: put {BEGIN} and {END} into it.")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    """Write the table into README.md."""
    made = table(registry.implementations(), exercised(records.read(ROOT / "results" / "records").lines))
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
