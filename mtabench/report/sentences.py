"""What a results file says, computed from it: in a few sentences, and the three numbers looked for first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import Any

from mtabench.charts.text import TIMES, factor, milliseconds
from mtabench.measuring.settled import UNSETTLED, half_interval_of, meaning, unsettled
from mtabench.measuring.statistics import geometric_mean
from mtabench.problem.operations import NO_PAGES, NONE, STEPS
from mtabench.prose import plural
from mtabench.report.data import Report, Row, is_plain, is_timed, shape_key

PASSES = {
    "fwd": "forward pass", "bwd": "backward pass", "decode": "decode step",
    "train": "training step of models", "prefill": "prefill of models", "generate": "decode step of models",
}  # fmt: skip
STATUSES = {"oom": "out of memory", "error": "ended in an error", "timeout": "took too long", "wrong": "wrong"}
MOST_GROUPS = 6  # of pass and device
MOST_FIGURES = 3
Quote = Callable[[str], str]


def summary(report: Report, quote: Quote = str) -> list[str]:
    """The sentences. `quote` makes a text from the file safe where they are shown; the rest is ours."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in report.rows:
        groups[row["pass"], row["device"]].append(row)
    found = []
    for (pass_, device), rows in list(groups.items())[:MOST_GROUPS]:
        where = f" on {quote(device)}" if device else ""
        name = f"the {PASSES[pass_]}{where}"
        head = f"In {name}: " if len(groups) > 1 else ""
        found += [f"T{name[1:]}: {_measured(rows)}"]
        found += [head + sentence for sentence in _compared(rows, quote)]
    if len(groups) > MOST_GROUPS:
        found.append(f"{plural(len(groups) - MOST_GROUPS, 'more pair')} of pass and device are in the tables alone.")
    return [*found, *_trust(report.rows)]


def _measured(rows: Sequence[Row]) -> str:
    names = {row["impl"] for row in rows}
    timed = sum(is_timed(row) for row in rows)
    lengths = sorted({row["seq"] for row in rows})
    span = " to ".join(f"{length:,}" for length in dict.fromkeys([*lengths[:1], *lengths[-1:]]))
    parts = [
        f"{plural(len(names), 'implementation')}",
        f"sequences of {span} tokens",
        _values(rows, "head_dim", "head dim "),
        _values(rows, "mix", "mix "),
        _values(rows, "conv", "convolution "),
        _values(rows, "post_conv", "convolution after the softmax "),
        _values(rows, "norm", "norm "),
        _values(rows, "gate", "gate "),
        _values(rows, "page_size", "page size "),
        _values(rows, "dtype", ""),
    ]
    have = "all with a time" if timed == len(rows) else f"{timed:,} with a time" if timed else "none with a time"
    return f"{plural(len(rows), 'cell')}, {have}; {', '.join(filter(None, parts))}."


def _values(rows: Iterable[Row], column: str, words: str) -> str:
    values = dict.fromkeys(str(row[column]) for row in rows if row[column] != "")
    return words + _listed(values) if set(values) - {NONE} else ""


def computed(rows: Iterable[Row]) -> str:
    """What rows compute beside plain attention, in words."""
    return "multi-token attention" if any(row["op"] == "mta" for row in rows) else "conv attention"


def _compared(rows: Sequence[Row], quote: Quote) -> Iterator[str]:
    """Who is fastest, speedups over the baseline, and how plain attention compares."""
    charted = [row for row in rows if row["charted"] and is_timed(row)]
    conv = [row for row in charted if not is_plain(row)]
    fastest = best(conv, STEPS)
    name = computed(conv)
    rivals = {row["impl"] for row in conv}
    if len(rivals) > 1:
        wins = Counter(row["impl"] for row in fastest.values()).most_common()
        told = _listed(f"{quote(impl)} at {count} of {plural(len(fastest), 'shape')}" for impl, count in wins)
        yield f"Fastest {name}: {told}."
    yield from _speedups(conv, rows, quote)
    if any(map(is_plain, charted)) and any(row["page_size"] not in ("", NONE) for row in conv):
        yield f"{NO_PAGES[0].upper()}{NO_PAGES[1:]}."
    if over := _over_plain(fastest.values(), charted):
        yield f"The fastest {name} {_compared_with(over, 'the fastest plain attention there')}."


def _over_plain(rows: Iterable[Row], timed: Iterable[Row]) -> list[tuple[float, float]]:
    """Times of rows over the fastest plain attention of their shape, each with half its interval as a part of it."""
    plain = best([row for row in timed if is_plain(row)], ())
    pairs = [(row, plain[shape_key(row)]) for row in rows if shape_key(row) in plain]
    return [(row["median_ms"] / other["median_ms"], hypot(half(row), half(other))) for row, other in pairs]


