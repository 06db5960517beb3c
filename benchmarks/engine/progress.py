"""What a run shows while it goes on. Drawn between blocks only: a redraw during a timed block would take its core.

Owns the display; it decides nothing.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bars,
)


class Progress:
    """One bar over the cases of a run, one over the blocks of the present case; in a log, a line for each case."""

    def __init__(self, console: Console, cases: int) -> None:
        self._begun, self._done, self._total = time.monotonic(), 0, cases
        self._bars = Bars(
            TextColumn("[bold]{task.fields[title]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.description}"),
            console=console,
            auto_refresh=False,
            speed_estimate_period=86_400,  # seconds; cases take longer than rich's 30, which then knows no time left
        )
        self._cases = self._bars.add_task("", title="cases ", total=cases)
        self._blocks = self._bars.add_task("", title="blocks", total=None)

    def __enter__(self) -> Progress:
        self._bars.start()
        self._bars.advance(self._cases, 0)  # time left counts from here, so that it is known after the first case
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """What is being done now."""
        self._bars.update(self._blocks, description=text)
        self._bars.refresh()

    def print(self, text: str) -> None:
        """A line that stays."""
        self._bars.console.print(text, highlight=False)

    def measuring(self, case: str, blocks: int) -> None:
        """The measurement of ``case`` begins; it is ``blocks`` long."""
        self._bars.reset(self._blocks, total=blocks, description=f"measuring {case}")
        self._bars.refresh()

    def advance(self) -> None:
        """A block is done."""
        self._bars.update(self._blocks, advance=1, refresh=True)

    def case_done(self, case: str, told: str) -> None:
        """A case is done; ``told``: how it ended, in a few words."""
        self._bars.update(self._cases, advance=1, refresh=True)
        self._done += 1
        if not self._bars.console.is_terminal:
            spent = time.monotonic() - self._begun
            left = spent / self._done * (self._total - self._done)
            self.print(f"{self._done}/{self._total} {case}: {told}; {spent:.0f} s, some {left:.0f} s left")
