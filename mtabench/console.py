"""What the person reads on standard output: how wide it is, and lines that come out as they are."""

from __future__ import annotations

import os

from rich.console import Console

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
