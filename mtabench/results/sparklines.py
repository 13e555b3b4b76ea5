"""Small pictures in a line of text: the rounds of a cell as measured, an implementation against sequence length."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mtabench.console import flop_unit, significant
from mtabench.problem.axes import short
from mtabench.problem.case import CACHED_PASSES
from mtabench.results.result_view import View

MARKS = "▁▂▃▄▅▆▇█"
MISSING = "x"
MOST_MARKS = 16  # of the rounds of a cell
MOST_SERIES = 40  # and at most so many lengths
LEAST_SCALE, MOST_SCALE = 0.005, 0.1

Row = Mapping[str, str]
Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Drift:
    """The rounds of each cell as marks, and the part of a cell's median that the full height stands for."""

    texts: tuple[str, ...]
    scale: float


def sparkline(values: Iterable[float | None], low: float, high: float) -> str:
    """One mark a value, the lowest for `low` and the highest for `high`; None is missing."""
    top = len(MARKS) - 1
    places = (None if value is None else round(top * (value - low) / (high - low)) for value in values)
    return "".join(MISSING if place is None else MARKS[min(max(place, 0), top)] for place in places)


def drift(cells: Sequence[Rounds]) -> Drift:
    """Medians of rounds around the median of their cell, all cells on one scale; nothing for a cell without rounds.

    Of many rounds several make one mark. The scale is at most MOST_SCALE, so that one wild cell hides no other.
    """
    deviations = [_deviations(rounds) for rounds in cells]
    most = max((abs(value) for one in deviations for value in one), default=0.0)
    scale = min(max(most, LEAST_SCALE), MOST_SCALE)
    return Drift(tuple(sparkline(one, -scale, scale) for one in deviations), scale)


def _deviations(rounds: Rounds) -> list[float]:
    if not rounds:
        return []
    median = statistics.median([sample for one in rounds for sample in one])
    groups = min(len(rounds), MOST_MARKS)
    bounds = [len(rounds) * i // groups for i in range(groups + 1)]
    merged = [[x for one in rounds[a:b] for x in one] for a, b in pairwise(bounds)]
    return [statistics.median(samples) / median - 1 for samples in merged]


def against_seq(rows: Sequence[Row], view: View) -> list[tuple[str, str, str]]:
    """Of each implementation throughput against sequence length: its name, marks from 0 to the most, first and last.

    The first line says what is shown. Nothing unless some implementation has a time at two lengths, and nothing for so
    many lengths or implementations that nobody would see anything.
    """
    name, unit, factor = "gbytes_s", "GB/s", 1.0
    if any(row["pass"] not in CACHED_PASSES for row in rows):
        name = "useful_tflops"
        unit, factor = flop_unit(float(row[name]) for row in rows if row[name])
    problem = [column for column in view.columns if column.problem and column.name not in ("seq", "batch")]
    chosen = {row["impl"] for row in rows if row["splits"] == "auto"}
    series: dict[str, dict[int, float]] = {}
    for i, row in enumerate(rows):
        if row[name] and not (row["impl"] in chosen and row["splits"] != "auto"):
            words = [row["splits"] if c.name == "splits" else c.texts[i] for c in problem]
            label = " ".join(
                f"{c.name} {word}" if c.right else word for c, word in zip(problem, words, strict=True) if word
            )
            series.setdefault(label, {})[int(row["seq"])] = factor * float(row[name])
    lengths = sorted({length for values in series.values() for length in values})
    compared = max((len(values) for values in series.values()), default=0) > 1
    if not compared or max(len(lengths), len(series)) > MOST_SERIES:
        return []
    most = max(value for values in series.values() for value in values.values())
    shown = [
        ("", f"{unit} at seq {', '.join(map(short, lengths))}; full height is {significant(most, 3, zeros=True)}", "")
    ]
    for label, values in series.items():
        ends = [significant(values[length], 3, zeros=True) for length in (min(values), max(values))]
        shown.append((label, sparkline(map(values.get, lengths), 0, most), " to ".join(dict.fromkeys(ends))))
    return shown
