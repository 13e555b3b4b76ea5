"""The ladder: all implementations of plain attention at one shape, slowest to fastest, and each step's factor."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import one_line_each
from mtabench.charts.findings import speed
from mtabench.charts.lines import log_ticks, plain_axes
from mtabench.charts.panels import word_of
from mtabench.charts.style import Look
from mtabench.charts.text import TIMES, caption, factor, inches, milliseconds, shortened, tokens

LEAST = 3  # timed implementations
RUNG_INCHES, MARGIN_INCHES, WIDTH = 0.36, 0.9, 5.6
TIME_SHARE = 0.18  # of the axes' width, for the last time
LABEL_SIZE = 8.5
SHAPE = ["seq", "batch", "head_dim"]


@dataclass(frozen=True)
class Ladder:
    """Implementations at one shape from the slowest to the fastest, and those that failed with the reason."""

    title: str
    names: tuple[str, ...]
    ms: tuple[float, ...]
    failed: tuple[tuple[str, str], ...]


def chart(cells: pd.DataFrame) -> Chart | None:
    """The shape with the most timed implementations; of several the longest sequence, and the largest head dim."""
    plain = cells[cells["op"] == "attention"]
    timed = plain[plain["status"] == "ok"]
    shapes = timed.groupby(SHAPE)["impl"].nunique().reset_index(name="count").sort_values(["count", *SHAPE])
    if shapes.empty or shapes["count"].iloc[-1] < LEAST:
        return None
    chosen = plain.merge(shapes[SHAPE].tail(1), on=SHAPE)
    chosen = one_line_each(chosen)
    rungs = chosen[chosen["status"] == "ok"].sort_values(["median_ms", "impl"], ascending=[False, True])
    failed = chosen[chosen["status"] != "ok"]
    first = chosen.iloc[0]
    at = f"{tokens(chosen, first['seq'])}, head dim {first['head_dim']:g}"
    ladder = Ladder(
        at,
        tuple(rungs["impl"]),
        tuple(rungs["median_ms"]),
        tuple((impl, word_of(status)) for impl, status in zip(failed["impl"], failed["status"], strict=True)),
    )
    how = "plain attention, median times; on the right how many times as fast as the one above"
    height = RUNG_INCHES * (len(rungs) + len(failed)) + MARGIN_INCHES
    return Chart(
        titled(chosen, _finding(ladder), ""),
        caption(chosen, how),
        [ladder],
        _draw,
        "time (ms)",
        columns=1,
        panel_inches=(WIDTH + max(inches(shortened(name), LABEL_SIZE) for name in chosen["impl"]), height),
    )


def _draw(axes: Axes, ladder: Ladder, look: Look) -> None:
    names = [*ladder.names, *(name for name, _ in ladder.failed)]
    low, high = min(ladder.ms), max(ladder.ms)
    doublings = max(log(high / low), log(2)) / (1 - 2 * TIME_SHARE)
    limits = low * exp(-TIME_SHARE * doublings), low * exp((1 - TIME_SHARE) * doublings)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [shortened(name) for name in names], fontsize=LABEL_SIZE)
    log_ticks(axes.xaxis, doublings / log(10))
    plain_axes(axes, look, grid="x")
    axes.tick_params(axis="y", length=0)
    text: dict[str, Any] = {"va": "center", "fontsize": LABEL_SIZE}
    for row, (name, ms) in enumerate(zip(ladder.names, ladder.ms, strict=True)):
        colour = look.colour(name)
        axes.plot([limits[0], ms], [row, row], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot([ms], [row], color=colour, marker=look.styles[name].marker, markersize=7)
        axes.annotate(milliseconds(ms), (ms, row), xytext=(7, 0), textcoords="offset points", **text)
        if row:
            step = f"\N{DOWNWARDS ARROW} {factor(ladder.ms[row - 1] / ms)}{TIMES}"
            axes.text(1.02, row - 0.5, step, transform=axes.get_yaxis_transform(), color=look.theme.quiet, **text)
    for row, (_, word) in enumerate(ladder.failed, start=len(ladder.names)):
        mark: dict[str, Any] = {
            "color": look.theme.ink,
            "marker": "x",
            "markersize": 4.5,
            "transform": axes.get_yaxis_transform(),
        }
        axes.plot([0.02], [row], **mark)
        axes.text(0.05, row, word, transform=axes.get_yaxis_transform(), color=look.theme.quiet, **text)


def _finding(ladder: Ladder) -> str:
    ratio = ladder.ms[0] / ladder.ms[-1]
    steps = f"{len(ladder.ms) - 1} steps up the ladder"
    return f"{shortened(ladder.names[-1])} {speed(ratio, shortened(ladder.names[0]))}, {steps}, at {ladder.title}"


KIND = Kind("ladder", f"times of at least {LEAST} implementations of plain attention at one shape", chart)
