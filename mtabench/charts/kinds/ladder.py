"""The ladder: plain attention at one sequence length, from the slowest implementation to the fastest, step by step.

A panel a head dim, a dot an implementation. The note below names those without a time, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, hypot, log
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import one_line_each
from mtabench.charts.findings import speed
from mtabench.charts.lines import log_ticks, plain_axes
from mtabench.charts.panels import check_panels, word_of
from mtabench.charts.style import Look
from mtabench.charts.text import TIMES, caption, factor, inches, milliseconds, shortened, tokens, unsettled_note
from mtabench.measuring.settled import UNSETTLED
from mtabench.prose import plural

LEAST = 3  # timed implementations
RUNG_INCHES, MARGIN_INCHES = 0.36, 0.9
WIDTHS = {1: 5.6, 2: 4.2}  # of a panel's axes and steps in inches, by the number of panels in a row
TIME_SHARE = 0.15  # of the axes' width, for the last time
LABEL_SIZE = 8.5
REASON_LENGTH = 60  # characters
SHAPE = ["seq", "batch", "head_dim"]


@dataclass(frozen=True)
class Ladder:
    """Implementations at one shape from the slowest to the fastest; `unsettled` says whose time did not settle.

    `halves` are half the intervals of the times as parts of them. `failed` are the others, each with the reason.
    """

    title: str
    names: tuple[str, ...]
    ms: tuple[float, ...]
    halves: tuple[float, ...]
    unsettled: tuple[bool, ...]
    failed: tuple[tuple[str, str], ...]


def chart(cells: pd.DataFrame) -> Chart | None:
    """A panel a head dim that has enough timed implementations, at one sequence length.

    That is where the most are timed at one shape; of several the longest sequence.
    """
    plain = cells[cells["op"] == "attention"]
    timed = plain[plain["status"] == "ok"]
    shapes = timed.groupby(SHAPE)["impl"].nunique().reset_index(name="count").sort_values(["count", *SHAPE])
    shapes = shapes[shapes["count"] >= LEAST]
    if shapes.empty:
        return None
    best = shapes.iloc[-1]
    shapes = shapes[(shapes["seq"] == best["seq"]) & (shapes["batch"] == best["batch"])].sort_values("head_dim")
    check_panels(len(shapes))
    chosen = one_line_each(plain.merge(shapes[SHAPE], on=SHAPE))
    ladders = [_ladder(group) for _, group in chosen.groupby("head_dim")]
    columns = min(len(ladders), max(WIDTHS))
    how = "plain attention, median times; on the right how many times as fast as the one above"
    rungs = max(len(ladder.names) for ladder in ladders)
    labels = max(inches(shortened(name), LABEL_SIZE) for name in chosen.loc[chosen["status"] == "ok", "impl"])
    return Chart(
        titled(chosen, _finding(ladders[list(shapes["head_dim"]).index(best["head_dim"])]), ""),
        caption(chosen, how, [*unsettled_note(chosen, f"hollow, {UNSETTLED}"), *_failures(ladders)]),
        ladders,
        _draw,
        "time (ms)",
        columns=columns,
        panel_inches=(WIDTHS[columns] + labels, RUNG_INCHES * rungs + MARGIN_INCHES),
        shared_axes=False,
    )


def _ladder(cells: pd.DataFrame) -> Ladder:
    """The ladder of one shape."""
    rungs = cells[cells["status"] == "ok"].sort_values(["median_ms", "impl"], ascending=[False, True])
    failed = cells[cells["status"] != "ok"]
    first = cells.iloc[0]
    words = [
        ": ".join(
            filter(None, (word_of(status), shortened(" ".join(reason.partition(" (")[0].split()), REASON_LENGTH)))
        )
        for status, reason in zip(failed["status"], failed["reason"], strict=True)
    ]
    return Ladder(
        f"{tokens(cells, first['seq'])}, head dim {first['head_dim']:g}",
        tuple(rungs["impl"]),
        tuple(rungs["median_ms"]),
        tuple(rungs["half"]),
        tuple(rungs["unsettled"]),
        tuple(zip(failed["impl"], words, strict=True)),
    )


def _failures(ladders: Sequence[Ladder]) -> list[str]:
    """Who has no time and why, with the panel where others have one there."""
    found: dict[tuple[str, str], list[str]] = {}
    for ladder in ladders:
        for failure in ladder.failed:
            found.setdefault(failure, []).append(ladder.title)
    texts = []
    for (name, words), titles in found.items():
        of = "" if len(titles) == len(ladders) else f" at {' and '.join(titles)}"
        texts.append(f"{shortened(name)}{of} ({words})")
    return [f"no valid time: {'; '.join(texts)}"] if texts else []


def _draw(axes: Axes, ladder: Ladder, look: Look) -> None:
    low, high = min(ladder.ms), max(ladder.ms)
    doublings = max(log(high / low), log(2)) / (1 - 2 * TIME_SHARE)
    limits = low * exp(-TIME_SHARE * doublings / 3), low * exp((1 - TIME_SHARE / 3) * doublings)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.set_ylim(len(ladder.names) - 0.5, -0.5)
    axes.set_yticks(range(len(ladder.names)), [shortened(name) for name in ladder.names], fontsize=LABEL_SIZE)
    log_ticks(axes.xaxis, doublings / log(10))
    plain_axes(axes, look, grid="both")
    axes.grid(axis="y", linestyle=(0, (1, 3)), linewidth=1)
    axes.tick_params(axis="y", length=0)
    beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "color": look.theme.quiet, "va": "center"}
    for row, (name, ms, unsettled) in enumerate(zip(ladder.names, ladder.ms, ladder.unsettled, strict=True)):
        colour = look.colour(name)
        face = look.theme.paper if unsettled else colour
        axes.plot([ms], [row], color=colour, marker=look.styles[name].marker, markersize=7, markerfacecolor=face)
        time = (UNSETTLED if unsettled else "") + milliseconds(ms, ladder.halves[row])
        box = {"facecolor": look.theme.paper, "edgecolor": "none", "pad": 0.5}  # over the grid
        at: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": LABEL_SIZE, "bbox": box}
        axes.annotate(time, (ms, row), (8, 0), **at)
        if row:
            half = hypot(*ladder.halves[row - 1 : row + 1])
            step = f"\N{DOWNWARDS ARROW} {factor(ladder.ms[row - 1] / ms, half)}{TIMES}"
            axes.text(1.02, row - 0.5, step, fontsize=LABEL_SIZE, **beside)


def _finding(ladder: Ladder) -> str:
    ratio, half = ladder.ms[0] / ladder.ms[-1], hypot(ladder.halves[0], ladder.halves[-1])
    steps = f"{plural(len(ladder.ms) - 1, 'step')} up the ladder"
    return f"{shortened(ladder.names[-1])} {speed(ratio, shortened(ladder.names[0]), half)}, {steps}, at {ladder.title}"


KIND = Kind(f"times of at least {LEAST} implementations of plain attention at one shape", chart, place=10)
