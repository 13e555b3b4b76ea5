"""What a person sees of a sweep while it runs: lines in a log; on a terminal a table, a bar and the time left.

It is drawn where something ended or begins, never by a thread: that would disturb what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mtabench.console import say
from mtabench.escaping import printable
from mtabench.results.results_file import KEY_COLUMNS, Key, text_of
from mtabench.sweeps.estimate import shown
from mtabench.sweeps.table import line, results_table

REDRAW_S = 0.2
BAR_COLUMNS = 24
PRIOR = 0.1  # of the whole guess: how much it counts against the times that were taken
MOST_PLACES = 16  # lines of workers; more are counted

Row = Mapping[str, Any]


class Watcher(AbstractContextManager):
    """Shows a sweep of `total` cells as plain lines, for a pipe or a log; `before` are rows that the file already has.

    `guesses` are the seconds of the cells to measure.
    """

    def __init__(
        self, console: Console, total: int, before: Sequence[Row], guesses: Mapping[Key, float] | None = None
    ) -> None:
        self.rows: list[Row] = list(before)
        self._console, self._total = console, total
        self._left = dict(guesses or {})
        self._guess = sum(self._left.values())
        self._started = time.monotonic()

    def doing(self, text: str) -> None:
        """Not shown: a log wants results."""

    def working(self, place: str, text: str) -> None:
        """The same of a worker, which has ended if it does nothing."""

    def said(self, text: str) -> None:
        """Print it."""
        say(self._console, text)

    def ended(self, row: Row) -> None:
        """Print the cell's line, with the worker that measured it."""
        self.rows.append(row)
        worker = text_of(row.get("worker"))
        self.said(f"[{len(self.rows)}/{self._total}] {line(row)}" + (f" [{worker}]" if worker else ""))

    def refresh(self) -> None:
        """Lines stay as they are."""

    def __exit__(self, *exception: object) -> None:
        return None


class LiveWatcher(Watcher):
    """Shows a sweep as a table that grows, with what it or each worker does, a bar and the time left below."""

    def __init__(
        self, console: Console, total: int, before: Sequence[Row], guesses: Mapping[Key, float] | None = None
    ) -> None:
        super().__init__(console, total, before, guesses)
        self._working: dict[str, str] = {}
        self._drawn = 0.0
        self._live = Live(console=console, get_renderable=self._render, transient=True, auto_refresh=False)

    def doing(self, text: str) -> None:
        """Show what the sweep works on."""
        self._working[""] = text
        self._live.refresh()

    def working(self, place: str, text: str) -> None:
        """Show it in the worker's line when it is drawn again, or take its line away."""
        self._working[place] = text
        if not text:
            del self._working[place]

    def ended(self, row: Row) -> None:
        """Add the cell to the table."""
        self.rows.append(row)
        self._left.pop(tuple(text_of(row.get(name)) for name in KEY_COLUMNS), None)

    def refresh(self) -> None:
        """Draw, not too often."""
        now = time.monotonic()
        if now - self._drawn >= REDRAW_S:
            self._live.refresh()
            self._drawn = now

    def time_left(self, elapsed: float) -> tuple[float, float]:
        """The share that is done, and the seconds that are left: the guess, at the pace of what ended."""
        rest = sum(self._left.values())
        if not rest:
            return 1.0, 0.0
        done, prior = self._guess - rest, PRIOR * self._guess
        pace = (elapsed + prior) / (done + prior) if done else 1.0
        return done / self._guess, pace * rest

    def _bar(self) -> Table:
        """The bar, how many cells ended, the time since the start and the time left."""
        elapsed = time.monotonic() - self._started
        share, left = self.time_left(elapsed)
        text = f"{len(self.rows)} of {self._total} cells, {_clock(elapsed)}"
        text += f", about {shown(left)} left" if left else ""
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=1.0, completed=share, width=BAR_COLUMNS), Text(text, no_wrap=True))
        return grid

    def _render(self) -> Group:
        room = max(4, self._console.height - 4)
        working = sorted(self._working.items())[: min(MOST_PLACES, room // 2)]
        lines = [
            Text(printable(f"{place}: {text}" if place else text), no_wrap=True) for place, text in working
        ]  # fmt: skip
        if more := len(self._working) - len(working):
            lines.append(Text(f"and {more} more workers"))
        fits = max(1, room - len(lines) - 1)
        # The last rows alone: of a hundred thousand, looking at all takes longer than measuring one.
        table = [results_table(self.rows[-fits:], self._console.width, fits)] if self.rows else []
        return Group(*table, self._bar(), *lines)

    def __enter__(self) -> LiveWatcher:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()


def _clock(seconds: float) -> str:
    """A time that runs, to the second."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}" if minutes else f"{seconds} s"


def make_watcher(
    console: Console, total: int, before: Sequence[Row], guesses: Mapping[Key, float] | None = None
) -> Watcher:
    """The watcher that suits where the output goes."""
    return (LiveWatcher if console.is_terminal else Watcher)(console, total, before, guesses)
