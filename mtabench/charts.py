"""Charts drawn from results files alone, a panel a problem: time and speedup against sequence length, and splits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from mtabench.axes import short
from mtabench.case import PASSES
from mtabench.chart_data import Failure, Panel, baseline_name, caption, panels, read_cells, settings, split_panels
from mtabench.errors import UsageError

FORMATS = ("png", "svg")
PASS_TITLES = {"fwd": "Forward", "bwd": "Backward", "decode": "Decode"}
PANEL_INCHES = (3.7, 3.5)
LEGEND_INCHES = 2.4
MAX_COLUMNS = 3
MAX_TICKS = 8
FAILURE_HEIGHT = 0.062  # of the axes, for one row of failed cells
INK, QUIET, GRID, BACKDROP = "#222222", "#555555", "#DDDDDD", "#F2F2F2"
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 8.5, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": "#8A8A8A", "axes.linewidth": 0.7, "xtick.color": INK, "ytick.color": INK,
    "svg.hashsalt": "mtabench",  # the same data, the same file
}  # fmt: skip


class Style(NamedTuple):
    """How an implementation looks in every chart."""

    colour: str
    marker: str
    dashes: Any


# Okabe and Ito's colours, fixed for each implementation. Plain attention is a yardstick: grey and dashed.
STYLES = {
    "eager": Style("#000000", "o", "-"),
    "compile": Style("#CC79A7", "s", "-"),
    "triton": Style("#D55E00", "^", "-"),
    "sdpa-flash": Style("#6E6E6E", "D", (0, (4, 1.6))),
    "sdpa-cudnn": Style("#6E6E6E", "v", (0, (1.2, 1.2))),
    "sdpa-math": Style("#9A9A9A", "P", (0, (5, 1.5, 1, 1.5))),
}
SPARE_STYLES = (
    Style("#0072B2", "X", "-"),
    Style("#009E73", "p", "-"),
    Style("#E69F00", "h", "-"),
    Style("#56B4E9", "d", "-"),
)
SPARE_YARDSTICKS = (Style("#8C8C8C", "<", (0, (3, 1))), Style("#5A5A5A", ">", (0, (6, 2))))
AUTO: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 12, "markeredgecolor": INK}


class Kind(NamedTuple):
    """One sort of chart: its word in the file's name, its title, its x axis and the unit at its y ticks."""

    name: str
    title: str
    x_label: str
    unit: str = ""


TIME = Kind("time", "time against sequence length", "sequence length (tokens)")
SPEEDUP = Kind("speedup", "speedup against sequence length", "sequence length (tokens)", "\N{MULTIPLICATION SIGN}")
SPLITS = Kind("splits", "time against splits of the keys", "splits (programs that share the keys of a head)")


