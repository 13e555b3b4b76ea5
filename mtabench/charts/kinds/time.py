"""Time against sequence length."""

import pandas as pd

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import one_line_each
from mtabench.charts.findings import time_finding
from mtabench.charts.lines import YAxis, line_chart
from mtabench.charts.panels import panels, times

BANDS = "medians, with bands of their 95 % intervals"


def chart(cells: pd.DataFrame) -> Chart | None:
    """Median times; cells without one are marked."""
    cells = one_line_each(cells)
    shown = panels(cells, lambda group, _: times(group))
    title = titled(cells, time_finding(cells), "time against sequence length")
    return line_chart(cells, shown, title, YAxis("time (ms)"), BANDS)


KIND = Kind("a cell of any implementation", chart, place=1, heading="Time")
