"""Small pictures in a line of text: the rounds of a cell as measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from mtabench.errors import UsageError
from mtabench.results.result_view import View, ViewColumn
from mtabench.results.results_file import cell_of, find_samples, key_of_row
from mtabench.results.runs import find_rounds, process_ids, read_samples

MARKS = "▁▂▃▄▅▆▇█"
MOST_MARKS = 16  # of the rounds of a cell
LEAST_SCALE, MOST_SCALE = 0.005, 0.1

Row = Mapping[str, str]
Rounds = Sequence[Sequence[float]]


def with_rounds(view: View, rows: Sequence[Row], path: Path) -> tuple[View, str]:
    """The view with a picture of each cell's rounds, if samples are beside the file; or why they cannot be shown."""
    if not find_samples(path).exists():
        return view, ""
    try:
        samples = read_samples(path)
    except UsageError as error:
        return view, f"no rounds: {error}"
    keys = [cell_of(key_of_row(row)) for row in rows]
    found = drift(  # of one process after the other
        [
            [one for run_id in process_ids(row["run_id"]) for one in find_rounds(samples, run_id, key)]
            for row, key in zip(rows, keys, strict=True)
        ]
    )
    if not any(found.texts):
        return view, ""
    scale = f"{100 * found.scale:.2g}"
    legend = f"their medians in the order measured, from -{scale} % to +{scale} % of the cell's median"
    column = ViewColumn("rounds", found.texts, rank=3, right=False, legend=legend, source="rounds")
    place = len(view.columns) - (view.columns[-1].name == "status")
    return replace(view, columns=(*view.columns[:place], column, *view.columns[place:])), ""


@dataclass(frozen=True, slots=True)
class Drift:
    """The rounds of each cell as marks, and the part of a cell's median that the full height stands for."""

    texts: tuple[str, ...]
    scale: float


def sparkline(values: Iterable[float], low: float, high: float) -> str:
    """One mark a value, the lowest for `low` and the highest for `high`."""
    top = len(MARKS) - 1
    places = (round(top * (value - low) / (high - low)) for value in values)
    return "".join(MARKS[min(max(place, 0), top)] for place in places)


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
