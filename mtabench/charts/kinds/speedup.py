"""Speedup over the baseline against sequence length."""

import pandas as pd

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.data import baseline_name, beside, one_line_each, rivals
from mtabench.charts.findings import OPERATION, SHAPE, called, speed_range, subject, where, yardstick
from mtabench.charts.kinds.overhead import RATIOS
from mtabench.charts.lines import YAxis, line_chart
from mtabench.charts.panels import Band, over, panels
from mtabench.charts.text import TIMES, shortened
from mtabench.problem.operations import PLAIN


def chart(cells: pd.DataFrame) -> Chart | None:
    """Speedups of the file; plain attention has none there, and its line is the ratio to the panel's baseline."""
    cells = one_line_each(cells)
    baseline = baseline_name(cells)
    if rated(cells).empty:
        return None

    def values(group: pd.DataFrame, panel: pd.DataFrame) -> Band:
        base = panel[panel["impl"] == baseline]
        return over(group, base, lambda mine, theirs: group["speedup"].fillna(theirs / mine), ("batch", "seq"))

    shown = panels(cells, values)
    title = titled(cells, _finding(cells), "speedup against sequence length")
    nothing = "no speedup: the baseline has no time"
    y_axis = YAxis(f"speedup over {shortened(baseline)}", TIMES, holds=(1.0,), nothing=nothing)
    return line_chart(cells, shown, title, y_axis, RATIOS)


def rated(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells with a speedup, in `ratio`, and with its `half`; the baseline's own are left out."""
    own = rivals(cells)
    timed = own[(own["status"] == "ok") & own["speedup"].notna()]
    base = cells[cells["impl"] == baseline_name(cells)]
    theirs = beside(timed, base, SHAPE if (base["op"] == PLAIN).all() else [*SHAPE, *OPERATION])
    return timed.assign(ratio=timed["speedup"], half=theirs["half"], unsettled=theirs["unsettled"])


def _finding(cells: pd.DataFrame) -> str:
    mine = rated(cells)
    own = subject(mine) or yardstick(mine)
    mine = mine[mine["impl"] == own]
    if mine.empty:
        return ""
    words = f"{called(cells, own)} {speed_range(mine, shortened(baseline_name(cells)))}"
    return f"{words} {where(mine, cells)}" if len(mine) == 1 else words


KIND = Kind("a timed baseline, and a speedup of another implementation over it", chart, place=2, heading="Speedup")
