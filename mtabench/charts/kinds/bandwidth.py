"""Decode: the rate at which the cache is read, against its length, with the memory limit."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from mtabench.charts.ceilings import known_ceilings
from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import one_line_each
from mtabench.charts.findings import reach, where
from mtabench.charts.lines import YAxis, line_chart
from mtabench.charts.panels import Band, has_values, panels, times
from mtabench.charts.style import Look
from mtabench.charts.text import number, percent, span


def chart(cells: pd.DataFrame) -> Chart | None:
    """GB/s of the K and V cache, each byte counted once; the limit is what the device reads, or else copies."""
    decode = cells[cells["pass"] == "decode"]
    if decode.empty:
        return None
    cells = one_line_each(decode)
    shown = panels(cells, _values)
    if not has_values(shown):
        return None
    ceilings = known_ceilings(cells)
    limit, kind = ceilings.memory("decode")

    def draw_limit(axes: Axes, look: Look) -> None:
        if limit is None:
            return
        axes.axhline(limit, color=look.theme.ink, linewidth=1.2)
        words = f"{kind} {number(limit)} GB/s"
        at: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
        axes.annotate(words, (0.02, limit), xytext=(0, 3), fontsize=7, **at)

    y_axis = YAxis("cache read (GB/s)", linear=True, holds=(limit,) if limit else (), nothing="no cell has a rate")
    how = "bytes of the K and V cache over median time, with bands of the 95 % intervals"
    title = titled(cells, _finding(cells, limit, kind), "bandwidth against cache length")
    return line_chart(cells, shown, title, y_axis, how, [ceilings.note], over=draw_limit)


def _values(group: pd.DataFrame, _: pd.DataFrame) -> Band:
    median, low, high, unsettled = times(group)
    y = group["gbytes_s"].where(group["status"] == "ok").to_numpy(float)
    return Band(y, y * median / high, y * median / low, unsettled)


def _finding(cells: pd.DataFrame, limit: float | None, kind: str) -> str:
    found = reach(cells, "gbytes_s")
    if not found:
        return ""
    shapes, rates, halves = found.shapes, found.shapes["gbytes_s"], found.shapes["half"]
    words = f"{found.name} reads the cache at {span(rates, halves, number)} GB/s {where(shapes, cells, '')}"
    if limit is None:
        return words
    return f"{words}, {span(rates / limit, halves, percent)} of the {kind}"


KIND = Kind("decode cells with gbytes_s", chart, place=6)
