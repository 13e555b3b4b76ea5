"""What the titles state, computed from the cells: whom to speak of, paired shapes, ratios in words.

Ratios are of the same shape, and of several shapes the geometric mean. Where data is missing nothing is claimed.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mtabench.charts.data import baseline_name
from mtabench.charts.text import TIMES, factor, shortened, span, steps, tokens
from mtabench.problem.operations import OPERATION_COLUMNS, PLAIN

SHAPE = ["seq", "batch", "head_dim", "dtype"]
OPERATION = list(OPERATION_COLUMNS)


def subject(cells: pd.DataFrame) -> str:
    """The implementation of conv attention, other than the baseline, that is the fastest in most shapes."""
    own = cells[(cells["op"] != "attention") & (cells["impl"] != baseline_name(cells))]
    return _fastest(own)


def yardstick(cells: pd.DataFrame) -> str:
    """The implementation of plain attention that is the fastest in most shapes; empty if there is none."""
    return _fastest(cells[cells["op"] == "attention"])


def _fastest(cells: pd.DataFrame) -> str:
    timed = cells[cells["status"] == "ok"]
    if timed.empty:
        return ""
    best = timed.loc[timed.groupby([*SHAPE, *OPERATION], dropna=False)["median_ms"].idxmin(), "impl"]
    return str(best.value_counts(sort=False).sort_index().idxmax())


def called(cells: pd.DataFrame, impl: str) -> str:
    """The implementation's name in a title: its splits are part of it if auto did not choose them."""
    labels = set(cells.loc[cells["impl"] == impl, "label"])
    return shortened(labels.pop() if len(labels) == 1 else impl)


def plain(impl: str, cells: pd.DataFrame) -> str:
    """A yardstick's name in a title, which says that it computes something else; of models there is one."""
    if cells["layers"].iloc[0]:
        return "the plain model"
    return f"plain attention by {shortened(impl)}"


def paired(cells: pd.DataFrame, own: str, other: str, column: str = "median_ms") -> pd.DataFrame:
    """The shapes at which both have a value, with `ratio`: the other's over one's own, and of times its `half`."""
    valid = cells[(cells["status"] == "ok") & cells[column].notna()]
    mine, theirs = valid[valid["impl"] == own], valid[valid["impl"] == other]
    on = SHAPE if (theirs["op"] == "attention").any() else [*SHAPE, *OPERATION]
    both = mine.merge(theirs[[*on, column, "half"]].drop_duplicates(on), on=on, suffixes=("", "_other"))
    half = np.hypot(both["half"], both["half_other"]) if column == "median_ms" else 0.0
    return both.assign(ratio=both[f"{column}_other"] / both[column], half=half)


