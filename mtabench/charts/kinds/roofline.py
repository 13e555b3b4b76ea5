"""Roofline: achieved TFLOP/s against arithmetic intensity, under what the device can do at most."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import atan, degrees, log10
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from mtabench.charts.ceilings import READING, Memory, intensity, known_ceilings
from mtabench.charts.chart import PANEL_INCHES, Chart, Kind, columns_of, titled
from mtabench.charts.data import one_line_each
from mtabench.charts.findings import plain, reach, where
from mtabench.charts.lines import log_ticks, names_width, naming, plain_axes, spread, yardstick_notes
from mtabench.charts.panels import Panel, broken, column, failure_note, panels
from mtabench.charts.style import Look
from mtabench.charts.text import caption, number, percent, span, unsettled_note
from mtabench.console import flop_unit
from mtabench.problem.axes import short
from mtabench.problem.case import CACHED_PASSES

SIZES = (12.0, 64.0)  # of a marker, in square points, from the shortest sequence to the longest
LEAST_DECADES = 1.4  # of the x axis, so that the words along the slope end before points of one intensity
Ends = tuple[float, float]


@dataclass(frozen=True)
class Roof:
    """What the device can do at most in these cells, as far as it is known: `products` in `unit`, TFLOP/s or GFLOP/s.

    `slope` is the height in `unit` at an intensity of 1, 0 where the rate of memory is unknown.
    """

    products: float | None
    memory: Memory
    slope: float
    unit: str

    def height(self, at: float) -> float | None:
        """The lowest known ceiling at this intensity."""
        return min((height for height in (self.slope * at, self.products) if height), default=None)


def chart(cells: pd.DataFrame) -> Chart | None:
    """A line an implementation from its shortest sequence to its longest; the caption names invalid times."""
    cells = one_line_each(cells)
    valid = cells[(cells["status"] == "ok") & cells["useful_tflops"].notna() & cells["gbytes_s"].notna()]
    if valid.empty:
        return None
    unit, factor = flop_unit(cells["useful_tflops"].dropna())
    valid = valid.assign(intensity=intensity(valid), rate=factor * valid["useful_tflops"])
    shown = panels(valid, column("rate", of_time=True), across="intensity")
    lines = [line for panel in shown for line in panel.lines]
    labels = {line.label for line in lines}
    with_failures = panels(cells, column("useful_tflops"))
    failed = failure_note(with_failures)
    measured = {panel.title: panel.places for panel in with_failures}
    ceilings = known_ceilings(cells)
    memory = ceilings.memory(cells["pass"].iloc[0])
    roof = Roof(factor * (ceilings.matmul_tflops or 0) or None, memory, factor * (memory.gbytes_s or 0) / 1e3, unit)
    x_limits, y_limits = _limits(valid["intensity"], valid["rate"], roof)
    seqs = sorted(set(valid["seq"].astype(int)))
    sizes = dict(zip(seqs, np.linspace(*SIZES, len(seqs)) if seqs[1:] else [sum(SIZES) / 2], strict=True))
    notes = yardstick_notes(lines, cells)
    if seqs[1:]:
        notes.append(f"markers grow with the sequence length, from {short(seqs[0])} to {short(seqs[-1])} tokens")
    return Chart(
        titled(cells, _finding(cells, roof), "arithmetic against arithmetic intensity"),
        caption(cells, "useful FLOPs over median time", [*notes, *unsettled_note(cells), ceilings.note, *failed]),
        shown,
        partial(_draw, x_limits=x_limits, y_limits=y_limits, roof=roof, sizes=sizes, labels=labels, measured=measured),
        "arithmetic intensity (useful FLOP/byte)",
        unit,
        columns_of(cells, len(shown)),
        (PANEL_INCHES[0] + names_width(labels), PANEL_INCHES[1]),
    )


def _limits(x: pd.Series, y: pd.Series, roof: Roof) -> tuple[Ends, Ends]:
    """Axes that hold all points, the roof above them, and its words, which begin at the left."""
    x_limits = _spread(x.min(), x.max(), LEAST_DECADES)
    heights = [height for at in x_limits if (height := roof.height(at))]
    return x_limits, _spread(min([y.min(), *heights]), max([y.max(), *heights]), 1.0)


def _spread(low: float, high: float, least: float) -> Ends:
    decades = spread(log10(low), log10(high), 0.1, least)
    return 10 ** decades[0], 10 ** decades[1]


def _draw(
    axes: Axes, panel: Panel, look: Look, x_limits: Ends, y_limits: Ends, roof: Roof, sizes: dict[int, float],
    labels: set[str], measured: dict[str, set[float]],
) -> Callable[[], None]:  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*x_limits)
    axes.set_ylim(*y_limits)
    log_ticks(axes.xaxis, np.log10(x_limits[1] / x_limits[0]))
    log_ticks(axes.yaxis, np.log10(y_limits[1] / y_limits[0]))
    plain_axes(axes, look, grid="both")
    _draw_roof(axes, x_limits, roof, look)
    seqs = measured.get(panel.title, set()).union(*(line.seqs for line in panel.lines))
    for line in sorted(panel.lines, key=lambda line: not line.yardstick):  # the rivals on top
        path = broken(line, line.seqs, seqs)
        axes.plot(path.x, path.y, label=line.label, **look.line(line.impl) | {"marker": "none"})
        colour, paper = look.colour(line.impl), look.theme.paper
        axes.scatter(
            line.x,
            line.y,
            [sizes[seq] for seq in line.seqs],
            marker=look.styles[line.impl].marker,
            facecolor=[paper if hollow else colour for hollow in line.hollow],
            edgecolor=[colour if hollow else paper for hollow in line.hollow],
            linewidth=[1.2 if hollow else 0.6 for hollow in line.hollow],
            zorder=2.5,
        )
    return naming(axes, panel.lines, labels, look)


def _draw_roof(axes: Axes, x_limits: Ends, roof: Roof, look: Look) -> None:
    """The known ceilings, each as far as it is the lowest known one, with its name along it."""
    flat, slope = roof.products, roof.slope
    ridge = flat / slope if flat and slope else None
    line: dict[str, Any] = {"color": look.theme.ink, "linewidth": 1.2, "zorder": 1.8}
    text: dict[str, Any] = {"fontsize": 7, "va": "bottom"}
    if slope and (ridge is None or ridge > x_limits[0]):
        ends = np.array([x_limits[0], min(ridge or np.inf, x_limits[1])])
        axes.plot(ends, slope * ends, **line)
        at = ends[0] * (ends[1] / ends[0]) ** 0.04
        along: dict[str, Any] = {
            "rotation": degrees(atan(slope)), "transform_rotates_text": True, "rotation_mode": "anchor",
        }  # fmt: skip
        words = f"{roof.memory.name} {number(roof.memory.gbytes_s or 0)} GB/s"
        axes.text(at, 1.06 * slope * at, words, **along, **text)
    if flat and (ridge is None or ridge < x_limits[1]):
        axes.plot([max(ridge or 0, x_limits[0]), x_limits[1]], [flat, flat], **line)
        words = f"matrix products {number(flat)} {roof.unit}"
        axes.text(x_limits[1] * 0.97, 1.04 * flat, words, ha="right", **text)


def _finding(cells: pd.DataFrame, roof: Roof) -> str:
    """The share of the roofline that the rows reach; in decode relative to a copy where reading was not measured."""
    found = reach(cells, "fraction_of_roofline")
    of_copies = bool((cells["pass"].isin(CACHED_PASSES) & cells["read_gbytes_s"].isna()).any())
    if not found or (of_copies and roof.memory.name == READING):
        return ""
    of = "the roofline of a copy" if of_copies else "the roofline"
    shares, theirs = (
        span(cells["fraction_of_roofline"], cells["half"], percent) if len(cells) else ""
        for cells in (found.shapes, found.yardstick_shapes)
    )
    at = where(found.shapes, cells, "")
    words = f"{found.name} reaches {shares} of {of} {at}"
    return f"{words}, {plain(found.yardstick, cells)} {theirs}" if theirs else words


KIND = Kind("cells with useful_tflops and gbytes_s", chart, place=5)
