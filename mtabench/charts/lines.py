"""Draws panels of lines: axes that hold every value, bands, and the name of each line at its end."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from mtabench.charts.chart import PANEL_INCHES, Chart, columns_of
from mtabench.charts.panels import Line, Panel, broken, check_panels, failure_note
from mtabench.charts.style import Look
from mtabench.charts.text import caption, fitted, inches, length_label, shortened, unsettled_note
from mtabench.implementations import Style
from mtabench.measuring.settled import UNSETTLED
from mtabench.problem.axes import short
from mtabench.problem.operations import NO_PAGES

MAX_TICKS = 8
AXES_HEIGHT = 2.9  # inches; about what a panel leaves its axes
AUTO_NOTE = "stars: what auto chose"
YARDSTICK_NOTE = "dashed grey: plain attention, which does less work; a yardstick, not a rival"
LEAST_DECADES = 0.75
AUTO: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 12}
SIZE = 8.0  # points
ROW_INCHES = 0.15  # that a name takes
MOST_INCHES = 1.5  # of a name, which loses its middle beyond
GAP = 0.1  # inches between a line and its name
NEAR = 0.1  # of the axes' width: a line that ends further from the right edge is led to its name by dots
LABEL_SIZE = 8.5
MARGIN_INCHES = 0.9  # above and below the rows


@dataclass(frozen=True)
class YAxis:
    """The y axis: its label, the sign at its ticks, whether it is linear from 0, and values that it must hold.

    `nothing` is what a panel without any value says.
    """

    label: str
    sign: str = ""
    linear: bool = False
    holds: tuple[float, ...] = ()
    nothing: str = "no cell has a valid time"


def line_chart(
    cells: pd.DataFrame,
    shown: Sequence[Panel],
    title: str,
    y_axis: YAxis,
    how: str,
    notes: Sequence[str] = (),
    x_label: str = "",
    over: Callable[[Axes, Look], None] | None = None,
    styles: dict[str, Style] | None = None,
    place: Callable[[str], str] = lambda xs: xs,
) -> Chart:
    """The chart of these panels; `how` says in the caption what the lines are.

    `over` draws what is the same in each panel. `styles` holds the styles of lines that are no implementations. `place`
    words values of the x axis.
    """
    of_auto = {line.auto[0] for panel in shown for line in panel.lines if line.auto}
    xs = sorted(of_auto.union(*(panel.places for panel in shown)))
    margin = (xs[-1] / xs[0]) ** 0.06 if len(xs) > 1 else 2.0
    x_limits, y_limits = (xs[0] / margin, xs[-1] * margin), _y_limits(shown, y_axis)
    height = max(AXES_HEIGHT, *(ROW_INCHES * len(panel.lines) for panel in shown))
    lines = [line for panel in shown for line in panel.lines]
    labels = {line.label for line in lines}

    def draw_panel(axes: Axes, panel: Panel, look: Look) -> Callable[[], None]:
        look = replace(look, styles=look.styles | (styles or {}))
        _set_x_axis(axes, xs, x_limits)
        _set_y_axis(axes, y_axis, y_limits)
        plain_axes(axes, look)
        if over:
            over(axes, look)
        for line in sorted(panel.lines, key=lambda line: not line.yardstick):  # the rivals on top
            _draw_line(axes, line, panel.places, look)
        if not any(np.isfinite(line.y).any() for line in panel.lines):
            at: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
            axes.text(0.5, 0.5, y_axis.nothing, color=look.theme.quiet, **at)
        return naming(axes, panel.lines, labels, look)

    notes = [*yardstick_notes(lines, cells), *notes]
    if any(line.auto for line in lines):
        notes.append(AUTO_NOTE)
    if any(line.hollow.any() for line in lines):
        notes += unsettled_note(cells)
    return Chart(
        title,
        caption(cells, how, [*notes, *failure_note(shown, place)]),
        shown,
        draw_panel,
        x_label or length_label(cells),
        y_axis.label,
        columns_of(cells, len(shown)),
        (PANEL_INCHES[0] + names_width(labels), PANEL_INCHES[1] + height - AXES_HEIGHT),
    )


def yardstick_notes(lines: Iterable[Line], cells: pd.DataFrame) -> list[str]:
    """What a dashed grey line is, and that it has no pages where others do, for the caption; nothing without one."""
    if not any(line.yardstick for line in lines):
        return []
    return [YARDSTICK_NOTE, *([NO_PAGES] if (cells["page_size"] != "").any() else [])]


def plain_axes(axes: Axes, look: Look, grid: Any = "y") -> None:
    """Quiet axes: left and bottom, and a thin grid below what is drawn."""
    axes.grid(axis=grid, color=look.theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="major", length=3, width=0.7)
    axes.tick_params(which="minor", length=1.8, width=0.5)


def spread(low: float, high: float, share: float, least: float = LEAST_DECADES) -> tuple[float, float]:
    """Decades from `low` to `high` with a margin, `least` at least: enough that the axis has more than one tick."""
    margin = max(share * (high - low), 0.08, (least - (high - low)) / 2)
    return low - margin, high + margin


def log_ticks(axis: Any, decades: float, sign: str = "") -> None:
    """Ticks of a logarithmic axis that spans so many decades."""
    across = axis.axis_name == "x"  # where numbers stand side by side
    few = {"numticks": 5} if decades > 4 and across else {}
    axis.set_major_locator(LogLocator(subs=(1.0,) if decades > (2 if across else 3.2) else (1.0, 2.0, 5.0), **few))
    # Over more decades they show little, and take matplotlib as long as all the rest.
    axis.set_minor_locator(LogLocator(subs=tuple(range(2, 10))) if decades <= 3 else NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}{sign}"))


def _set_x_axis(axes: Axes, xs: list[float], limits: tuple[float, float]) -> None:
    powers = [x for x in xs if int(x).bit_count() == 1]
    ticks = xs if len(xs) <= MAX_TICKS or len(powers) < 2 else powers
    axes.set_xscale("log", base=2)
    axes.set_xlim(*limits)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // MAX_TICKS)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(round(value))))


def _y_limits(shown: Sequence[Panel], y_axis: YAxis) -> tuple[float, float] | None:
    """Limits that hold every value; None without one."""
    edges = [edge for panel in shown for line in panel.lines for edge in (line.y, line.low, line.high)]
    edges += [np.array(line.auto[1:]) for panel in shown for line in panel.lines if line.auto]
    if not any(np.isfinite(edge).any() for edge in edges):
        return None
    values = np.concatenate([y_axis.holds, *edges])
    values = values[np.isfinite(values) & (values > 0)]
    if y_axis.linear:
        return 0.0, float(values.max() * 1.06)
    low, high = np.log10(values).min(), np.log10(values).max()
    low, high = spread(float(low), float(high), 0.06)
    return 10**low, 10**high


def _set_y_axis(axes: Axes, y_axis: YAxis, limits: tuple[float, float] | None) -> None:
    if limits is None:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_locator(NullLocator())
        return
    if y_axis.linear:
        axes.set_ylim(*limits)
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}{y_axis.sign}"))
        return
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    log_ticks(axes.yaxis, float(np.log10(limits[1] / limits[0])), y_axis.sign)


def _draw_line(axes: Axes, line: Line, places: set[float], look: Look) -> None:
    colour = look.colour(line.impl)
    path, gid = broken(line, line.x, places), look.gid(line.rows)
    axes.fill_between(path.x, path.low, path.high, color=colour, alpha=0.2, linewidth=0, gid=gid)
    axes.vlines(line.x, line.low, line.high, color=colour, linewidth=0.8, gid=gid)
    gid = look.gid(line.rows[np.isfinite(line.y)], "points")
    axes.plot(path.x, path.y, label=line.label, gid=gid, **look.line(line.impl))
    if line.hollow.any():
        gid = look.gid(line.rows[line.hollow], "points")
        axes.plot(line.x[line.hollow], line.y[line.hollow], gid=gid, **look.hollow(line.impl))
    if line.auto:
        axes.plot(*line.auto, color=colour, markeredgecolor=look.theme.ink, zorder=3, **AUTO)


def names_width(names: Iterable[str]) -> float:
    """The room in inches that the names take beside a panel."""
    return max((inches(_fitted(name), SIZE) + GAP for name in names), default=0.0)


def naming(axes: Axes, lines: Sequence[Line], labels: Iterable[str], look: Look) -> Callable[[], None]:
    """Keep room right of the axes for the names that all panels have, and return what writes the names of `lines`.

    It is called once the axes have their place. The names stand in the order of the lines' ends, none on another.
    """
    widest = max(map(_fitted, labels), key=lambda name: inches(name, SIZE), default="")
    outside: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": SIZE}
    room = axes.annotate(widest, (1, 0.5), (GAP * 72, 0), color=axes.get_facecolor(), **outside)

    def finish() -> None:
        room.remove()
        ends = [(line, *end) for line in lines if (end := _end(axes, line)) is not None]
        ends.sort(key=lambda end: -end[2])
        box, figure = axes.get_window_extent(), axes.get_figure(root=True)
        assert figure is not None
        width, height = box.width / figure.dpi, box.height / figure.dpi
        heights = spread_out([y * height for _, _, y in ends], ROW_INCHES, 0, height)
        for (line, x, y), at in zip(ends, heights, strict=True):
            away = 1 - x > NEAR or abs(at - y * height) > 0.3 * ROW_INCHES
            _write(axes, line, look, (1 + GAP / width, at / height), (x, y) if away else None)

    return finish


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near to `wanted`, which falls, as they can be `gap` apart, between `low` and `high` if they all fit.

    Neighbours that would touch form a block around their mean.
    """
    blocks: list[list[float]] = []  # the sum of what each block's first place is wanted to be, and its members
    for place in wanted:
        blocks.append([place, 1])
        while len(blocks) > 1 and _top(blocks[-2]) - blocks[-2][1] * gap < _top(blocks[-1]):
            total, count = blocks.pop()
            blocks[-1][0] += total + blocks[-1][1] * gap * count
            blocks[-1][1] += count
    places = [_top(block) - i * gap for block in blocks for i in range(int(block[1]))]
    for i, place in enumerate(places):  # from the top, then from the bottom
        places[i] = min(place, high - i * gap)
    for i, place in enumerate(reversed(places)):
        places[-1 - i] = max(place, low + i * gap)
    return places


