"""Time relative to plain attention, against sequence length: what conv attention costs its user."""

import pandas as pd

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import one_line_each
from mtabench.charts.findings import paired, plain, speed_range, subject, yardstick
from mtabench.charts.lines import YAxis, line_chart
from mtabench.charts.panels import Band, over, panels
from mtabench.charts.text import TIMES, shortened

RATIOS = "ratios of medians, with bands of their 95 % intervals"


def chart(cells: pd.DataFrame) -> Chart | None:
    """Median times relative to the plain attention that is fastest in most shapes, at the same shape."""
    cells = one_line_each(cells)
    own, other = subject(cells), yardstick(cells)
    pairs = paired(cells, own, other)
    if pairs.empty:
        return None

    def values(group: pd.DataFrame, panel: pd.DataFrame) -> Band:
        base = panel[(panel["impl"] == other) & (panel["op"] == "attention")]
        return over(group, base, lambda mine, theirs: mine / theirs, ("batch", "seq"))

    finding = f"{shortened(own)} {speed_range(pairs, plain(other, cells))}"
    y_axis = YAxis(
        f"time over {shortened(other)}'s", TIMES, holds=(1.0,), nothing=f"no time of {shortened(other)} to compare with"
    )
    return line_chart(cells, panels(cells, values), titled(cells, finding, ""), y_axis, RATIOS)


NEEDS = "a time of plain attention beside one of conv attention, other than the baseline's, at the same shape"
KIND = Kind(NEEDS, chart, place=0, heading="Time over that of plain attention")