def draw(csv_paths: Iterable[str | Path], out_dir: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw time and speedup of every pass in the results files; returns the paths of the charts written.

    Of several splits of an implementation they show auto, or the fastest if it is missing; a third chart shows all.
    Settings that one chart cannot show together (device, dtype, heads, batch, causal) make charts of their
    own, named after what differs. A cell that is in several files counts once, the latest. Raises UsageError
    for a file that is no results file, a folder that cannot be written or an unknown format.
    """
    for name in formats:
        if name not in FORMATS:
            raise UsageError(f"chart format {name!r} is not known; expected {' or '.join(FORMATS)}")
    cells = read_cells(csv_paths)
    paths = []
    with mpl.rc_context(RC):
        for pass_ in PASSES:
            for suffix, setting in settings(cells[cells["pass"] == pass_]):
                for kind in (TIME, SPEEDUP, SPLITS):
                    cells_shown = setting[setting["splits"] != ""] if kind is SPLITS else setting
                    shown = split_panels(cells_shown) if kind is SPLITS else panels(setting, kind is SPEEDUP)
                    if not shown:
                        continue
                    figure = _figure(cells_shown, shown, pass_, kind)
                    stem = f"{pass_}-{kind.name}{suffix}"
                    paths += [_save(figure, Path(out_dir) / f"{stem}.{name}") for name in formats]
    return paths


def _save(figure: Figure, path: Path) -> Path:
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="white", metadata=metadata)
    except OSError as error:
        raise UsageError(f"cannot write the chart {path}: {error.strerror or error}") from error
    return path


def _figure(cells: pd.DataFrame, shown: list[Panel], pass_: str, kind: Kind) -> Figure:
    """One chart: a panel each head dim and convolution, a legend beside them, what was measured below."""
    xs = _places(shown)
    columns = _columns(cells, len(shown))
    rows = -(-len(shown) // columns)
    width = PANEL_INCHES[0] * columns + LEGEND_INCHES
    figure = Figure(figsize=(width, PANEL_INCHES[1] * rows + 1.1), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    styles = _ramp(shown) if kind is SPLITS else _styles(shown)
    failure_rows = max(sum(_failure_rows(panel, xs)) for panel in shown)
    row = min(FAILURE_HEIGHT, 0.6 / max(1, failure_rows))  # of the axes' height

    _set_x_axis(grid[0, 0], xs)
    _set_y_axis(grid[0, 0], shown, kind, row * failure_rows)
    for index, axes in enumerate(grid.flat):
        if index >= len(shown):
            axes.set_visible(False)
            continue
        _draw_panel(axes, shown[index], kind, xs, row, styles)
        if index + columns >= len(shown):
            axes.set_xlabel(kind.x_label)
            axes.tick_params(labelbottom=True)
        if index % columns == 0:
            speedup = f"speedup over {baseline_name(cells) or 'the baseline'}"
            axes.set_ylabel(speedup if kind is SPEEDUP else "time (ms)")

    texts = {"x": 0.012, "ha": "left"}
    figure.suptitle(f"{PASS_TITLES[pass_]}: {kind.title}", fontsize=12, fontweight="bold", **texts)
    figure.supxlabel(caption(cells, length=int(width * 18.6)), fontsize=7, color=QUIET, linespacing=1.5, **texts)
    grid[0, -1].legend(
        handles=_legend(shown, styles),
        loc="upper left",
        bbox_to_anchor=(1.02, 1.02),
        frameon=False,
        handlelength=3.2,
    )
    return figure


def _columns(cells: pd.DataFrame, panels: int) -> int:
    """Head dims down and convolutions across where that fills the grid, else as many as fit."""
    convs = len(cells.loc[cells["op"] != "attention", ["conv_q", "conv_k"]].drop_duplicates())
    full = 1 < convs <= MAX_COLUMNS and panels == convs * cells["head_dim"].nunique()
    return convs if full else min(MAX_COLUMNS, panels)


def _styles(shown: list[Panel]) -> dict[str, Style]:
    """The style of every implementation in the figure; those without one of their own take the spare ones."""
    yardsticks = {line.impl for panel in shown for line in panel.lines if line.yardstick}
    names = {line.impl for panel in shown for line in panel.lines}
    names |= {failure.impl for panel in shown for failure in panel.failures}
    spare, spare_yardsticks = cycle(SPARE_STYLES), cycle(SPARE_YARDSTICKS)
    return {name: STYLES.get(name) or next(spare_yardsticks if name in yardsticks else spare) for name in sorted(names)}


def _ramp(shown: list[Panel]) -> dict[str, Style]:
    """A style for each sequence length, from dark to light as they grow."""
    names = list(dict.fromkeys(line.impl for panel in shown for line in panel.lines))
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(names)))
    return {name: Style(to_hex(colour), "o", "-") for name, colour in zip(names, colours, strict=True)}


def _places(shown: list[Panel]) -> list[float]:
    """Where something stands on the x axis, in order."""
    of_lines = {float(x) for panel in shown for line in panel.lines for x in (*line.x, *(line.auto or ())[:1])}
    return sorted(of_lines | {float(x) for panel in shown for failure in panel.failures for x in failure.xs})


def _set_x_axis(axes: Axes, xs: list[float]) -> None:
    margin = (xs[-1] / xs[0]) ** 0.06 if len(xs) > 1 else 2.0
    powers = [x for x in xs if int(x).bit_count() == 1]
    ticks = xs if len(xs) <= MAX_TICKS or len(powers) < 2 else powers
    axes.set_xscale("log", base=2)
    axes.set_xlim(xs[0] / margin, xs[-1] * margin)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // MAX_TICKS)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(round(value))))


def _set_y_axis(axes: Axes, shown: list[Panel], kind: Kind, share: float) -> None:
    """Limits that hold every value below the part of the axes that the failed cells take."""
    edges = [edge for panel in shown for line in panel.lines for edge in (line.y, line.low, line.high)]
    edges += [np.array(line.auto[1:]) for panel in shown for line in panel.lines if line.auto]
    values = np.concatenate([[1.0] if kind is SPEEDUP else [], *edges])
    values = np.log10(values[np.isfinite(values) & (values > 0)])
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    margin = max(0.06 * (high - low), 0.08)
    low, high = low - margin, high + margin
    top = low + (high - low) / (1 - share)
    axes.set_yscale("log")
    axes.set_ylim(10**low, 10**top)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if top - low > 2 else (1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(LogLocator(subs=tuple(range(2, 10))))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if not any(np.isfinite(edge).any() for edge in edges):
        axes.yaxis.set_major_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}{kind.unit}"))


def _draw_panel(axes: Axes, panel: Panel, kind: Kind, xs: list[float], row: float, styles: dict[str, Style]) -> None:
    """The lines, and above them, `row` of the axes' height for each, the failed cells."""
    axes.set_title(panel.title, loc="left", fontsize=9.5)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="major", length=3, width=0.7)
    axes.tick_params(which="minor", length=1.8, width=0.5)
    for line in sorted(panel.lines, key=lambda line: not line.yardstick):  # the rivals on top
        style = styles[line.impl]
        axes.fill_between(line.x, line.low, line.high, color=style.colour, alpha=0.2, linewidth=0)
        axes.vlines(line.x, line.low, line.high, color=style.colour, linewidth=0.8)
        axes.plot(line.x, line.y, **_look(style))
        if line.auto:
            axes.plot(*line.auto, color=style.colour, zorder=3, **AUTO)
    top = 1.0
    for failure, rows in zip(panel.failures, _failure_rows(panel, xs), strict=True):
        bottom = top - rows * row
        axes.add_patch(
            Rectangle((0, bottom), 1, top - bottom, transform=axes.transAxes, color=BACKDROP, zorder=0, linewidth=0)
        )
        _draw_failure(axes, failure, bottom + row / 2, top - row / 2, styles[failure.impl].colour)
        top = bottom
    if not any(np.isfinite(line.y).any() for line in panel.lines):
        words = "no speedup: the baseline has no time" if kind is SPEEDUP else "no cell has a valid time"
        axes.text(0.5, top / 2, words, transform=axes.transAxes, ha="center", va="center", color=QUIET)


