"""Whole models beside the plain one: how much of its speed each has, a bar a model.

A panel a head dim and sequence length. The plain model is the line at 100 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import one_line_each
from mtabench.charts.findings import OPERATION, SHAPE, subject
from mtabench.charts.lines import plain_axes
from mtabench.charts.panels import check_panels
from mtabench.charts.style import Look
from mtabench.charts.text import caption, inches, percent, shortened, span, steps, tokens, unsettled_note
from mtabench.measuring.settled import UNSETTLED

BAR_INCHES, MARGIN_INCHES, WIDTH_INCHES = 0.5, 0.9, 4.2
LABEL_SIZE = 8.5


@dataclass(frozen=True)
class Bars:
    """Models of one shape, the fastest first: of each the implementation, its attention, and its share of the speed.

    `halves` are half the 95 % intervals of the shares as parts of them. `unsettled` says where a time of either model
    did not settle.
    """

    title: str
    impls: tuple[str, ...]
    labels: tuple[str, ...]
    share: tuple[float, ...]
    halves: tuple[float, ...]
    unsettled: tuple[bool, ...]


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
    pairs["share"] = pairs["median_ms_y"] / pairs["median_ms_x"]
    pairs["half"] = np.hypot(pairs["half_x"], pairs["half_y"])
    pairs["label"] = [
        f"{shortened(impl)}\n{steps(*operation)}"
        for impl, operation in zip(pairs["impl"], pairs[OPERATION].itertuples(index=False, name=None), strict=True)
    ]
    panels = [_bars(group, cells) for _, group in pairs.groupby(["head_dim", "seq", "batch"])]
    check_panels(len(panels))
    labels = max(inches(line, LABEL_SIZE) for label in pairs["label"] for line in label.split("\n"))
    bars = max(len(panel.share) for panel in panels)
    return Chart(
        titled(cells, _finding(pairs[pairs["impl"] == subject(timed)]), "share of the plain model's speed"),
        caption(
            cells,
            "tokens a second over the plain model's, with 95 % intervals of the ratio",
            unsettled_note(timed, f"hollow, {UNSETTLED}"),
        ),
        panels,
        _draw,
        "of the plain model's speed (%)",
        columns=1 if len(panels) == 1 else 2,
        panel_inches=(WIDTH_INCHES + labels, BAR_INCHES * bars + MARGIN_INCHES),
        shared_axes=False,
    )


def _bars(pairs: pd.DataFrame, cells: pd.DataFrame) -> Bars:
    pairs = pairs.sort_values(["share", "label"], ascending=[False, True])
    first = pairs.iloc[0]
    return Bars(
        f"{tokens(cells, first['seq'])}, head dim {first['head_dim']:g}, batch {first['batch']:g}",
        tuple(pairs["impl"]),
        tuple(pairs["label"]),
        tuple(pairs["share"]),
        tuple(pairs["half"]),
        tuple(pairs["unsettled_x"] | pairs["unsettled_y"]),
    )


def _draw(axes: Axes, bars: Bars, look: Look) -> None:
    ends = [
        (100 * share / exp(half), 100 * share * exp(half)) for share, half in zip(bars.share, bars.halves, strict=True)
    ]
    axes.set_xlim(0, max(112, *(1.12 * high for _, high in ends)))  # with room for the last number
    axes.set_ylim(len(bars.share) - 0.5, -0.5)
    axes.set_yticks(range(len(bars.labels)), bars.labels, fontsize=LABEL_SIZE)
    plain_axes(axes, look, grid="x")
    axes.tick_params(axis="y", length=0)
    axes.axvline(100, color=look.theme.quiet, linestyle=(0, (4, 1.6)), linewidth=1)
    for row, (impl, unsettled, (low, high)) in enumerate(zip(bars.impls, bars.unsettled, ends, strict=True)):
        colour = look.colour(impl)
        face = look.theme.paper if unsettled else colour
        axes.barh(row, 100 * bars.share[row], 0.5, facecolor=face, edgecolor=colour, linewidth=1.5)
        axes.hlines(row, low, high, color=look.theme.ink, linewidth=1)
        box: dict[str, Any] = {"facecolor": look.theme.paper, "edgecolor": "none", "pad": 0.5}  # over the line
        text = (UNSETTLED if unsettled else "") + percent(bars.share[row], bars.halves[row])
        axes.annotate(text, (high, row), (5, 0), textcoords="offset points", va="center", fontsize=LABEL_SIZE, bbox=box)


def _finding(pairs: pd.DataFrame) -> str:
    """From the least to the greatest share of the implementation that is the fastest; nothing if it has no time."""
    if pairs.empty:
        return ""
    share = span(pairs["share"], pairs["half"], percent)
    return f"{shortened(pairs['impl'].iloc[0])} has {share} of the plain model's speed"


KIND = Kind("a time of the plain model beside one of another at the same shape", chart, place=11)