def _top(block: Sequence[float]) -> float:
    return block[0] / block[1]


def _fitted(name: str) -> str:
    return fitted(shortened(name), MOST_INCHES, SIZE)


def _end(axes: Axes, line: Line) -> tuple[float, float] | None:
    """A line's last point as shares of the axes, None without any."""
    known = np.flatnonzero(np.isfinite(line.x) & np.isfinite(line.y))
    if not len(known):
        return None
    x, y = (axes.transData - axes.transAxes).transform((line.x[known[-1]], line.y[known[-1]]))
    return float(x), float(y)


def _write(
    axes: Axes, line: Line, look: Look, at: tuple[float, float], end: tuple[float, float] | None
) -> None:  # fmt: skip
    """The name, with a thin line from the line's `end` where that is somewhere else; places are shares of the axes."""
    gid = look.gid(line.rows)
    places: dict[str, Any] = {"transform": axes.transAxes, "va": "center_baseline"}
    axes.text(*at, _fitted(line.label), fontsize=SIZE, color=look.text(line.impl), gid=gid, **places)
    if end is None:
        return
    style: dict[str, Any] = {"color": look.colour(line.impl), "linewidth": 0.6, "alpha": 0.7}
    style |= {"arrowstyle": "-", "shrinkA": 1.5, "shrinkB": 3}
    style["linestyle"] = (0, (1, 3)) if end[0] < 1 - NEAR else "-"  # no part of a line that ends inside
    leader = axes.annotate("", end, at, xycoords="axes fraction", annotation_clip=False, arrowprops=style)
    if leader.arrow_patch:
        leader.arrow_patch.set_gid(gid)


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