def _draw_failure(axes: Axes, failure: Failure, y: float, y_above: float, colour: str) -> None:
    """Crosses at the failed places; the word where there is more room, beside or above them."""
    place = axes.get_xaxis_transform()
    axes.plot(
        failure.xs, [y] * len(failure.xs), transform=place, color=colour, linewidth=0.8,
        marker="x", markersize=4.5, markeredgewidth=1.3,
    )  # fmt: skip
    first, last = failure.xs[0], failure.xs[-1]
    left, right = axes.get_xlim()
    text: dict[str, Any] = {"xycoords": place, "textcoords": "offset points", "va": "center", "fontsize": 7}
    words = f"{failure.label}: {failure.word}"
    if y_above > y:
        axes.annotate(words, ((first * last) ** 0.5, y_above), xytext=(0, -1), ha="center", **text)
    elif first / left > right / last:
        axes.annotate(words, (first, y), xytext=(-6, 0), ha="right", **text)
    else:
        axes.annotate(words, (last, y), xytext=(6, 0), ha="left", **text)


def _look(style: Style) -> dict[str, Any]:
    return {
        "color": style.colour, "linestyle": style.dashes, "linewidth": 1.5,
        "marker": style.marker, "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.6,
    }  # fmt: skip


def _failure_rows(panel: Panel, xs: list[float]) -> list[int]:
    """Rows that each run of failed cells takes: two where it leaves its word no room beside it."""
    room = 0.55 * np.log(xs[-1] / xs[0])
    return [2 if np.log(failure.xs[-1] / failure.xs[0]) > room else 1 for failure in panel.failures]


def _legend(shown: list[Panel], styles: dict[str, Style]) -> list[Line2D]:
    """One entry a line, rivals first, and one for the crosses."""
    lines = {line.label: line for panel in shown for line in panel.lines}
    order = list(STYLES)
    ranked = sorted(
        lines.values(),
        key=lambda line: (line.yardstick, order.index(line.impl) if line.impl in order else len(order)),
    )
    handles = [Line2D([], [], label=line.label, **_look(styles[line.impl])) for line in ranked]
    if any(line.auto for line in lines.values()):
        handles.append(Line2D([], [], label="auto", color="white", **AUTO))
    if any(panel.failures for panel in shown):
        handles.append(Line2D([], [], label="no valid time", color=INK, linewidth=0, marker="x", markersize=4.5))
    return handles
