"""The ladder: plain attention at one sequence length, from the slowest implementation to the fastest, step by step.

A panel a head dim, a dot an implementation. The note below names those without a time, with the reason.
"""

from itertools import pairwise
from math import exp, hypot, log
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import one_line_each
from mtabench.charts.findings import speed
from mtabench.charts.lines import LABEL_SIZE, NamedRows, log_ticks, name_rows, rows_chart, write_number
from mtabench.charts.panels import word_of
from mtabench.charts.style import Look
from mtabench.charts.text import TIMES, caption, factor, milliseconds, shortened, tokens, unsettled_note
from mtabench.measuring.settled import UNSETTLED
from mtabench.prose import plural

LEAST = 3  # timed implementations
RUNG_INCHES = 0.36
WIDTHS = {1: 5.6, 2: 4.2}  # of a panel's axes and steps in inches, by the number of panels in a row
TIME_SHARE = 0.15  # of the axes' width, for the last time
REASON_LENGTH = 60  # characters
SHAPE = ["seq", "batch", "head_dim"]


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
    chosen = one_line_each(plain.merge(shapes[SHAPE], on=SHAPE))
    ladders = {head_dim: _ladder(group) for head_dim, group in chosen.groupby("head_dim")}
    how = "plain attention, median times; on the right how many times as fast as the one above"
    return rows_chart(
        titled(chosen, _finding(ladders[best["head_dim"]]), ""),
        caption(chosen, how, [*unsettled_note(chosen, f"hollow, {UNSETTLED}"), *_failures(chosen, len(ladders))]),
        list(ladders.values()),
        _draw,
        "time (ms)",
        WIDTHS[min(len(ladders), max(WIDTHS))],
        RUNG_INCHES,
    )


def _ladder(cells: pd.DataFrame) -> NamedRows:
    """The ladder of one shape."""
    rungs = cells[cells["status"] == "ok"].sort_values(["median_ms", "impl"], ascending=[False, True])
    return NamedRows(_title(cells), rungs.assign(label=rungs["impl"].map(shortened), value=rungs["median_ms"]))


def _title(cells: pd.DataFrame) -> str:
    return f"{tokens(cells, cells['seq'].iloc[0])}, head dim {cells['head_dim'].iloc[0]:g}"


def _failures(cells: pd.DataFrame, panels: int) -> list[str]:
    """Implementations without a time and why, with the panel where others have one there."""
    failed = cells[cells["status"] != "ok"]
    reasons = failed["reason"].map(lambda reason: shortened(" ".join(reason.partition(" (")[0].split()), REASON_LENGTH))
    words = (failed["status"].map(word_of) + ": " + reasons).str.removesuffix(": ")
    texts = []
    for (name, why), group in failed.assign(words=words).groupby(["impl", "words"], sort=False):
        titles = [_title(shape) for _, shape in group.groupby("head_dim")]
        of = "" if len(titles) == panels else f" at {' and '.join(titles)}"
        texts.append(f"{shortened(str(name))}{of} ({why})")
    return [f"no valid time: {'; '.join(texts)}"] if texts else []


def _draw(axes: Axes, ladder: NamedRows, look: Look) -> None:
    rows: list[Any] = list(ladder.rows.itertuples())
    low, high = ladder.rows["value"].min(), ladder.rows["value"].max()
    doublings = max(log(high / low), log(2)) / (1 - 2 * TIME_SHARE)
    axes.set_xscale("log")
    axes.set_xlim(low * exp(-TIME_SHARE * doublings / 3), low * exp((1 - TIME_SHARE / 3) * doublings))
    log_ticks(axes.xaxis, doublings / log(10))
    name_rows(axes, ladder, look, grid="both")
    axes.grid(axis="y", linestyle=(0, (1, 3)), linewidth=1)
    for place, row in enumerate(rows):
        colour = look.colour(row.impl)
        face = look.theme.paper if row.unsettled else colour
        marker = look.styles[row.impl].marker
        axes.plot([row.value], [place], color=colour, marker=marker, markersize=7, markerfacecolor=face)
        write_number(axes, milliseconds(row.value, row.half), (row.value, place), row.unsettled, look)
    for place, (slower, faster) in enumerate(pairwise(rows)):
        step = factor(slower.value / faster.value, hypot(slower.half, faster.half))
        axes.text(
            1.02, place + 0.5, f"\N{DOWNWARDS ARROW} {step}{TIMES}", fontsize=LABEL_SIZE, color=look.theme.quiet,
            va="center", transform=axes.get_yaxis_transform(),
        )  # fmt: skip


def _finding(ladder: NamedRows) -> str:
    first, last = (ladder.rows.iloc[place] for place in (0, -1))
    ratio, half = first["value"] / last["value"], hypot(first["half"], last["half"])
    steps = f"{plural(len(ladder.rows) - 1, 'step')} up the ladder"
    return f"{last['label']} {speed(ratio, first['label'], half)}, {steps}, at {ladder.title}"


KIND = Kind(f"times of at least {LEAST} implementations of plain attention at one shape", chart, place=10)
