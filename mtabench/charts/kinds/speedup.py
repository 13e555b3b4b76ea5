"""Speedup over the baseline against sequence length."""

import numpy as np
import pandas as pd

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import baseline_name, one_line_each, rivals, unsettled_ratios
from mtabench.charts.findings import called, speed_range, subject, where, yardstick
from mtabench.charts.kinds.time import BANDS
from mtabench.charts.lines import YAxis, line_chart
from mtabench.charts.panels import Band, panels, times
from mtabench.charts.text import TIMES, shortened


def chart(cells: pd.DataFrame) -> Chart | None:
    """Speedups of the file; plain attention has none there, and its line is the ratio to the panel's baseline."""
    cells = one_line_each(cells)
    baseline = baseline_name(cells)
    if rated(cells).empty:
        return None

    def values(group: pd.DataFrame, panel: pd.DataFrame) -> Band:
        median, p10, p90 = times(group)
        if group["impl"].iloc[0] == baseline or (group["op"] == "attention").all():
            base = panel[(panel["impl"] == baseline) & (panel["status"] == "ok")]
            base_ms = base.groupby(["batch", "seq"])["median_ms"].first()
            y = base_ms.reindex(pd.MultiIndex.from_frame(group[["batch", "seq"]])).to_numpy(float) / median
        else:
            y = group["speedup"].where(group["status"] == "ok").to_numpy(float)
        return y, y * median / p90, y * median / p10

    def unsettled(group: pd.DataFrame, panel: pd.DataFrame) -> np.ndarray:
        return unsettled_ratios(group, panel[panel["impl"] == baseline], ("batch", "seq"))

    shown = panels(cells, values, unsettled)
    title = titled(cells, _finding(cells), "speedup against sequence length")
    nothing = "no speedup: the baseline has no time"
    y_axis = YAxis(f"speedup over {shortened(baseline)}", TIMES, holds=(1.0,), nothing=nothing)
    return line_chart(cells, shown, title, y_axis, BANDS)


def rated(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells with a speedup, in `ratio`; the baseline's own are left out."""
    own = rivals(cells)
    timed = own[(own["status"] == "ok") & own["speedup"].notna()]
    return timed.assign(ratio=timed["speedup"])


def _finding(cells: pd.DataFrame) -> str:
    mine = rated(cells)
    own = subject(mine) or yardstick(mine)
    mine = mine[mine["impl"] == own]
    if mine.empty:
        return ""
    words = f"{called(cells, own)} {speed_range(mine, shortened(baseline_name(cells)))}"
    return f"{words} {where(mine, cells)}" if len(mine) == 1 else words


KIND = Kind("a timed baseline, and a speedup of another implementation over it", chart, place=2)
