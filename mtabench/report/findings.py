"""What a results file says: the titles of its charts as sentences, and the numbers looked for first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pandas as pd

from mtabench.charts import KINDS, charts_of
from mtabench.charts.chart import PASS_TITLES
from mtabench.charts.data import baseline_name, one_line_each, settings
from mtabench.charts.findings import longest, mean, mean_half, paired, place, plain, subject, yardstick
from mtabench.charts.kinds.speedup import rated
from mtabench.charts.text import TIMES, factor, milliseconds, shortened
from mtabench.prose import plural

MOST_FIGURES = 3
MOST_SENTENCES = 20


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit, what it is, and its 95 % interval, such as `± 2 %`; empty for counts."""

    value: str
    words: str
    interval: str = ""


def summary(cells: pd.DataFrame) -> list[str]:
    """What the charts of these cells state. Raises UsageError where a chart would be too large."""
    found = []
    for name, kind in KINDS.items():
        for stem, chart in charts_of(cells, name, kind):
            setting = stem.partition(name)[2].removeprefix("-")
            if any(map(str.isdigit, chart.title)):  # one without a number claims nothing
                found.append(chart.title + (f" ({setting})" if setting else ""))
    told = [text.replace("\N{NO-BREAK SPACE}", " ") for text in dict.fromkeys(found)]
    more = len(told) - MOST_SENTENCES
    return told if more <= 0 else [*told[:MOST_SENTENCES], f"and {plural(more, 'more finding')}, in the charts of plot"]


def figures(all_cells: pd.DataFrame) -> list[Figure]:
    """At most three: what the fastest costs over plain attention, its speedup, or else a time; and what is valid.

    Those of times are of the pass and setting with the most cells, and of nobody who is wrong in one of them.
    """
    timed = all_cells[all_cells["status"] == "ok"]
    cells = max(_parts(all_cells), key=len)
    head = f"{PASS_TITLES[cells['pass'].iloc[0]]}: " if all_cells["pass"].nunique() > 1 else ""
    wrong = set(cells.loc[cells["status"] == "wrong", "impl"])
    found = [replace(one, words=head + one.words) for one in _of_times(cells[~cells["impl"].isin(wrong)])]
    marked = f"; {timed['unsettled'].sum():,} did not settle" if timed["unsettled"].any() else ""
    valid = Figure(f"{len(timed):,} of {len(all_cells):,}", f"cells with a valid time{marked}")
    return [*found[: MOST_FIGURES - 1], valid]


def _parts(cells: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The cells of each pass and setting, of each implementation those of one line."""
    for pass_ in PASS_TITLES:
        for _, setting in settings(cells[cells["pass"] == pass_]):
            yield one_line_each(setting)


def _of_times(cells: pd.DataFrame) -> Iterator[Figure]:
    own, other = subject(cells), yardstick(cells)
    over = paired(cells, own, other)
    if len(over):
        yield _ratio(over, plain(other, cells), own)
    own = own or other
    base, shapes = baseline_name(cells), rated(cells)
    shapes = shapes[shapes["impl"] == own]
    if len(shapes) and base != other:  # the baseline of a model is plain attention itself
        yield _ratio(shapes, base, own)
    timed = longest(cells[(cells["impl"] == own) & (cells["status"] == "ok")])
    if len(timed):
        shape = timed.loc[[timed["median_ms"].idxmin()]]
        ms, half = shape[["median_ms", "half"]].iloc[0]
        yield Figure(milliseconds(ms, half), f"{shortened(own)} at {place(shape, cells)}", _interval(half))


def _ratio(shapes: pd.DataFrame, other: str, own: str) -> Figure:
    """The geometric mean of ratios of times, as a number of at least 1."""
    ratio, half = mean(shapes), mean_half(shapes)
    words = f"as fast as {other}" if ratio > 1 else f"as long as {other}"
    of = f"geometric mean of {len(shapes):,} shapes" if len(shapes) > 1 else "one shape"
    value = factor(max(ratio, 1 / ratio), half)
    return Figure(f"{value}{TIMES}", f"{words}: {shortened(own)}, {of}", _interval(half))


def _interval(half: float) -> str:
    return f"± {100 * half:.2g} %" if half else ""