def longest(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs of the longest sequence."""
    return pairs[pairs["seq"] == pairs["seq"].max()]


def mean(pairs: pd.DataFrame) -> float:
    """The geometric mean of the ratios."""
    return float(np.exp(np.log(pairs["ratio"]).mean()))


def mean_half(pairs: pd.DataFrame) -> float:
    """Half the interval of that mean as a part of it."""
    return float(np.sqrt((pairs["half"] ** 2).sum()) / len(pairs))


def where(shapes: pd.DataFrame, cells: pd.DataFrame, aside: str = "geometric mean") -> str:
    """The shapes of one sequence length in words: which one, or of how many the ratio is a mean."""
    words = f"at {tokens(cells, shapes['seq'].iloc[0])}"
    if len(shapes) > 1:
        return f"{words} ({aside} of {len(shapes)} shapes)" if aside else words
    return words + _problem(shapes, cells)


def place(shape: pd.DataFrame, cells: pd.DataFrame) -> str:
    """One shape in words: its sequence length, and its problem where the cells hold several."""
    return tokens(cells, shape["seq"].iloc[0]) + _problem(shape, cells)


def _problem(shape: pd.DataFrame, cells: pd.DataFrame) -> str:
    """The shape's head dim and steps, as far as they differ among the cells; begins with a comma."""
    own = cells[(cells["op"] == PLAIN) == (shape["op"].iloc[0] == PLAIN)]
    head_dim, *operation = (shape[name].iloc[0] for name in ("head_dim", *OPERATION))
    words = f", head dim {head_dim:g}" if own["head_dim"].nunique() > 1 else ""
    return words + (f", {steps(*operation)}" if len(own[OPERATION].drop_duplicates()) > 1 else "")


def about_one(ratio: float, half: float = 0.0) -> bool:
    """Whether a ratio reads as 1, or its interval holds 1."""
    return abs(ratio - 1) < 0.005 or abs(np.log(ratio)) <= half


def speed(ratio: float, other: str, half: float = 0.0) -> str:
    """`is 3.2 times as fast as other`, or how much longer it takes, with the digits that the interval leaves.

    `ratio` is the other's time over one's own, and `half` is half its interval as a part of it.
    """
    if about_one(ratio, half):
        return f"is as fast as {other}"
    if ratio > 1:
        return f"is {factor(ratio, half)}{TIMES} as fast as {other}"
    return f"takes {factor(1 / ratio, half)}{TIMES} as long as {other}"


def speed_range(pairs: pd.DataFrame, other: str) -> str:
    """From the least to the greatest ratio of all shapes, and their geometric mean."""
    if len(pairs) == 1:
        return speed(mean(pairs), other, mean_half(pairs))
    ends = pairs.loc[[pairs["ratio"].idxmin(), pairs["ratio"].idxmax()], ["ratio", "half"]].to_numpy()
    if len({speed(ratio, other, half) for ratio, half in ends}) == 1:
        return f"{speed(mean(pairs), other, mean_half(pairs))} in all of {len(pairs)} shapes"
    slower = mean(pairs) < 1 and not about_one(mean(pairs), mean_half(pairs))
    ratios = 1 / pairs["ratio"] if slower else pairs["ratio"]
    range_ = span(ratios, pairs["half"], lambda ratio, half: f"{factor(ratio, half)}{TIMES}")
    average = factor(1 / mean(pairs) if slower else mean(pairs), mean_half(pairs))
    words = f"takes {range_} as long as" if slower else f"is {range_} as fast as"
    return f"{words} {other}, {average}{TIMES} in the geometric mean of {len(pairs)} shapes"


def time_finding(cells: pd.DataFrame) -> str:
    """The subject beside the baseline and the yardstick at the longest sequence that they share."""
    own, base, other = subject(cells), baseline_name(cells), yardstick(cells)
    if not own:
        return ""
    clauses = []
    shapes = longest(paired(cells, own, base if base != other else ""))  # of models, the plain one is both
    if len(shapes):
        clauses.append(speed(mean(shapes), shortened(base), mean_half(shapes)))
    to_plain = paired(cells, own, other)
    to_plain = to_plain[to_plain["seq"] == shapes["seq"].iloc[0]] if len(shapes) else longest(to_plain)
    if len(to_plain) and (shapes.empty or _keys(to_plain) == _keys(shapes)):
        clauses.append(speed(mean(to_plain), plain(other, cells), mean_half(to_plain)))
        shapes = to_plain
    if not clauses:
        return ""
    aside = "geometric mean" if len(clauses) == 1 else "geometric means"
    return f"{called(cells, own)} {' and '.join(clauses)} {where(shapes, cells, aside)}"


def _keys(shapes: pd.DataFrame) -> set[tuple]:
    return set(shapes[[*SHAPE, *OPERATION]].fillna(0).itertuples(index=False, name=None))


@dataclass(frozen=True)
class Reach:
    """The subject's name, its cells at its longest sequence with a value, and the yardstick's cells there."""

    name: str
    shapes: pd.DataFrame
    yardstick: str
    yardstick_shapes: pd.DataFrame


def reach(cells: pd.DataFrame, column: str) -> Reach | None:
    """The implementation with a value in this column at the longest sequence; without a subject, the yardstick.

    None where none has one.
    """
    valid = cells[(cells["status"] == "ok") & cells[column].notna()]
    own, other = subject(valid), yardstick(valid)
    own, other = (own, other) if own else (other, "")
    mine = longest(valid[valid["impl"] == own])
    if mine.empty:
        return None
    return Reach(
        called(cells, own), mine, other, valid[(valid["impl"] == other) & (valid["seq"] == mine["seq"].iloc[0])]
    )
