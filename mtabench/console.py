"""What the person reads on standard output: how wide it is, and lines that come out as they are."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mtabench.escaping import in_log, printable

PIPE_WIDTH = 160


def make_console() -> Console:
    """A console as wide as the terminal; in a pipe or a log, wide enough for the table."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=PIPE_WIDTH)


def say(console: Console, text: str) -> None:
    """Lines as they are: paths are neither wrapped nor coloured, so that they can be copied.

    Nothing in them is obeyed by a terminal or by GitHub's runner.
    """
    shown = "\n".join(map(printable, text.split("\n")))
    console.print(in_log(shown), soft_wrap=True, markup=False, highlight=False)


def significant(value: float, digits: int = 4) -> str:
    """A number with so many digits that count, never in the form 1e+03."""
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def plain_table(first: str, others: Sequence[str]) -> Table:
    """A table without lines: the first column to the left, the others, numbers, to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
