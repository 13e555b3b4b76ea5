"""What a person sees of a sweep by several workers: the cells as they end, and what each worker does."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.text import Text

from mtabench.console import say
from mtabench.escaping import printable
from mtabench.results.results_file import text_of
from mtabench.sweeps.table import Row, line, results_table
from mtabench.sweeps.watching import LiveWatcher, Pace, PlainWatcher

REDRAW_S = 0.2
MOST_PLACES = 16  # lines of workers; more are counted


class CrewPlainWatcher(PlainWatcher):
    """Plain lines, each with the worker that measured it."""

    def working(self, place: str, text: str) -> None:
        """Not shown: a log wants results."""

    def said(self, text: str) -> None:
        """Print it."""
        say(self._console, text)

    def ended(self, row: Row) -> None:
        """Print the cell's line."""
        self.rows.append(row)
        self.said(f"[{len(self.rows)}/{self._total}] {line(row)} [{text_of(row.get('worker'))}]")

    def refresh(self) -> None:
        """Lines stay as they are."""


class CrewLiveWatcher(LiveWatcher):
    """The table of a sweep, and below it a line a worker. Nothing is timed in this process: it draws when it likes."""

    def __init__(self, console: Console, total: int, before: list[Row], pace: Pace | None = None) -> None:
        self._working: dict[str, str] = {}  # the table is drawn once while it is made
        self._drawn = 0.0
        super().__init__(console, total, before, pace)

    def working(self, place: str, text: str) -> None:
        """Show it in the worker's line, or take its line away."""
        if text:
            self._working[place] = text
        else:
            self._working.pop(place, None)

    def said(self, text: str) -> None:
        """Print it above the table."""
        say(self._console, text)

    def ended(self, row: Row) -> None:
        """Add the cell to the table."""
        self._count(row)

    def refresh(self) -> None:
        """Draw, not too often."""
        now = time.monotonic()
        if now - self._drawn >= REDRAW_S:
            self._live.refresh()
            self._drawn = now

    def _render(self) -> Group:
        room = max(4, self._console.height - 4)
        places = sorted(self._working)[: min(MOST_PLACES, room // 2)]
        lines = [Text(printable(f"{place}: {self._working[place]}"), no_wrap=True) for place in places]
        more = len(self._working) - len(places)
        if more:
            lines.append(Text(f"and {more} more workers"))
        fits = max(1, room - len(lines) - 1)
        # The last rows alone: of a hundred thousand, looking at all takes longer than measuring one.
        table = [results_table(self.rows[-fits:], self._console.width, fits)] if self.rows else []
        return Group(*table, *lines, self._bar())


CrewWatcher = CrewPlainWatcher | CrewLiveWatcher


def crew_watcher(console: Console, total: int, before: list[Row], pace: Pace | None = None) -> CrewWatcher:
    """The watcher that suits where the output goes; `before` are rows that the file already has."""
    if console.is_terminal:
        return CrewLiveWatcher(console, total, before, pace)
    return CrewPlainWatcher(console, total, before)
