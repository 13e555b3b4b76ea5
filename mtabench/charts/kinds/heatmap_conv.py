"""Speedup over the baseline as heat maps: sequence length by convolution, and sequence length by head dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, TwoSlopeNorm
from matplotlib.patches import Rectangle

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import baseline_name, one_line_each, rivals
from mtabench.charts.findings import called, place, speed, speed_range, subject, yardstick
from mtabench.charts.kinds.speedup import rated
from mtabench.charts.panels import check_panels, word_of
from mtabench.charts.style import Look
from mtabench.charts.text import TIMES, caption, factor, fitted, inches, length_label, shortened, steps, unsettled_note
from mtabench.measuring.settled import UNSETTLED
from mtabench.problem.axes import short
from mtabench.problem.operations import OPERATION_COLUMNS

CELL_INCHES = (0.62, 0.38)
LABELS_INCHES = (0.9, 0.8)  # beside the cells at least, and above and below
LABEL_SIZE = 8.5  # points of the names of rows
CELLS_WIDTH = 2.3  # of all columns at least, which a title fits over
MOST_WIDTH = 12.0  # of a panel
CHART_WIDTH = 12.5
SIZES = (8.0, 3.0)  # points of the numbers, and the least that can still be read
HEAD_DIM_COLUMNS = ("head_dim",)
AXES = {OPERATION_COLUMNS: "convolution", HEAD_DIM_COLUMNS: "head dim"}


@dataclass(frozen=True)
class HeatMap:
    """One implementation: `ratios` by row and sequence length, NaN where there is none.

    `numbers` are what stands in its cells, by row and column; `words` say of failed ones what happened.
    """

    title: str
    rows: tuple[str, ...]
    seqs: tuple[int, ...]
    ratios: np.ndarray
    numbers: dict[tuple[int, int], str]
    words: dict[tuple[int, int], str]


def chart(down: tuple[str, ...], cells: pd.DataFrame) -> Chart | None:
    """A map an implementation other than the baseline; `down` are the columns of the axis that goes down it."""
    cells = one_line_each(cells).fillna(dict.fromkeys(OPERATION_COLUMNS, 0))
    baseline, timed = baseline_name(cells), rated(cells)
    if len(timed[[*down]].drop_duplicates()) < 2:
        return None
    compared = pd.concat([timed, rivals(cells).drop(timed.index)]).sort_index()
    others = HEAD_DIM_COLUMNS if down == OPERATION_COLUMNS else OPERATION_COLUMNS
    groups = compared.groupby([*others, "impl", "label"])
    check_panels(groups.ngroups)
    seqs = tuple(sorted(int(seq) for seq in set(compared["seq"])))
    maps = [
        _map(f"{shortened(str(label))}, {_words(values)}", down, seqs, group) for (*values, _, label), group in groups
    ]

    labels = max(LABELS_INCHES[0], *(0.5 + inches(row, LABEL_SIZE) for one in maps for row in one.rows))
    width = min(max(CELL_INCHES[0] * len(seqs), CELLS_WIDTH) + labels, MOST_WIDTH)
    height = CELL_INCHES[1] * max(len(one.rows) for one in maps) + LABELS_INCHES[1]
    size = _number_size(maps, (width - labels) / len(seqs))
    logs = np.log(np.concatenate([one.ratios.ravel() for one in maps]))
    # Colours meet at 1; half a doubling at least on each side, so that a few percent are no strong colour.
    norm = TwoSlopeNorm(0.0, min(np.nanmin(logs), -np.log(1.4)), max(np.nanmax(logs), np.log(1.4)))
    how = f"median time of {shortened(baseline)} over median time; empty where nothing was measured"
    notes = [] if size else ["colours alone: the cells are too narrow for numbers"]
    return Chart(
        titled(cells, _finding(cells, timed), f"speedup by sequence length and {AXES[down]}"),
        caption(cells, how, [*unsettled_note(cells[cells["op"].isin(set(compared["op"]))], UNSETTLED), *notes]),
        maps,
        partial(_draw, norm=norm, size=size),
        length_label(cells),
        AXES[down],
        columns=max(1, int(CHART_WIDTH // width)),
        panel_inches=(width, height),
        shared_axes=False,
    )


def _map(title: str, down: tuple[str, ...], seqs: tuple[int, ...], cells: pd.DataFrame) -> HeatMap:
    keys = sorted(set(cells[[*down]].itertuples(index=False, name=None)))
    ratios = np.full((len(keys), len(seqs)), np.nan)
    numbers, words = {}, {}
    for cell in cells.to_dict("records"):
        at = keys.index(tuple(cell[name] for name in down)), seqs.index(int(cell["seq"]))
        if np.isnan(cell["ratio"]):
            words[at] = "no baseline" if cell["status"] == "ok" else word_of(cell["status"])
        else:
            ratios[at] = cell["ratio"]
            mark = UNSETTLED if cell["unsettled"] else ""
            numbers[at] = f"{mark}{factor(cell['ratio'], cell['half'])}{TIMES}"
    return HeatMap(title, tuple(_row(key) for key in keys), seqs, ratios, numbers, words)


def _words(values: Sequence[Any]) -> str:
    """A head dim, or an operation's steps, as a title says it."""
    return f"head dim {values[0]:g}" if len(values) == 1 else steps(*values)


