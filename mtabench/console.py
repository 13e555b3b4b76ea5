"""What the person reads on standard output: lines, numbers, and how many columns a terminal has room for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from rich.console import Console
from rich.status import Status

from mtabench.escaping import in_log, printable

PIPE_WIDTH = 160
SMALL_RATE = 1e-3  # TFLOP/s
GAP = 2  # characters between columns of Rich's tables without lines


class Ranked(Protocol):
    """A column of any table: rank 0 always stays."""

    @property
    def rank(self) -> int: ...


AnyColumn = TypeVar("AnyColumn", bound=Ranked)


def make_console() -> Console:
    """A console as wide as the terminal; in a pipe or a log, wide enough for the table."""
    console = Console()
    return console if has_width(console) else Console(width=PIPE_WIDTH)


def has_width(console: Console) -> bool:
    """Whether somebody looks at a width; what goes to a pipe or a log is searched, and its sentences stay whole."""
    return console.is_terminal or "COLUMNS" in os.environ


def say(console: Console, text: str) -> None:
    """Lines as they are: paths are neither wrapped nor coloured, so that they can be copied.

    Nothing in them is obeyed by a terminal or by GitHub's runner.
    """
    shown = "\n".join(map(printable, text.split("\n")))
    console.print(in_log(shown), soft_wrap=True, markup=False, highlight=False, emoji=False)


def show_step(status: Status, line: str) -> None:
    """What a command works on: in its status on a terminal, as a line on standard error in a log."""
    if status.console.is_terminal:
        status.update(line)
    else:
        print(line, file=sys.stderr, flush=True)


def significant(value: float, digits: int = 4, *, zeros: bool = False) -> str:
    """A number with so many digits that count, with `zeros` also those at its end, and never in the form 1e+03."""
    if value >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".") if zeros else f"{value:.{digits}g}"


def flop_unit(tflops: Iterable[float]) -> tuple[str, float]:
    """The unit for rates given in TFLOP/s, and the factor to it: GFLOP/s if one would be less than a thousandth."""
    return ("GFLOP/s", 1e3) if min((rate for rate in tflops if rate), default=1.0) < SMALL_RATE else ("TFLOP/s", 1.0)


def leave_out(
    columns: Sequence[AnyColumn], fits: Callable[[list[AnyColumn]], bool]
) -> tuple[list[AnyColumn], list[AnyColumn]]:
    """The columns that stay, and those left out, the highest rank first, until the others fit or have no rank."""
    kept, left_out = list(columns), []
    while not fits(kept):
        worst = max(kept, key=lambda column: column.rank)
        if not worst.rank:
            break
        kept.remove(worst)
        left_out.append(worst)
    return kept, left_out
