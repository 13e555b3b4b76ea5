"""Lines against sequence length, a panel a problem: values of each implementation, and where it has none."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from mtabench.charts.data import beside
from mtabench.charts.text import problem, shortened
from mtabench.errors import UsageError
from mtabench.problem.axes import short
from mtabench.problem.operations import NONE, OPERATION_COLUMNS, by_value

STATUS_WORDS = {"oom": "out of memory"}
MOST_PANELS = 60
MOST_FAILURES = 6  # lines or groups of them that are named; a number says how many more there are


class Band(NamedTuple):
    """Values, the ends of their intervals, and which of them rest on a time that did not settle, None if none can."""

    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    unsettled: np.ndarray | None = None


Values = Callable[[pd.DataFrame, pd.DataFrame], Band]  # from the cells of one line, and of its panel


@dataclass(frozen=True)
class Line:
    """One implementation in one panel: `y` from `low` to `high` at places `x`, NaN where failed or unknown.

    `seqs` are the sequence lengths at these places, and `rows` where the cells stand in their file. `unsettled` says
    which values rest on a time that did not settle; None where they are no times. Against splits: one sequence length,
    with the splits and the time of `auto` if they are known.
    """

    impl: str
    label: str
    yardstick: bool
    rows: np.ndarray
    seqs: np.ndarray
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    unsettled: np.ndarray | None = None
    auto: tuple[float, float] | None = None

    @property
    def hollow(self) -> np.ndarray:
        """Which points to draw hollow."""
        known = np.isfinite(self.y)
        return np.zeros_like(known) if self.unsettled is None else known & self.unsettled


@dataclass(frozen=True)
class Failure:
    """Neighbouring places on the x axis at which one line has no valid time, all for the same reason."""

    impl: str
    label: str
    word: str
    xs: tuple[int, ...]


@dataclass(frozen=True)
class Panel:
    """One head dim and operation."""

    title: str
    lines: tuple[Line, ...]
    failures: tuple[Failure, ...]

    @property
    def places(self) -> set[float]:
        """Where on the x axis it has a value or a failure."""
        values = {float(x) for line in self.lines for x in line.x}
        return values | {float(x) for failure in self.failures for x in failure.xs}


def broken(line: Line, own: Sequence[float] | np.ndarray, places: Iterable[float]) -> Line:
    """The line as it is drawn: it ends, by NaN, between two of its `own` places where another of `places` lies."""
    skipped = [i for i, (a, b) in enumerate(pairwise(own), 1) if any(a < place < b for place in places)]
    x, y, low, high = (np.insert(values, skipped, np.nan) for values in (line.x, line.y, line.low, line.high))
    return replace(line, x=x, y=y, low=low, high=high)


def problems(cells: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """For each head dim and operation its title and its cells, plain attention of that head dim among them.

    Raises UsageError for more of them than a chart can hold.
    """
    convolved = cells[cells["op"] != "attention"]
    own = convolved if len(convolved) else cells
    columns = [*OPERATION_COLUMNS]
    keys = sorted(set(own[["head_dim", *columns]].fillna(0).itertuples(index=False, name=None)), key=by_value)
    check_panels(len(keys))
    operations = cells[columns].fillna(0)
    contiguous = NONE if any(key[-1] for key in keys) else ""  # the page size comes last
    for head_dim, *operation in keys:
        same = (operations == operation).all(axis="columns")
        mine = cells[(cells["head_dim"] == head_dim) & (same | (cells["op"] == "attention"))]
        yield problem(head_dim, *operation[:-1], operation[-1] or contiguous), mine


def check_panels(count: int) -> None:
    """Raise UsageError for more panels than a chart can hold."""
    if count > MOST_PANELS:
        raise UsageError(
            f"these results hold {count} problems (head dim and operation), each a panel, and a chart holds at most "
            f"{MOST_PANELS}; give files with fewer"
        )


def panels(cells: pd.DataFrame, values: Values, across: str = "seq") -> list[Panel]:
    """One panel a problem, with a line an implementation (`cells` as `one_line_each` gives them).

    `across` is the column of the x axis.
    """
    beside_conv = bool((cells["op"] != "attention").any())
    shown = []
    for title, mine in problems(cells):
        lines: list[Line] = []
        failures: list[Failure] = []
        for (impl, label), group in mine.groupby(["impl", "label"], sort=False):
            group = group.sort_values("seq")
            failures += failures_of(str(impl), str(label), group, group["seq"])
            if (group["status"] == "ok").any():
                yardstick = beside_conv and bool((group["op"] == "attention").all())
                places = group["row"].to_numpy(), group["seq"].to_numpy(), group[across].to_numpy(float)
                lines.append(Line(str(impl), str(label), yardstick, *places, **values(group, mine)._asdict()))
        shown.append(Panel(title, tuple(lines), tuple(failures)))
    return shown


def has_values(shown: list[Panel]) -> bool:
    """Whether any line has a value."""
    return any(np.isfinite(line.y).any() for panel in shown for line in panel.lines)


def times(cells: pd.DataFrame) -> Band:
    """Medians in ms with their 95 % intervals, NaN where a cell failed."""
    timed = cells[["median_ms", "ci95_low_ms", "ci95_high_ms"]].where(cells["status"] == "ok")
    median = timed["median_ms"]
    low, high = (timed[name].fillna(median).to_numpy(float) for name in ("ci95_low_ms", "ci95_high_ms"))
    return Band(median.to_numpy(float), low, high, cells["unsettled"].to_numpy(bool))


def over(
    cells: pd.DataFrame, base: pd.DataFrame, ratio: Callable[[pd.Series, pd.Series], pd.Series], on: Sequence[str]
) -> Band:
    """Ratios to the times of `base` with the same values in `on`, with 95 % intervals of the ratios.

    `ratio` takes the medians of the cells and of the base. The two times are independent: half the interval of the
    ratio's logarithm is the root of the sum of their halves' squares.
    """
    theirs = beside(cells, base, on)
    y = ratio(cells["median_ms"], theirs["ms"]).where(cells["status"] == "ok").to_numpy(float)
    reach = np.exp(theirs["half"].to_numpy(float))
    return Band(y, y / reach, y * reach, theirs["unsettled"].to_numpy(bool))


def column(name: str, *, of_time: bool = False) -> Values:
    """The values of a column as they are, without bands; those `of_time` are marked where the time did not settle."""

    def values(group: pd.DataFrame, _: pd.DataFrame) -> Band:
        y = group[name].where(group["status"] == "ok").to_numpy(float)
        return Band(y, y, y, group["unsettled"].to_numpy(bool) if of_time else None)

    return values


def failures_of(impl: str, label: str, cells: pd.DataFrame, xs: pd.Series) -> Iterator[Failure]:
    """Runs of neighbouring cells with one and the same status other than ok."""
    rows = zip(cells["status"], xs, strict=True)
    for status, run in groupby(rows, key=lambda row: row[0]):
        if status != "ok":
            yield Failure(impl, label, word_of(status), tuple(int(x) for _, x in run))


def word_of(status: str) -> str:
    """A status other than ok, in words."""
    return STATUS_WORDS.get(status, shortened(status) or "no status")


def failure_note(shown: Sequence[Panel], place: Callable[[str], str] = lambda xs: xs) -> list[str]:
    """Which lines lack a valid time, where on the x axis and why; nothing if all have one.

    Lines with the same gaps for the same reason are named together. The panel is named where the others differ.
    `place` says what the values on the x axis are.
    """
    of_line: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for panel in shown:
        together: dict[tuple[str, str], list[int]] = {}
        for failure in panel.failures:
            together.setdefault((failure.label, failure.word), []).extend(failure.xs)
        for (label, word), xs in together.items():
            of_line.setdefault((label, word, tuple(sorted(set(xs)))), []).append(panel.title)
    found: dict[tuple[str, tuple[int, ...], tuple[str, ...]], list[str]] = {}
    for (label, word, places), titles in of_line.items():
        found.setdefault((word, places, tuple(titles)), []).append(shortened(label))
    whole = {int(x) for panel in shown for line in panel.lines for x in line.x}
    texts = []
    for (word, places, in_panels), labels in found.items():
        everywhere = len(whole) > 1 and whole <= set(places)
        where = "everywhere" if everywhere else f"at {place(shortened(', '.join(short(x) for x in places)))}"
        of = "" if len(in_panels) == len(shown) else f", {shortened(' and '.join(in_panels), 80)}"
        texts.append(f"{_listed(labels, ', ')} {where}{of} ({word})")
    return [f"no valid time: {_listed(texts, '; ')}"] if texts else []


def _listed(texts: Sequence[str], between: str) -> str:
    more = [f"and {len(texts) - MOST_FAILURES} more"] if len(texts) > MOST_FAILURES else []
    return between.join([*texts[:MOST_FAILURES], *more])