def _row(values: Sequence[Any]) -> str:
    """The same as one reads it beside a row."""
    return _words(values).removeprefix("head dim ").replace("convolution ", "")


def _number_size(maps: list[HeatMap], width: float) -> float:
    """The size in points at which every number fits into a cell of this width in inches; 0 if none can be read."""
    longest = max(inches(text, 1) for one in maps for text in one.numbers.values())
    size = min(SIZES[0], 0.9 * width / longest)
    return size if size >= SIZES[1] else 0.0


def _draw(axes: Axes, shown: HeatMap, look: Look, norm: Normalize, size: float) -> None:
    theme = look.theme
    colours = LinearSegmentedColormap.from_list("speedup", [theme.slower, theme.equal, theme.faster])
    axes.pcolormesh(np.log(shown.ratios), cmap=colours, norm=norm, edgecolors=theme.paper, linewidth=1.2)
    axes.set_xticks(np.arange(len(shown.seqs)) + 0.5, [short(seq) for seq in shown.seqs])
    axes.set_yticks(np.arange(len(shown.rows)) + 0.5, shown.rows, fontsize=LABEL_SIZE)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    for (row, column), words in shown.words.items():
        box: dict[str, Any] = {"facecolor": theme.backdrop, "edgecolor": theme.paper, "linewidth": 1.2}
        axes.add_patch(Rectangle((column, row), 1, 1, **box))
        fitting = "\n".join(fitted(word, 0.9 * CELL_INCHES[0], 6) for word in words.split(maxsplit=2))
        axes.text(column + 0.5, row + 0.5, fitting, ha="center", va="center", fontsize=6, color=theme.quiet)
    if not size:
        return
    for (row, column), text in sorted(shown.numbers.items()):
        light = np.dot(colours(norm(np.log(shown.ratios[row, column])))[:3], (0.2126, 0.7152, 0.0722)) > 0.45
        ink = "black" if light else "white"
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=size, color=ink)


def _finding(cells: pd.DataFrame, timed: pd.DataFrame) -> str:
    own, baseline = subject(timed) or yardstick(timed), shortened(baseline_name(cells))
    mine, name = timed[timed["impl"] == own], called(cells, own)
    most = mine[mine["ratio"] == mine["ratio"].max()]
    if len(mine) == 1:
        return f"{name} {speed_range(mine, baseline)} at {place(mine, cells)}"
    if len(most) > 1:
        return f"{name} {speed_range(mine, baseline)}"
    least = mine[mine["ratio"] == mine["ratio"].min()]
    (high, high_half), (low, low_half) = (one[["ratio", "half"]].iloc[0] for one in (most, least))
    bare = f"{factor(low if low >= 1 else 1 / low, low_half)}{TIMES}"
    least_words = speed(low, baseline, low_half) if low < 1 <= high else bare
    return (
        f"{name} {speed(high, baseline, high_half)} at {place(most, cells)}, and {least_words} at {place(least, cells)}"
    )


KIND = Kind(
    "speedups of at least two convolutions (such as --conv 6x11,3x3)", partial(chart, OPERATION_COLUMNS), place=3
)
