"""Names lines at their ends, so that a chart needs no legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Transform

from mtabench.charts.style import Look
from mtabench.charts.text import fitted, inches, shortened

SIZE = 8.0  # points
ROW_INCHES = 0.15  # that a name takes
MOST_INCHES = 1.5  # of a name, which loses its middle beyond
GAP = 0.1  # inches between a line and its name
NEAR = 0.1  # of the axes' width: a line that ends so near to the right edge has its name beyond it
STEP = 0.03  # inches between the places of a line that a name must not cover


@dataclass(frozen=True)
class Named:
    """A line of a panel as it is drawn: whose colour it has, its name, and its points in data and in inches upwards.

    `gid` is the name of its parts in an SVG file, None for names of matplotlib's own.
    """

    impl: str
    name: str
    gid: str | None
    x: np.ndarray
    y: np.ndarray
    raised: float = 0.0


def names_width(names: Iterable[str]) -> float:
    """The room in inches that the names take beside a panel."""
    return max((inches(_fitted(name), SIZE) + GAP for name in names), default=0.0)


def reserve_room(axes: Axes, names: Iterable[str]) -> Text:
    """Keep room for these names right of the axes while the figure is laid out; `name_lines` takes the text away."""
    widest = max(map(_fitted, names), key=lambda name: inches(name, SIZE), default="")
    return axes.annotate(
        widest, (1, 0.5), (GAP * 72, 0), xycoords="axes fraction", textcoords="offset points", fontsize=SIZE,
        color=axes.get_facecolor(),
    )  # fmt: skip


def name_lines(axes: Axes, lines: Sequence[Named], look: Look) -> None:
    """Write each line's name at its end, once the axes have their place.

    A line that ends inside has its name there if nothing lies in the way. All others stand right of the axes, none on
    another, in the order of the lines' ends.
    """
    ends = [(line, *path[-1]) for line in lines if len(path := _path(axes, axes.transData, line.x, line.y))]
    ends = [(line, x, y + line.raised) for line, x, y in ends]
    drawn = [_path(axes, line.get_transform(), *np.asarray(line.get_xydata()).T) for line in axes.get_lines()]
    dense = np.concatenate([_dense(path) for path in drawn if len(path)] or [np.empty((0, 2))])
    width, height = _size(axes)
    taken: list[tuple[float, float]] = []
    beside = []
    for line, x, y in sorted(ends, key=lambda end: -end[2]):
        if x < (1 - NEAR) * width and _free(dense, taken, x, y, inches(_fitted(line.name), SIZE)):
            taken.append((x, y))
            _write(axes, line, look, (x, y), (x, y))
        else:
            beside.append((line, x, y))
    heights = spread_out([y for _, _, y in beside], ROW_INCHES, 0, height)
    for (line, x, y), at in zip(beside, heights, strict=True):
        _write(axes, line, look, (x, y), (width, at))


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


def _size(axes: Axes) -> tuple[float, float]:
    """The axes' width and height in inches."""
    box, figure = axes.get_window_extent(), axes.get_figure(root=True)
    assert figure is not None
    return box.width / figure.dpi, box.height / figure.dpi


def _path(axes: Axes, transform: Transform, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A line's points in inches from the lower left corner of the axes, those without a value left out."""
    known = np.isfinite(x) & np.isfinite(y)
    points = transform.transform(np.column_stack([x[known], y[known]]))
    box, figure = axes.get_window_extent(), axes.get_figure(root=True)
    assert figure is not None
    return np.asarray((points - (box.x0, box.y0)) / figure.dpi)


def _dense(path: np.ndarray) -> np.ndarray:
    """Points along a path."""
    pieces = [path[-1:]]
    for start, end in pairwise(path):
        shares = np.linspace(0, 1, 2 + int(np.hypot(*(end - start)) / STEP))[:-1]
        pieces.append(start + shares[:, None] * (end - start))
    return np.concatenate(pieces)


def _free(dense: np.ndarray, taken: Sequence[tuple[float, float]], x: float, y: float, width: float) -> bool:
    """Whether no line and no other name lies where a name right of this place would stand."""
    across = (dense[:, 0] > x + GAP / 2) & (dense[:, 0] < x + 2 * GAP + width)
    if (across & (abs(dense[:, 1] - y) < 0.7 * ROW_INCHES)).any():
        return False
    # A name ends before the column of names to the right of the axes begins, or is no wider than it.
    return all(abs(y - other) > ROW_INCHES or x > at + 2 * MOST_INCHES for at, other in taken)


def _write(axes: Axes, line: Named, look: Look, end: tuple[float, float], at: tuple[float, float]) -> None:
    """The name right of `at`, with a thin line from the line's `end` if that is somewhere else; both in inches."""
    width, height = _size(axes)
    at = at[0] + GAP, at[1]
    places: dict[str, Any] = {"transform": axes.transAxes, "va": "center_baseline"}
    share = at[0] / width, at[1] / height
    axes.text(*share, _fitted(line.name), fontsize=SIZE, color=look.text(line.impl), gid=line.gid, **places)
    if at[0] - end[0] > NEAR * width or abs(end[1] - at[1]) > 0.3 * ROW_INCHES:
        style: dict[str, Any] = {
            "color": look.colour(line.impl),
            "linewidth": 0.6,
            "alpha": 0.7,
            "shrinkA": 1.5,
            "shrinkB": 3,
        }
        style["linestyle"] = (0, (1, 3)) if end[0] < (1 - NEAR) * width else "-"  # no part of a line that ends inside
        leader = axes.annotate(
            "", (end[0] / width, end[1] / height), share, xycoords="axes fraction", annotation_clip=False,
            arrowprops={"arrowstyle": "-", **style},
        )  # fmt: skip
        if leader.arrow_patch:
            leader.arrow_patch.set_gid(line.gid)
