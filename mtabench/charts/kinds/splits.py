"""Decode's time against the splits of the keys, with what auto chose."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, floor, hypot, log10
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

from mtabench.charts.chart import Chart, Kind, titled
from mtabench.charts.kinds.time import BANDS
from mtabench.charts.lines import YAxis, line_chart
from mtabench.charts.panels import Failure, Line, Panel, check_panels, failures_of, times
from mtabench.charts.text import problem, shortened
from mtabench.implementations import Style
from mtabench.problem.axes import short
from mtabench.problem.operations import OPERATION_COLUMNS
from mtabench.results.results_file import KEY_COLUMNS, Row, text_of


def chart(cells: pd.DataFrame) -> Chart | None:
    """A panel an implementation and problem whose splits were swept, with a line a sequence length."""
    swept = cells[cells["splits"] != ""]
    shown = split_panels(swept)
    if not shown:
        return None
    title = titled(cells, _finding(swept), "time against splits of the keys")
    x_label = "splits (programs that share the keys of a head)"
    more: dict[str, Any] = {"styles": _ramp(shown), "place": lambda splits: f"{splits} splits"}
    return line_chart(swept, shown, title, YAxis("time (ms)"), BANDS, x_label=x_label, **more)


def split_panels(swept: pd.DataFrame) -> list[Panel]:
    """The panels of cells that name their splits; none of those where fewer than two numbers have a time."""
    swept = swept.fillna(dict.fromkeys(OPERATION_COLUMNS, 0))
    shown = []
    groups = swept.groupby(["head_dim", *OPERATION_COLUMNS, "impl"])
    check_panels(groups.ngroups)
    for _, group in groups:
        numbers = group[group["splits"] != "auto"]
        if numbers.loc[numbers["status"] == "ok", "splits"].nunique() < 2:
            continue
        lines: list[Line] = []
        failures: list[Failure] = []
        for seq in sorted(set(numbers["seq"])):
            line, failed = _split_line(f"{short(int(seq))} keys", group[group["seq"] == seq])
            lines.append(line)
            failures += failed
        first = group.iloc[0]
        title = f"{shortened(first['impl'])}, {problem(first['head_dim'], *first[[*OPERATION_COLUMNS]])}"
        shown.append(Panel(title, tuple(lines), tuple(failures)))
    return shown


def _split_line(label: str, cells: pd.DataFrame) -> tuple[Line, list[Failure]]:
    """The times of one sequence length against splits, and what failed."""
    auto = cells[(cells["splits"] == "auto") & (cells["splits_used"] != "") & (cells["status"] == "ok")]
    mark = (float(auto["splits_used"].iloc[0]), float(auto["median_ms"].iloc[0])) if len(auto) else None
    numbers = cells[cells["splits"] != "auto"]
    numbers = numbers.assign(x=numbers["splits"].astype(int)).sort_values("x")
    places = numbers["row"].to_numpy(), numbers["seq"].to_numpy(), numbers["x"].to_numpy(float)
    line = Line(label, label, False, *places, **times(numbers)._asdict(), auto=mark)
    return line, list(failures_of(label, label, numbers, numbers["x"]))


def _ramp(shown: list[Panel]) -> dict[str, Style]:
    """A style for each sequence length: away from the colour of the page as they grow shorter."""
    names = list(dict.fromkeys(line.impl for panel in shown for line in panel.lines))
    lights, darks = (
        [to_hex(colour) for colour in mpl.colormaps["viridis"](np.linspace(*ends, len(names)))]
        for ends in ((0, 0.75), (1, 0.35))
    )
    return {name: Style(light, dark, "o", "-") for name, light, dark in zip(names, lights, darks, strict=True)}


def _finding(swept: pd.DataFrame) -> str:
    """How much longer auto took than the best number measured, at most."""
    rows: list[Any] = swept.to_dict("records")
    found = list(choices(rows))
    if not found:
        return ""
    worst = max(found, key=lambda choice: choice.slowdown)
    half = hypot(worst.auto["half"], worst.best["half"])
    least = max(0.1, 10.0 ** floor(log10(200 * half))) if half else 0.1  # percent: no digit that the interval hides
    slowdown = ceil(round(100 * worst.slowdown / least, 6)) * least
    of = f" in all of {len(found)} shapes" if len(found) > 1 else ""
    names = {shortened(str(choice.auto["impl"])) for choice in found}
    who = f"{names.pop()}'s auto" if len(names) == 1 else "auto"
    if not slowdown:
        return f"{who} takes no longer than the best number of splits measured{of}"
    return f"{who} is within {slowdown:.{0 if least >= 1 else 1}f} % of the best number of splits measured{of}"


KIND = Kind("times of at least two numbers of splits (such as mtabench decode --splits auto,1..128)", chart, place=9)


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one implementation on one problem: the row of auto, and the row of the fastest number of splits measured."""

    auto: Row
    best: Row

    @property
    def slowdown(self) -> float:
        """The part of the best's time that auto took longer; 0 if it took that number or none was faster."""
        if text_of(self.auto["splits_used"]) == text_of(self.best["splits"]):
            return 0.0
        return max(0.0, float(self.auto["median_ms"]) / float(self.best["median_ms"]) - 1)


def choices(rows: Iterable[Row]) -> Iterator[Choice]:
    """What auto chose wherever it and at least one number have a valid time, in the order of the rows."""
    problems: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        splits = text_of(row["splits"])
        if splits and row["status"] == "ok":
            problem = tuple(text_of(row[name]) for name in KEY_COLUMNS if name != "splits")
            problems.setdefault(problem, {})[splits] = row
    for timed in problems.values():
        auto = timed.pop("auto", None)
        if auto and timed:
            yield Choice(auto, min(timed.values(), key=lambda row: float(row["median_ms"])))
