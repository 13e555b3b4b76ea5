"""How a column is shown in a table of texts: by `show` and `report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtabench.console import flop_unit, significant
from mtabench.measuring.settled import UNSETTLED, half_interval_of, mark_of, meaning
from mtabench.problem.case import CACHED_PASSES

MOST_CHARACTERS = 40  # of a text from a file in one place of a table

Row = Mapping[str, Any]
Text = Callable[[Row], str]


@dataclass(frozen=True, slots=True)
class Shown:
    """A column in tables: `text` gives what stands in a row, empty where nothing is known.

    Rank 0 stays in the narrowest table; the highest rank is left out first. `decode_rank` is that in a table of decode
    alone. Columns stand in the order of `place`, and of the file where that is equal. `instead` is what some rows have
    in its stead.
    """

    heading: str
    unit: str
    rank: int
    text: Text
    place: int = 5
    decode_rank: int | None = None
    right: bool = True
    legend: Callable[[Sequence[Row]], str] = lambda rows: ""
    wanted: Callable[[Sequence[Row]], bool] = lambda rows: True
    instead: Callable[[Sequence[Row]], Shown | None] = lambda rows: None


def number(name: str, digits: int = 3, factor: float = 1.0, end: str = "") -> Text:
    """The text of a number: so many digits, after multiplication by `factor`."""
    return lambda row: significant(factor * float(row[name]), digits, zeros=True) + end if row[name] else ""


USEFUL = Shown("useful", "TFLOP/s", 4, number("useful_tflops"), decode_rank=6)


def useful_in_unit(rows: Sequence[Row]) -> Shown:
    """The useful rate in the unit that suits the rows."""
    unit, factor = flop_unit(float(row["useful_tflops"]) for row in rows if row["useful_tflops"])
    return replace(USEFUL, unit=unit, text=number("useful_tflops", factor=factor))


def median(row: Row) -> str:
    """The median, marked if it did not settle."""
    return mark_of(row) + number("median_ms", 4)(row)


def unsettled_legend(rows: Sequence[Row]) -> str:
    """What the mark of a median means, if there is one."""
    return f"{UNSETTLED} {why}" if (why := meaning(rows)) else ""


def interval(row: Row) -> str:
    """Half the 95 % interval of the median, in percent."""
    half = half_interval_of(row)
    return "" if half is None else f"{100 * half:.2f}" if half < 0.1 else significant(100 * half, 2, zeros=True)


def percentiles(row: Row) -> str:
    """The 10th and the 90th percentile."""
    return "-".join(significant(float(row[name]), 4, zeros=True) for name in ("p10_ms", "p90_ms") if row[name])


def roof_legend(rows: Sequence[Row]) -> str:
    """What the roof of decode is in files from before reading was measured."""
    of_copies = any(
        row["pass"] in CACHED_PASSES and row["fraction_of_roofline"] and not row["read_gbytes_s"] for row in rows
    )
    return "of decode, what a copy moves; what only reads can be faster" if of_copies else ""


def clocks(rows: Sequence[Row]) -> list[float]:
    """The clocks at which cells ran, in MHz."""
    return [float(row["sm_clock_mhz"]) for row in rows if row["sm_clock_mhz"]]


def clocks_differ(rows: Sequence[Row]) -> bool:
    """Whether some cells ran at a clock so low that it counts; otherwise the range says enough."""
    return min(clocks(rows), default=0.0) < 0.95 * max(clocks(rows), default=0.0)


def cut(text: str) -> str:
    """A text from a file, as long as a table has room for."""
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
