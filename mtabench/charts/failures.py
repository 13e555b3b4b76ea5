"""Marks failed cells above the lines of a panel: a cross each, and in words what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from mtabench.charts.panels import Failure
from mtabench.charts.style import Look
from mtabench.charts.text import fitted, inches, shortened

AXES_WIDTH = 2.95  # inches; about what a panel leaves its axes
ROW_INCHES = 0.18
SIZE, GAP = 7, 0.09  # of the words: points, and inches to the crosses


@dataclass(frozen=True)
class Mark:
    """A run of failed cells: its words, where they stand across the axes, and the rows that it takes."""

    failure: Failure
    words: str
    x: float
    side: str
    rows: int


def place_marks(failures: Sequence[Failure], limits: tuple[float, float]) -> list[Mark]:
    """Where each run goes on a logarithmic x axis with these limits: the words beside it, or above if too long."""
    marks = []
    for failure in failures:
        words = fitted(f"{shortened(failure.label)}: {failure.word}", AXES_WIDTH, SIZE)
        width, gap = inches(words, SIZE) / AXES_WIDTH, GAP / AXES_WIDTH
        first, last = (log(x / limits[0]) / log(limits[1] / limits[0]) for x in (failure.xs[0], failure.xs[-1]))
        if max(first, 1 - last) < width + gap:
            middle = min(max((first + last) / 2, width / 2), 1 - width / 2)
            marks.append(Mark(failure, words, middle, "center", 2))
        elif first > 1 - last:
            marks.append(Mark(failure, words, first - gap, "right", 1))
        else:
            marks.append(Mark(failure, words, last + gap, "left", 1))
    return marks


def draw_marks(axes: Axes, marks: Sequence[Mark], row: float, look: Look) -> float:
    """The marks one below the other from the top, `row` of the axes' height for each; returns what is left below."""
    top = 1.0
    for mark in marks:
        bottom = top - mark.rows * row
        box: dict[str, Any] = {"transform": axes.transAxes, "zorder": 0, "linewidth": 0}
        axes.add_patch(Rectangle((0, bottom), 1, top - bottom, color=look.theme.backdrop, **box))
        axes.plot(
            mark.failure.xs, [bottom + row / 2] * len(mark.failure.xs), transform=axes.get_xaxis_transform(),
            color=look.colour(mark.failure.impl), linewidth=0.8, marker="x", markersize=4.5, markeredgewidth=1.3,
        )  # fmt: skip
        text: dict[str, Any] = {"transform": axes.transAxes, "va": "center", "ha": mark.side, "fontsize": SIZE}
        axes.text(mark.x, top - row / 2, mark.words, **text)
        top = bottom
    return top
