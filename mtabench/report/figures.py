"""The three numbers that a reader looks for first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import hypot

from mtabench.charts.text import TIMES, factor, milliseconds
from mtabench.measuring.settled import unsettled
from mtabench.problem.operations import STEPS
from mtabench.prose import plural
from mtabench.report.data import Report, Row, is_plain, is_timed, shape_key
from mtabench.report.sentences import PASSES, Quote, best, half, mean_of, speedups

MOST = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit, what it is, and its 95 % interval, such as `± 2 %`; empty for counts."""

    value: str
    words: str
    interval: str = ""


def figures(report: Report, quote: Quote = str) -> list[Figure]:
    """At most three: what the fastest costs over plain attention, its speedup, or else a time; and what is valid.

    Those of times are of the pass and device with the most cells, and of nobody who is wrong in one of them. `quote`
    makes a text from the file safe.
    """
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in report.rows:
        groups[row["pass"], row["device"]].append(row)
    (pass_, _), rows = max(groups.items(), key=lambda group: len(group[1]))
    head = f"{PASSES[pass_]}: " if len({name for name, _ in groups}) > 1 else ""
    wrong = {row["impl"] for row in rows if row["status"] == "wrong"}
    timed = [row for row in rows if row["charted"] and is_timed(row) and row["impl"] not in wrong]
    found = [replace(one, words=head + one.words) for one in _of_times(timed, quote)]
    valid, marked = sum(is_timed(row) for row in report.rows), len(unsettled(report.rows))
    words = f"{plural(len(report.rows), 'cell').partition(' ')[2]} with a valid time"
    if marked:
        words += f"; {marked:,} did not settle"
    return [*found[: MOST - 1], Figure(f"{valid:,} of {len(report.rows):,}", words)]


def _of_times(timed: Sequence[Row], quote: Quote) -> Iterator[Figure]:
    conv = [row for row in timed if not is_plain(row)]
    own = conv or timed
    if not own:
        return
    fastest = list(best(own, STEPS).values())
    name, wins = Counter(row["impl"] for row in fastest).most_common(1)[0]
    mine = [row for row in own if row["impl"] == name]
    plain = best([row for row in timed if is_plain(row)], ())
    over = [
        (row["median_ms"] / plain[shape_key(row)]["median_ms"], hypot(half(row), half(plain[shape_key(row)])))
        for row in mine
        if shape_key(row) in plain
    ]
    if conv and over:
        yield _ratio(over, "as long as plain attention", "as fast as plain attention", quote(name))
    known = {"", name, *(row["impl"] for row in timed if is_plain(row))}  # a model's baseline is plain attention itself
    rated = [row for row in mine if row["baseline"] not in known and (row["speedup"] or 0) > 0]
    if rated:
        base = quote(rated[0]["baseline"])
        yield _ratio(speedups(rated, timed), f"as long as {base}", f"as fast as {base}", quote(name))
    longest = min(fastest, key=lambda row: (-row["seq"], row["median_ms"]))
    value = milliseconds(longest["median_ms"], half(longest))
    yield Figure(value, quote(longest["label"]), _interval(half(longest)))
    if len({row["impl"] for row in own}) > 1:
        yield Figure(f"{wins:,} of {len(fastest):,}", f"shapes at which {quote(name)} is the fastest")


def _ratio(over: Sequence[tuple[float, float]], slower: str, faster: str, name: str) -> Figure:
    """The geometric mean of times over others, each with half its interval, as a number of at least 1."""
    mean, reach = mean_of(over)
    value = factor(max(mean, 1 / mean), reach)
    of = f"geometric mean of {len(over):,} shapes" if len(over) > 1 else "one shape"
    return Figure(f"{value}{TIMES}", f"{slower if mean >= 1 else faster}: {name}, {of}", _interval(reach))


def _interval(half: float) -> str:
    return f"± {100 * half:.2g} %" if half else ""
