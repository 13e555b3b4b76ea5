"""Names lines at their ends, so that a chart needs no legend."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mtabench.charts.panels import Line
from mtabench.charts.style import Look
from mtabench.charts.text import fitted, inches, shortened

SIZE = 8.0  # points
ROW_INCHES = 0.15  # that a name takes
MOST_INCHES = 1.5  # of a name, which loses its middle beyond
GAP = 0.1  # inches between a line and its name
NEAR = 0.1  # of the axes' width: a line that ends further from the right edge is led to its name by dots


def names_width(names: Iterable[str]) -> float:
    """The room in inches that the names take beside a panel."""
    return max((inches(_fitted(name), SIZE) + GAP for name in names), default=0.0)


def naming(axes: Axes, lines: Sequence[Line], labels: Iterable[str], look: Look) -> Callable[[], None]:
    """Keep room right of the axes for the names that all panels have, and return what writes those of `lines`.

    It is called once the axes have their place. The names stand in the order of the lines' ends, none on another.
    """
    widest = max(map(_fitted, labels), key=lambda name: inches(name, SIZE), default="")
    outside: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": SIZE}
    room = axes.annotate(widest, (1, 0.5), (GAP * 72, 0), color=axes.get_facecolor(), **outside)

    def finish() -> None:
        room.remove()
        ends = [(line, *end) for line in lines if (end := _end(axes, line)) is not None]
        ends.sort(key=lambda end: -end[2])
        box, figure = axes.get_window_extent(), axes.get_figure(root=True)
        assert figure is not None
        width, height = box.width / figure.dpi, box.height / figure.dpi
        heights = spread_out([y * height for _, _, y in ends], ROW_INCHES, 0, height)
        for (line, x, y), at in zip(ends, heights, strict=True):
            away = 1 - x > NEAR or abs(at - y * height) > 0.3 * ROW_INCHES
            _write(axes, line, look, (1 + GAP / width, at / height), (x, y) if away else None)

    return finish


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near to `wanted`, which falls, as they can be `gap` apart, between `low` and `high` if they all fit.

    Neighbours that would touch form a block around their mean.
    """
    blocks: list[list[float]] = []  # the sum of what each block's first place is wanted to be, and its members
    for place in wanted:
        blocks.append([place, 1])
        while len(blocks) > 1 and _top(blocks[-2]) - blocks[-2][1] * gap < _top(blocks[-1]):
            total, count = blocks.pop()
            blocks[-1][0] += total + blocks[-1][1] * gap * count
            blocks[-1][1] += count
    places = [_top(block) - i * gap for block in blocks for i in range(int(block[1]))]
    for i, place in enumerate(places):  # from the top, then from the bottom
        places[i] = min(place, high - i * gap)
    for i, place in enumerate(reversed(places)):
        places[-1 - i] = max(place, low + i * gap)
    return places


def _top(block: Sequence[float]) -> float:
    return block[0] / block[1]


def _fitted(name: str) -> str:
    return fitted(shortened(name), MOST_INCHES, SIZE)


def _end(axes: Axes, line: Line) -> tuple[float, float] | None:
    """A line's last point as shares of the axes, None without any."""
    known = np.flatnonzero(np.isfinite(line.x) & np.isfinite(line.y))
    if not len(known):
        return None
    x, y = (axes.transData - axes.transAxes).transform((line.x[known[-1]], line.y[known[-1]]))
    return float(x), float(y)


def _write(
    axes: Axes, line: Line, look: Look, at: tuple[float, float], end: tuple[float, float] | None
) -> None:  # fmt: skip
    """The name, with a thin line from the line's `end` where that is somewhere else; places are shares of the axes."""
    gid = look.gid(line.rows)
    places: dict[str, Any] = {"transform": axes.transAxes, "va": "center_baseline"}
    axes.text(*at, _fitted(line.label), fontsize=SIZE, color=look.text(line.impl), gid=gid, **places)
    if end is None:
        return
    style: dict[str, Any] = {"color": look.colour(line.impl), "linewidth": 0.6, "alpha": 0.7}
    style |= {"arrowstyle": "-", "shrinkA": 1.5, "shrinkB": 3}
    style["linestyle"] = (0, (1, 3)) if end[0] < 1 - NEAR else "-"  # no part of a line that ends inside
    leader = axes.annotate("", end, at, xycoords="axes fraction", annotation_clip=False, arrowprops=style)
    if leader.arrow_patch:
        leader.arrow_patch.set_gid(gid)
