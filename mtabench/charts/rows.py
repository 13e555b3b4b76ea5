"""Panels of named rows, from top to bottom: one value of each implementation, with its number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from mtabench.charts.chart import Chart
from mtabench.charts.lines import plain_axes
from mtabench.charts.panels import check_panels
from mtabench.charts.style import Look
from mtabench.charts.text import inches
from mtabench.measuring.settled import UNSETTLED

LABEL_SIZE = 8.5
MARGIN_INCHES = 0.9  # above and below the rows


@dataclass(frozen=True)
class NamedRows:
    """A panel. Each row has `impl`, `label`, a `value`, half its interval as a part of it, and `unsettled`."""

    title: str
    rows: pd.DataFrame


def rows_chart(
    title: str, caption: list[list[str]], panels: Sequence[NamedRows],
    draw: Callable[[Axes, NamedRows, Look], None], x_label: str, width: float, row_inches: float,
) -> Chart:  # fmt: skip
    """The chart of these panels, of which axes and numbers are `width` inches wide."""
    check_panels(len(panels))
    lines = (line for panel in panels for label in panel.rows["label"] for line in label.split("\n"))
    height = row_inches * max(len(panel.rows) for panel in panels) + MARGIN_INCHES
    size = width + max(inches(line, LABEL_SIZE) for line in lines), height
    columns = min(len(panels), 2)
    return Chart(title, caption, panels, draw, x_label, columns=columns, panel_inches=size, shared_axes=False)


def name_rows(axes: Axes, panel: NamedRows, look: Look, grid: str) -> None:
    """Axes with a place for each row, the first on top."""
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(panel.rows)), panel.rows["label"], fontsize=LABEL_SIZE)
    plain_axes(axes, look, grid=grid)
    axes.tick_params(axis="y", length=0)


def write_number(axes: Axes, text: str, place: tuple[float, int], unsettled: bool, look: Look) -> None:
    """A number right of a place, over the grid; one that did not settle has its mark."""
    box: dict[str, Any] = {"facecolor": look.theme.paper, "edgecolor": "none", "pad": 0.5}
    at: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": LABEL_SIZE, "bbox": box}
    axes.annotate((UNSETTLED if unsettled else "") + text, place, (8, 0), **at)
