"""Time over that of plain attention against sequence length: what conv attention costs its user."""

import numpy as np
import pandas as pd

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import one_line_each, unsettled_ratios
from mtabench.charts.findings import paired, plain, speed_range, subject, yardstick
from mtabench.charts.kinds.time import BANDS
from mtabench.charts.lines import YAxis, line_chart
from mtabench.charts.panels import Band, panels, times
from mtabench.charts.text import TIMES, shortened


def chart(cells: pd.DataFrame) -> Chart | None:
    """Median times over those of the plain attention that is the fastest in most shapes, at the same shape."""
    cells = one_line_each(cells)
    own, other = subject(cells), yardstick(cells)
    pairs = paired(cells, own, other)
    if pairs.empty:
        return None

    def values(group: pd.DataFrame, panel: pd.DataFrame) -> Band:
        base = panel[(panel["impl"] == other) & (panel["op"] == "attention") & (panel["status"] == "ok")]
        base_ms = base.groupby(["batch", "seq"])["median_ms"].first()
        over = base_ms.reindex(pd.MultiIndex.from_frame(group[["batch", "seq"]])).to_numpy(float)
        median, p10, p90 = (values / over for values in times(group))
        return median, p10, p90

    def unsettled(group: pd.DataFrame, panel: pd.DataFrame) -> np.ndarray:
        return unsettled_ratios(group, panel[panel["impl"] == other], ("batch", "seq"))

    shown = panels(cells, values, unsettled)
    finding = f"{shortened(own)} {speed_range(pairs, plain(other, cells))}"
    y_axis = YAxis(
        f"time over {shortened(other)}'s", TIMES, holds=(1.0,), nothing=f"no time of {shortened(other)} to compare with"
    )
    return line_chart(cells, shown, titled(cells, finding, ""), y_axis, BANDS)


NEEDS = "a time of plain attention beside one of conv attention, other than the baseline's, at the same shape"
KIND = Kind(NEEDS, chart, place=0)
