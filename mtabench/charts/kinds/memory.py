"""Peak memory against sequence length."""

import pandas as pd

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import baseline_name, one_line_each
from mtabench.charts.findings import about_one, called, longest, mean, paired, subject, where
from mtabench.charts.lines import YAxis, line_chart
from mtabench.charts.panels import column, has_values, panels
from mtabench.charts.text import TIMES, factor, shortened


def chart(cells: pd.DataFrame) -> Chart | None:
    """The most device memory that one call takes beyond its inputs."""
    cells = one_line_each(cells)
    shown = panels(cells, column("peak_memory_mb"))
    if not has_values(shown):
        return None
    title = titled(cells, _finding(cells), "peak memory against sequence length")
    how = "the most device memory that a call takes beyond its inputs; 1 MB is 10\N{SUPERSCRIPT SIX} bytes"
    y_axis = YAxis("peak memory (MB)", nothing="no cell has a peak memory")
    return line_chart(cells, shown, title, y_axis, how)


def _finding(cells: pd.DataFrame) -> str:
    own, base = subject(cells), baseline_name(cells)
    shapes = longest(paired(cells, own, base, "peak_memory_mb"))
    if shapes.empty:
        return ""
    ratio, place = mean(shapes), where(shapes, cells)
    if about_one(ratio):
        return f"{called(cells, own)} takes as much memory as {shortened(base)} {place}"
    if ratio > 1:
        return f"{shortened(base)} takes {factor(ratio)}{TIMES} the memory of {called(cells, own)} {place}"
    return f"{called(cells, own)} takes {factor(1 / ratio)}{TIMES} the memory of {shortened(base)} {place}"


KIND = Kind("cells with peak_memory_mb, which a sweep on a GPU measures", chart, place=7)
