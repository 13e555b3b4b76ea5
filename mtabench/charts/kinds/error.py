"""Relative error against float64 by sequence length, a panel a dtype and problem."""

from dataclasses import replace

import pandas as pd

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import SETTING, baseline_name, one_line_each
from mtabench.charts.findings import about_one, called, mean, paired, place, subject
from mtabench.charts.lines import YAxis, line_chart
from mtabench.charts.panels import Panel, check_panels, column, has_values, panels
from mtabench.charts.text import TIMES, factor, shortened


def chart(cells: pd.DataFrame) -> Chart | None:
    """Errors of the cells that were right, and marks at those that were not."""
    cells = one_line_each(cells)
    shown: list[Panel] = []
    dtypes = list(dict.fromkeys(cells["dtype"]))
    for dtype in dtypes:
        of_dtype = panels(cells[cells["dtype"] == dtype], column("rel_error"))
        shown += [replace(panel, title=f"{dtype}, {panel.title}") for panel in of_dtype] if dtypes[1:] else of_dtype
    check_panels(len(shown))
    if not has_values(shown):
        return None
    title = titled(cells, _finding(cells), "error against sequence length")
    y_axis = YAxis("relative error", nothing="no cell has an error")
    return line_chart(cells, shown, title, y_axis, "error relative to the same in float64")


def _finding(cells: pd.DataFrame) -> str:
    own, base = subject(cells), baseline_name(cells)
    shapes = paired(cells, own, base, "rel_error")
    valid = cells[(cells["status"] == "ok") & cells["rel_error"].notna()]
    mine = valid[valid["impl"] == own] if len(shapes) else valid
    largest = mine.loc[[mine["rel_error"].idxmax()]]
    error = f"{largest['rel_error'].iloc[0]:.2g}"
    at = place(largest, cells) + (f", {largest['dtype'].iloc[0]}" if cells["dtype"].nunique() > 1 else "")
    if shapes.empty:
        return f"the largest error is {error}, of {shortened(str(largest['impl'].iloc[0]))} at {at}"
    ratio = 1 / mean(shapes)
    times = "that of" if about_one(ratio) else f"{factor(ratio)}{TIMES} that of"
    words = f"{called(cells, own)}'s error is {times} {shortened(base)}"
    average = f" in the geometric mean of {len(shapes)} shapes" if len(shapes) > 1 else ""
    return f"{words}{average}; its largest is {error}, at {at}"


KIND = Kind("cells with rel_error", chart, tuple(name for name in SETTING if name != "dtype"), place=8)
