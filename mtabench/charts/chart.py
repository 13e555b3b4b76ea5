"""A chart whatever its kind: a title that states the finding, panels, and below them what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mtabench.charts.style import Look
from mtabench.charts.text import balanced, filled
from mtabench.problem.operations import OPERATION_COLUMNS

PASS_TITLES = {
    "fwd": "Forward", "bwd": "Backward", "decode": "Decode",
    "train": "Training step", "prefill": "Prefill", "generate": "Generated token",
}  # fmt: skip
PANEL_INCHES = (3.7, 3.5)
MOST_COLUMNS = 3
TITLE_SIZE, PANEL_TITLE_SIZE, CAPTION_SIZE = 12, 9.5, 7
LEAST_WIDTH = 5.0  # inches, so that the texts keep lines that can be read
MARGIN = 0.15  # inches, left and right of the texts


@dataclass(frozen=True)
class Chart:
    """What one figure shows. `draw_panel` draws one of `panels`, each of which has a `title`, into its axes.

    It may return what is left to do there once the axes have their places.
    """

    title: str
    caption: list[list[str]]
    panels: Sequence[Any]
    draw_panel: Callable[[Axes, Any, Look], Callable[[], None] | None]
    x_label: str = ""
    y_label: str = ""
    columns: int = MOST_COLUMNS
    panel_inches: tuple[float, float] = PANEL_INCHES
    shared_axes: bool = True


@dataclass(frozen=True)
class Kind:
    """One sort of chart, a file in `kinds`, whose name is its word on the command line and in the names of charts.

    `chart` receives the cells of one pass and setting. It returns None if they cannot make this chart; `needs` then
    says what would be needed. Kinds are drawn in the order of `place`. A `heading` gives it a section of that name on
    the page of `mtabench report`, if its panels tell `Look.gid` which rows they show.
    """

    needs: str
    chart: Callable[[pd.DataFrame], Chart | None]
    place: int = 99
    heading: str = ""


def titled(cells: pd.DataFrame, finding: str, plain: str) -> str:
    """The chart's title: the pass and the finding, or what the chart shows where nothing can be claimed."""
    return f"{PASS_TITLES[cells['pass'].iloc[0]]}: {finding or plain}"


def columns_of(cells: pd.DataFrame, panels: int) -> int:
    """Head dims down and operations across where that fills the grid, else as many as fit."""
    convs = len(cells.loc[cells["op"] != "attention", [*OPERATION_COLUMNS]].drop_duplicates())
    full = 1 < convs <= MOST_COLUMNS and panels == convs * cells["head_dim"].nunique()
    return convs if full else min(MOST_COLUMNS, panels)


def make_figure(chart: Chart, look: Look) -> Figure:
    """The chart as a figure in the look's theme, whose style sheet must be applied.

    One without a title has neither a caption nor titles of panels: the page around it says them.
    """
    columns = min(chart.columns, len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    width = max(chart.panel_inches[0] * columns, LEAST_WIDTH)
    title = balanced(chart.title, width - 2 * MARGIN, TITLE_SIZE) if chart.title else ""
    caption = [filled(parts, " · ", width - 2 * MARGIN, CAPTION_SIZE) for parts in chart.caption]
    lines = title.count("\n") + 1, "\n".join(caption).count("\n") + 1
    height = chart.panel_inches[1] * rows + (0.4 + 0.2 * lines[0] + 0.15 * lines[1] if title else 0.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    shared = chart.shared_axes
    finishes = []
    grid = figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(chart.panels):
            axes.set_visible(False)
            continue
        panel = chart.panels[index]
        finishes.append(chart.draw_panel(axes, panel, look))
        if title:
            words = filled(panel.title.split(" "), " ", chart.panel_inches[0] - 0.6, PANEL_TITLE_SIZE)
            axes.set_title(words, loc="left", fontsize=PANEL_TITLE_SIZE)
        if index + columns >= len(chart.panels):
            axes.set_xlabel(chart.x_label)
            axes.tick_params(labelbottom=True)
        if index % columns == 0:
            axes.set_ylabel(chart.y_label)
    texts: dict[str, Any] = {"x": MARGIN / width, "ha": "left"}
    if title:
        figure.suptitle(title, fontsize=TITLE_SIZE, fontweight="bold", **texts)
        figure.supxlabel("\n".join(caption), fontsize=CAPTION_SIZE, color=look.theme.quiet, linespacing=1.5, **texts)
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # the places stand; to find them again for each format takes most of the time
    for finish in filter(None, finishes):
        finish()
    return figure
