"""What a person sees of a sweep while it runs: lines in a log; on a terminal a table, a bar and the time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mtabench.console import say
from mtabench.results.results_file import KEY_COLUMNS, Key, text_of
from mtabench.sweeps.estimate import shown
from mtabench.sweeps.measurer import Timing
from mtabench.sweeps.table import line, results_table

REDRAW_S = 0.25
BAR_COLUMNS = 24
THREAD = "redrawing"
PRIOR = 0.1  # of the whole guess: how much it counts against the times that were taken

Row = Mapping[str, Any]


class Pace:
    """How far a sweep is and how long it still takes: the guess of each shape, at the pace of those that ended.

    `guesses` are the seconds of each shape's cells, by their keys, in the order measured.
    """

    def __init__(self, guesses: Sequence[tuple[Sequence[Key], float]]) -> None:
        self._seconds = {key: seconds / len(keys) for keys, seconds in guesses for key in keys}
        self._shape = {key: (set(keys), seconds) for keys, seconds in guesses for key in keys}
        self._total = sum(self._seconds.values())
        self._ended_at = 0.0

    def ended(self, key: Key, elapsed: float) -> None:
        """A cell ended, so many seconds after the start. One that could not run says nothing of the pace."""
        if self._seconds.pop(key, None) is not None:
            self._ended_at = elapsed

    def at(self, elapsed: float) -> tuple[float, float]:
        """The share that is done, below 1 until all cells ended, and the seconds that are left."""
        if not self._seconds or not self._total:
            return 1.0, 0.0
        rest = sum(self._seconds.values())
        done, prior = self._total - rest, PRIOR * self._total
        pace = (self._ended_at + prior) / (done + prior)
        keys, seconds = self._shape[next(iter(self._seconds))]
        guess = seconds * len(keys & self._seconds.keys()) / len(keys)  # of the shape under way
        open_s = (elapsed - self._ended_at) / pace
        if open_s > guess / 2:  # ever slower from here on: it never stands still, nor gets beyond the guess
            open_s = guess - guess * guess / 4 / open_s
        pace = max(pace, (elapsed + prior) / (done + guess + prior))  # the shape takes longer than that
        return (done + open_s) / self._total, pace * (rest - open_s)


class _Redrawing:
    """A thread that draws a few times a second while it may, and does nothing at all while times are taken."""

    def __init__(self, draw: Callable[[], None]) -> None:
        self._draw, self._state = draw, threading.Condition()
        self._moves = self._over = False
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def may(self, moves: bool) -> None:
        """Whether it may draw from now on; on return it draws no more if not."""
        with self._state:
            self._moves = moves
            self._state.notify()

    def end(self) -> None:
        """Let the thread go."""
        with self._state:
            self._over = True
            self._state.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._state:
            while not self._over:
                if self._moves:
                    self._draw()
                self._state.wait(REDRAW_S if self._moves else None)


class PlainWatcher(AbstractContextManager):
    """Shows a sweep as plain lines, for a pipe or a log."""

    def __init__(self, console: Console, total: int, before: Sequence[Row]) -> None:
        self.rows: list[Row] = list(before)
        self._console = console
        self._total = total

    def doing(self, text: str) -> None:
        """Not shown: a log wants results."""

    def ended(self, row: Row) -> None:
        """Print the cell's line."""
        self.rows.append(row)
        say(self._console, f"[{len(self.rows)}/{self._total}] {line(row)}")

    def __exit__(self, *exception: object) -> None:
        return None


class LiveWatcher(AbstractContextManager):
    """Shows a sweep as a table that grows, with a bar, the time left and what it works on below."""

    def __init__(self, console: Console, total: int, before: Sequence[Row], pace: Pace | None = None) -> None:
        self.rows: list[Row] = list(before)
        self._console = console
        self._total = total
        self._pace = pace or Pace(())
        self._text = ""
        self._started = time.monotonic()
        # Drawn by a thread that stands still while times are taken: it would disturb them.
        self._live = Live(console=console, get_renderable=self._render, transient=True, auto_refresh=False)
        self._redrawing: _Redrawing | None = None

    def doing(self, text: str) -> None:
        """Show what the sweep works on; the bar moves unless that is Timing."""
        self._text = text
        self._live.refresh()
        if self._redrawing is not None:
            self._redrawing.may(not isinstance(text, Timing))

    def ended(self, row: Row) -> None:
        """Add the cell to the table."""
        self._count(row)
        self._live.refresh()

    def _count(self, row: Row) -> None:
        self.rows.append(row)
        self._pace.ended(tuple(text_of(row.get(name)) for name in KEY_COLUMNS), time.monotonic() - self._started)

    def _bar(self) -> Table:
        """The bar, how many cells ended, the time since the start and the time left."""
        elapsed = time.monotonic() - self._started
        share, left = self._pace.at(elapsed)
        text = f"{len(self.rows)} of {self._total} cells, {_clock(elapsed)}"
        text += f", about {shown(left)} left" if left else ""
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=1.0, completed=share, width=BAR_COLUMNS), Text(text, no_wrap=True))
        return grid

    def _render(self) -> Group:
        fits = max(1, self._console.height - 5)
        table = [results_table(self.rows, self._console.width, fits)] if self.rows else []
        return Group(*table, self._bar(), Text(self._text, no_wrap=True))

    def __enter__(self) -> LiveWatcher:
        self._live.start()
        self._redrawing = _Redrawing(self._live.refresh)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._redrawing is not None:
            self._redrawing.end()
        self._live.stop()


def _clock(seconds: float) -> str:
    """A time that runs, to the second."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}" if minutes else f"{seconds} s"


def watcher(
    console: Console, total: int, before: Sequence[Row], pace: Pace | None = None
) -> PlainWatcher | LiveWatcher:  # fmt: skip
    """The watcher that suits where the output goes; `before` are rows that the file already has."""
    return LiveWatcher(console, total, before, pace) if console.is_terminal else PlainWatcher(console, total, before)
