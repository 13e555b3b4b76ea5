"""What the scripts that train leave: a results file, and its chart beside it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mtabench.charts import stamp
from mtabench.charts.lines import naming
from mtabench.charts.panels import Line
from mtabench.charts.style import LIGHT, Look
from mtabench.implementations import Style

# Where a run was, of `mtabench.environment.describe`: columns of a results file.
PLACE = ("device", "driver", "cuda", "torch", "triton", "mtabench", "git_sha", "git_dirty", "python", "platform", "cpu")


def write_results(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], draw_chart: Callable[[Path], list[Path]]
) -> None:
    """Write each row as it comes and then draw their chart; print the path of each file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(row)
            file.flush()  # a long training that is stopped has left what it had
    for written in (path, *draw_chart(path)):
        print(written)


def loss_panels(figure: Figure) -> tuple[Axes, Axes]:
    """A panel of losses, and below it a smaller one of how far they are from one of them."""
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(2.2, 1))
    for axes in (upper, lower):
        axes.grid(axis="y", color=LIGHT.grid, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return upper, lower


def name_ends(figure: Figure, panels: Mapping[Axes, Sequence[Line]], styles: Mapping[Any, Style]) -> None:
    """Lay the figure out and write the names of each panel's lines at their ends, in the colours of `styles`."""
    named = [naming(axes, lines, [line.label for line in lines], Look(LIGHT, styles)) for axes, lines in panels.items()]
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    for write in named:
        write()


def line_of(key: Any, name: str, curve: pd.Series) -> Line:
    """A curve by its index, for `name_ends`; `key` chooses its style."""
    x, y = curve.index.to_numpy(float), curve.to_numpy(float)
    rows = np.arange(len(x))
    return Line(key, name, False, rows, rows, x, y, y, y)


def save_chart(figure: Figure, csv_path: Path) -> list[Path]:
    """Save it as SVG beside the results file, with its stamp; the path, in a list."""
    path = csv_path.with_suffix(".svg")
    figure.savefig(path, facecolor=LIGHT.paper, metadata={"Date": None, "Source": stamp([csv_path])})
    return [path]