def _speedups(rows: Sequence[Row], all_rows: Sequence[Row], quote: Quote) -> Iterator[str]:
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["baseline"] and row["baseline"] != row["impl"] and (row["speedup"] or 0) > 0:
            found[row["impl"], row["baseline"]].append(row)
    ratios = {names: speedups(mine, all_rows) for names, mine in found.items()}
    for (name, baseline), over in sorted(ratios.items(), key=lambda item: mean_of(item[1])[0]):
        yield f"{quote(name)} {_compared_with(over, quote(baseline))}."


def half(row: Row) -> float:
    """Half the 95 % interval of a row's median as a part of it; 0 if unknown."""
    return half_interval_of(row) or 0.0


def speedups(rows: Iterable[Row], others: Iterable[Row]) -> list[tuple[float, float]]:
    """Of rows with a speedup their times over the baseline's, each with half its interval as a part of it."""
    keys = ("impl", *STEPS)
    by_name = {(shape_key(row), *(row[name] for name in keys)): half(row) for row in others}
    plain = {(shape_key(row), row["impl"]): half(row) for row in others if is_plain(row)}

    def its_half(row: Row) -> float:
        own = by_name.get((shape_key(row), row["baseline"], *(row[name] for name in STEPS)))
        return plain.get((shape_key(row), row["baseline"]), 0.0) if own is None else own

    return [(1 / row["speedup"], hypot(half(row), its_half(row))) for row in rows]


def mean_of(ratios: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The geometric mean of ratios, each with half its interval, and half the mean's."""
    return geometric_mean([ratio for ratio, _ in ratios]), hypot(*(one for _, one in ratios)) / len(ratios)


def _compared_with(over: Sequence[tuple[float, float]], other: str) -> str:
    """`is 3 times as fast as other`, or how much longer it takes, and what that is the geometric mean of.

    `over` are times over the other's, each with half its interval.
    """
    mean, reach = mean_of(over)
    words = "takes {} times as long as" if mean > 1 else "is {} times as fast as"
    ratios = over if mean > 1 else [(1 / ratio, one) for ratio, one in over]
    low, high, count = factor(*min(ratios)), factor(*max(ratios)), len(ratios)
    of = f" (geometric mean of {count:,} shapes, {low} to {high})" if count > 1 else " (one shape)"
    return f"{words.format(factor(max(mean, 1 / mean), reach))} {other}{of}"


def _trust(rows: Sequence[Row]) -> Iterator[str]:
    """What failed, did not settle or was throttled, and whether the code was what its revision says."""
    statuses = Counter(row["status"] for row in rows if row["status"] != "ok")
    if statuses:
        told = _listed(f"{count} {STATUSES.get(status, status)}" for status, count in statuses.most_common())
        total = sum(statuses.values())
        yield f"{plural(total, 'cell')} {'has' if total == 1 else 'have'} no valid time: {told}."
    marked = unsettled(rows)
    if marked:
        valid = sum(is_timed(row) for row in rows)
        yield f"{len(marked):,} of {plural(valid, 'timed cell')} (marked {UNSETTLED}) {meaning(marked)}."
    timed = [row for row in rows if row["median_ms"] is not None]
    throttled = sum(row["throttled"] == "true" for row in timed)
    unknown = sum(row["throttled"] not in ("true", "false") for row in timed)
    if throttled:
        yield f"The GPU was throttled while {plural(throttled, 'cell')} of {len(timed)} ran."
    if timed and unknown:
        yield f"Whether the device was throttled is not known of {plural(unknown, 'cell')}."
    if timed and not throttled and not unknown:
        yield "The device was throttled in none of the timed cells."
    if not all(row["charted"] for row in rows):
        yield "Of several splits, charts and averages take auto, or the fastest where auto was not measured."
    if any(row["git_dirty"] == "true" for row in rows):
        yield "The code had changes that its git revision does not hold."


def best(rows: Iterable[Row], more: Sequence[str]) -> Mapping[tuple[Any, ...], Row]:
    """The fastest row of each shape."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (*shape_key(row), *(row[name] for name in more))
        if key not in best or row["median_ms"] < best[key]["median_ms"]:
            best[key] = row
    return best


def _listed(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


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
    return [*found[: MOST_FIGURES - 1], Figure(f"{valid:,} of {len(report.rows):,}", words)]


def _of_times(timed: Sequence[Row], quote: Quote) -> Iterator[Figure]:
    conv = [row for row in timed if not is_plain(row)]
    own = conv or timed
    if not own:
        return
    fastest = list(best(own, STEPS).values())
    name, wins = Counter(row["impl"] for row in fastest).most_common(1)[0]
    mine = [row for row in own if row["impl"] == name]
    over = _over_plain(mine, timed)
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
