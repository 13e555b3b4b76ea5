"""Whole models beside the plain one: how much of its speed each has, a bar a model.

A panel a head dim and sequence length. The plain model is the line at 100 %.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import one_line_each
from mtabench.charts.findings import OPERATION, SHAPE, subject
from mtabench.charts.lines import NamedRows, name_rows, rows_chart, write_number
from mtabench.charts.style import Look
from mtabench.charts.text import caption, percent, shortened, span, steps, tokens, unsettled_note
from mtabench.measuring.settled import UNSETTLED

BAR_INCHES, WIDTH_INCHES = 0.5, 4.2


def chart(cells: pd.DataFrame) -> Chart | None:
    """A panel a shape at which the plain model and another have a time."""
    if not cells["layers"].iloc[0]:
        return None
    cells = one_line_each(cells)
    timed = cells[cells["status"] == "ok"]
    plain = timed[timed["op"] == "attention"]
    pairs = timed[timed["op"] != "attention"].merge(plain[[*SHAPE, "median_ms", "half", "unsettled"]], on=SHAPE)
    if pairs.empty:
        return None
    pairs["value"] = pairs["median_ms_y"] / pairs["median_ms_x"]
    pairs["half"] = np.hypot(pairs["half_x"], pairs["half_y"])
    pairs["unsettled"] = pairs["unsettled_x"] | pairs["unsettled_y"]
    pairs["label"] = [
        f"{shortened(impl)}\n{steps(*operation)}"
        for impl, operation in zip(pairs["impl"], pairs[OPERATION].itertuples(index=False, name=None), strict=True)
    ]
    pairs = pairs.sort_values(["value", "label"], ascending=[False, True])
    panels = []
    for _, group in pairs.groupby(["head_dim", "seq", "batch"]):
        seq, head_dim, batch = group[["seq", "head_dim", "batch"]].iloc[0]
        panels.append(NamedRows(f"{tokens(cells, seq)}, head dim {head_dim:g}, batch {batch:g}", group))
    how = "tokens a second over the plain model's, with 95 % intervals of the ratio"
    return rows_chart(
        titled(cells, _finding(pairs[pairs["impl"] == subject(timed)]), "share of the plain model's speed"),
        caption(cells, how, unsettled_note(timed, f"hollow, {UNSETTLED}")),
        panels,
        _draw,
        "of the plain model's speed (%)",
        WIDTH_INCHES,
        BAR_INCHES,
    )


def _draw(axes: Axes, bars: NamedRows, look: Look) -> None:
    reach = np.exp(bars.rows["half"])
    ends = bars.rows.assign(low=100 * bars.rows["value"] / reach, high=100 * bars.rows["value"] * reach)
    axes.set_xlim(0, max(112, 1.12 * ends["high"].max()))  # with room for the last number
    name_rows(axes, bars, look, grid="x")
    axes.axvline(100, color=look.theme.quiet, linestyle=(0, (4, 1.6)), linewidth=1)
    rows: list[Any] = list(ends.itertuples())
    for place, row in enumerate(rows):
        colour = look.colour(row.impl)
        face = look.theme.paper if row.unsettled else colour
        axes.barh(place, 100 * row.value, 0.5, facecolor=face, edgecolor=colour, linewidth=1.5)
        axes.hlines(place, row.low, row.high, color=look.theme.ink, linewidth=1)
        write_number(axes, percent(row.value, row.half), (row.high, place), row.unsettled, look)


def _finding(pairs: pd.DataFrame) -> str:
    """From the least to the greatest share of the implementation that is the fastest; nothing if it has no time."""
    if pairs.empty:
        return ""
    share = span(pairs["value"], pairs["half"], percent)
    return f"{shortened(pairs['impl'].iloc[0])} has {share} of the plain model's speed"


KIND = Kind("a time of the plain model beside one of another at the same shape", chart, place=11)
