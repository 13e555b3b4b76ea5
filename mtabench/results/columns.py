"""Columns of a table, and which of them a terminal has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

from rich.cells import cell_len

GAP = 2  # characters between columns of Rich's tables without lines


class Ranked(Protocol):
    """A column of any table: rank 0 always stays."""

    @property
    def rank(self) -> int: ...


AnyColumn = TypeVar("AnyColumn", bound=Ranked)


class Column(NamedTuple):
    """A column of texts under a heading of one line or several."""

    heading: str
    texts: Sequence[str]
    rank: int = 0
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        return max(map(cell_len, (*self.heading.split("\n"), *self.texts)))

    @property
    def name(self) -> str:
        """The heading on one line."""
        return self.heading.replace("\n", " ")


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
