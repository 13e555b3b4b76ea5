"""What a person sees of a sweep while it runs: a line a cell; on a terminal a bar, the time left and what it works on.

The bar is drawn where something ended or begins, never by a thread: that would disturb what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mtabench.console import say
from mtabench.escaping import printable
from mtabench.results.results_file import Key, key_of_row, text_of
from mtabench.sweeps.table import line

REDRAW_S = 0.2
LONGEST_CELL_S = 3600.0  # cells of the last so many seconds say how long the others take

Row = Mapping[str, Any]


class Watcher(AbstractContextManager):
    """Shows a sweep of `total` cells; `before` are rows that the file already has, `guesses` seconds of the others."""

    def __init__(
        self, console: Console, total: int, before: Sequence[Row], guesses: Mapping[Key, float] | None = None
    ) -> None:
        self.rows: list[Row] = list(before)
        self._console, self._total = console, total
        self._guesses = dict(guesses or {})
        self._drawn = 0.0
        columns = BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        self._progress = Progress(
            *columns, console=console, auto_refresh=False, transient=True, speed_estimate_period=LONGEST_CELL_S,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._bar = self._progress.add_task("", total=sum(self._guesses.values()) or None)

    def doing(self, text: str) -> None:
        """Show what the sweep works on; a log wants results."""
        self._progress.update(self._bar, description=escape(printable(text)), refresh=True)

    def working(self, place: str, text: str) -> None:
        """The same of a worker, when the bar is drawn again."""
        self._progress.update(self._bar, description=escape(printable(f"{place}: {text}")) if text else "")

    def said(self, text: str) -> None:
        """Print it."""
        say(self._console, text)

    def ended(self, row: Row) -> None:
        """Print the cell's line, with the worker that measured it."""
        self.rows.append(row)
        worker = text_of(row.get("worker"))
        self.said(f"[{len(self.rows)}/{self._total}] {line(row)}" + (f" [{worker}]" if worker else ""))
        key = key_of_row({name: text_of(value) for name, value in row.items()})
        self._progress.advance(self._bar, self._guesses.pop(key, 0.0))

    def refresh(self) -> None:
        """Draw, not too often."""
        now = time.monotonic()
        if now - self._drawn >= REDRAW_S:
            self._progress.refresh()
            self._drawn = now

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
