"""The three numbers that a reader looks for first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mtabench.console import significant
from mtabench.measuring.settled import unsettled
from mtabench.measuring.statistics import geometric_mean
from mtabench.problem.operations import STEPS
from mtabench.prose import plural
from mtabench.report.data import Report, Row, is_plain, is_timed, shape_key
from mtabench.report.sentences import PASSES, Quote, best

MOST = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit, and what it is."""

    value: str
    words: str


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
    found = [Figure(one.value, head + one.words) for one in _of_times(timed, quote)]
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
    over = [row["median_ms"] / plain[shape_key(row)]["median_ms"] for row in mine if shape_key(row) in plain]
    if conv and over:
        yield _ratio(over, "as long as plain attention", "as fast as plain attention", quote(name))
    told = {"", name, *(row["impl"] for row in timed if is_plain(row))}  # that of a model is plain attention itself
    speedups = [row["speedup"] for row in mine if row["baseline"] not in told and (row["speedup"] or 0) > 0]
    if speedups:
        base = quote(next(row["baseline"] for row in mine if row["baseline"]))
        yield _ratio([1 / one for one in speedups], f"as long as {base}", f"as fast as {base}", quote(name))
    longest = min(fastest, key=lambda row: (-row["seq"], row["median_ms"]))
    yield Figure(f"{significant(longest['median_ms'], 3, zeros=True)} ms", quote(longest["label"]))
    if len({row["impl"] for row in own}) > 1:
        yield Figure(f"{wins:,} of {len(fastest):,}", f"shapes at which {quote(name)} is the fastest")


def _ratio(over: Sequence[float], slower: str, faster: str, name: str) -> Figure:
    """The geometric mean of times over others, as a number of at least 1."""
    mean = geometric_mean(over)
    value = significant(max(mean, 1 / mean), 3, zeros=True)
    of = f"geometric mean of {len(over):,} shapes" if len(over) > 1 else "one shape"
    return Figure(f"{value}\N{MULTIPLICATION SIGN}", f"{slower if mean >= 1 else faster}: {name}, {of}")
