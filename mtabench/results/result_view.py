"""What a table of results shows: the columns in which rows differ, and once, above it, what they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtabench.measuring.settled import UNSETTLED, half_interval_of, meaning, settled
from mtabench.problem.axes import short
from mtabench.results.results_file import STATUSES
from mtabench.results.where import value_of

Row = Mapping[str, str]

DEVICE = ("device", "driver", "cuda", "torch", "triton", "mtabench", "git_sha")
SETTING = ("pass", "dtype", "batch", "heads", "kv_heads", "head_dim", "conv", "causal", "splits", "cache", "timer")
NAMES = {"kv_heads": "KV heads", "head_dim": "head dim", "git_sha": "git", "cuda": "CUDA"}
MOST_CHARACTERS = 40  # of a text from a file in one place of a table


@dataclass(frozen=True, slots=True)
class Column:
    """One column: texts by row. Rank 0 stays in the narrowest table; the highest rank is left out first.

    `problem` if it is part of what was measured and not of what came out; `legend` says what is not clear by itself.
    """

    name: str
    unit: str
    texts: tuple[str, ...]
    rank: int = 0
    right: bool = True
    problem: bool = False
    legend: str = ""

    @property
    def title(self) -> str:
        """Its name, and its unit if it has one."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name


@dataclass(frozen=True, slots=True)
class View:
    """A table of rows. `setting` and `device` say what all share; `reasons` what the numbers in `status` mean."""

    cells: str
    setting: tuple[str, ...]
    device: tuple[str, ...]
    columns: tuple[Column, ...]
    reasons: tuple[str, ...]


def make_view(rows: Sequence[Row]) -> View:
    """The view of some rows, at least one."""
    shared = {name: value for name in (*SETTING, *DEVICE) if (value := _shared(rows, name)) is not None}
    tokens = "" if "batch" in shared else _tokens(rows)
    problem = [_problem_column(rows, name) for name in ("device", *SETTING) if not (name == "batch" and tokens)]
    problem += [_problem_column(rows, name, 2) for name in DEVICE if name not in ("device", "git_sha")]
    problem += [_column(rows, "git", "", 2, _revision, right=False, problem=True)]
    varying = [column for column in problem if _key(column.name) not in shared and any(column.texts)]
    splits = [column for column in varying if column.name == "splits"]
    varying = [column for column in varying if column.name != "splits"]
    seq = _column(rows, "seq", "", 0, lambda row: short(int(row["seq"])), problem=True)
    impl = _column(rows, "impl", "", 0, lambda row: _cut(row["impl"]), right=False, problem=True)
    status, reasons = _status(rows)
    measured = [column for column in _measured(rows) if any(column.texts)]
    all_ok = all(row["status"] == "ok" for row in rows)
    return View(
        cells=_counted(rows),
        setting=tuple(_setting(rows, shared, tokens)),
        device=tuple(_device(rows, shared)),
        columns=(*varying, seq, impl, *splits, *measured, *([] if all_ok else [status])),
        reasons=tuple(reasons),
    )


def significant(value: float, digits: int) -> str:
    """A number with so many digits that count, zeros at the end included, and never 1e+03."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:#.{digits}g}".rstrip(".")


def _measured(rows: Sequence[Row]) -> list[Column]:
    """Median and interval first; throughput in the unit that says most of these passes."""
    decode = all(row["pass"] == "decode" for row in rows)

    def number(name: str, digits: int = 3, factor: float = 1.0) -> Callable[[Row], str]:
        return lambda row: significant(factor * float(row[name]), digits) if row[name] else ""

    def times(row: Row) -> str:
        return f"{significant(float(row['speedup']), 3)}x" if row["speedup"] else ""

    def spread(row: Row) -> str:
        return "-".join(significant(float(row[name]), 4) for name in ("p10_ms", "p90_ms") if row[name])

    def median(row: Row) -> str:
        return (UNSETTLED if settled(row) is False else "") + number("median_ms", 4)(row)

    def interval(row: Row) -> str:
        half = half_interval_of(row)
        return "" if half is None else f"{100 * half:.2f}" if half < 0.1 else significant(100 * half, 2)

    return [
        _column(rows, "median", "ms", 0, median, legend=f"{UNSETTLED} {why}" if (why := meaning(rows)) else ""),
        _column(rows, "±", "%", 2, interval, legend="half the 95 % interval of the median"),
        _column(rows, "p10-p90", "ms", 7, spread),
        _column(rows, "speedup", "", 1, times),
        _column(rows, "efficiency", "%", 2, number("efficiency", factor=100)),
        _column(rows, "useful", "TFLOP/s", 6 if decode else 4, number("useful_tflops")),
        _column(rows, "moved", "GB/s", 4 if decode else 8, number("gbytes_s")),
        _column(rows, "of roof", "%", 5, number("fraction_of_roofline", factor=100), legend=_roof_legend(rows)),
        _column(rows, "memory", "MB", 9, number("peak_memory_mb")),
        _column(rows, "energy", "J", 9, number("energy_j")),
        _column(rows, "energy", "tokens/J", 9, number("tokens_per_joule")),
        _column(rows, "worker", "", 9, lambda row: _cut(row["worker"]), right=False),
        _column(rows, "error", "", 10, lambda row: f"{float(row['rel_error']):.1e}" if row["rel_error"] else ""),
        _column(rows, "clock", "MHz", 11, number("sm_clock_mhz", 4) if _clocks_differ(rows) else lambda row: ""),
    ]


def _roof_legend(rows: Sequence[Row]) -> str:
    """What the roof of decode is in files from before reading was measured."""
    of_copies = any(
        row["pass"] == "decode" and row["fraction_of_roofline"] and not row["read_gbytes_s"] for row in rows
    )
    return "of decode, what a copy moves; what only reads can be faster" if of_copies else ""


def _clocks(rows: Sequence[Row]) -> list[float]:
    return [float(row["sm_clock_mhz"]) for row in rows if row["sm_clock_mhz"]]


def _clocks_differ(rows: Sequence[Row]) -> bool:
    """Whether some cells ran at a clock so low that it counts; otherwise the range says enough."""
    return min(_clocks(rows), default=0.0) < 0.95 * max(_clocks(rows), default=0.0)


def _column(
    rows: Sequence[Row], name: str, unit: str, rank: int, text: Callable[[Row], str],
    right: bool = True, problem: bool = False, legend: str = "",
) -> Column:  # fmt: skip
    return Column(name, unit, tuple(text(row) for row in rows), rank, right, problem, legend)


def _problem_column(rows: Sequence[Row], name: str, rank: int = 0) -> Column:
    right = name in ("batch", "heads", "kv_heads", "head_dim", "conv", "splits")
    return _column(rows, NAMES.get(name, name), "", rank, lambda row: _shown(row, name), right, problem=True)


def _shown(row: Row, name: str) -> str:
    if name == "causal":
        return "" if row["pass"] == "decode" else {"true": "yes", "false": "no"}[row["causal"]]
    if name == "splits" and row["splits"] == "auto" and row["splits_used"]:
        return f"auto ({row['splits_used']})"
    return _cut(value_of(row, name))


def _shared(rows: Sequence[Row], name: str) -> str | None:
    """The one value that stands in a column, where anything does: a failed row has no timer. None for several."""
    values = {_shown(row, name) if name == "splits" else value_of(row, name) for row in rows} - {""}
    if name == "kv_heads" and all(row["kv_heads"] == row["heads"] for row in rows):
        return ""
    if name == "git_sha" and len({row["git_dirty"] for row in rows if row["git_sha"]}) > 1:
        return None
    return None if len(values) > 1 else "".join(values)


def _key(name: str) -> str:
    return next((key for key, shown in NAMES.items() if shown == name), name)


def _tokens(rows: Sequence[Row]) -> str:
    """`16k` if each batch is so many tokens over the sequence length, as with --tokens; else nothing."""
    most = max(int(row["batch"]) * int(row["seq"]) for row in rows)
    same = all(int(row["batch"]) == max(1, most // int(row["seq"])) for row in rows)
    return short(most) if same else ""


def _setting(rows: Sequence[Row], shared: Mapping[str, str], tokens: str) -> list[str]:
    words = {name: f"{NAMES.get(name, name)} {_cut(value)}" for name, value in shared.items() if value}
    if shared.get("pass"):
        words["pass"] = {"fwd": "forward", "bwd": "backward"}.get(shared["pass"], shared["pass"])
    if shared.get("dtype"):
        words["dtype"] = shared["dtype"]
    if tokens:
        words["batch"] = f"{tokens} tokens a batch"
    if shared.get("heads"):
        words["heads"] = f"{shared['heads']} heads"
    if shared.get("kv_heads"):
        words["kv_heads"] = f"{shared['kv_heads']} KV heads"
    if "causal" in shared:
        words["causal"] = "causal" if shared["causal"] == "true" else "not causal"
    if all(row["pass"] == "decode" for row in rows):
        words.pop("causal", None)
    if shared.get("cache"):
        words["cache"] = f"{_cut(shared['cache'])} cache"
    baselines = sorted({row["baseline"] for row in rows} - {""})
    found = [words[name] for name in SETTING if name in words]
    return found + ([f"speedup over {' or '.join(map(_cut, baselines))}"] if baselines else [])


def _device(rows: Sequence[Row], shared: Mapping[str, str]) -> list[str]:
    words = [
        _cut(shared[name]) if name == "device" else f"{NAMES.get(name, name)} {_cut(shared[name])}"
        for name in DEVICE[:-1]
        if shared.get(name)
    ]
    if shared.get("git_sha"):
        words.append(f"git {next(filter(None, map(_revision, rows)))}")
    if (clocks := _clocks(rows)) and not _clocks_differ(rows):
        low, high = (f"{bound(clocks):.0f}" for bound in (min, max))
        words.append(f"{low} MHz" if low == high else f"{low} to {high} MHz")
    first, last = min(row["started_utc"] for row in rows), max(row["started_utc"] for row in rows)
    return [*words, first if first == last else f"{first} to {last}"]


def _revision(row: Row) -> str:
    return row["git_sha"][:12] + (" with changes" if row["git_dirty"] == "true" and row["git_sha"] else "")


def _counted(rows: Sequence[Row]) -> str:
    """How many cells there are of each status."""
    counts = Counter(row["status"] for row in rows)
    cells = f"{len(rows)} cell{'' if len(rows) == 1 else 's'}"
    if len(counts) == 1:
        return f"{cells}, {'' if len(rows) == 1 else 'all '}{rows[0]['status']}"
    return f"{cells}: {', '.join(f'{counts[status]} {status}' for status in STATUSES if counts[status])}"


def _status(rows: Sequence[Row]) -> tuple[Column, list[str]]:
    """The column of what became of each cell, with numbers that stand for reasons, and the reasons."""
    reasons = {reason: i for i, reason in enumerate(dict.fromkeys(r["reason"] for r in rows if r["reason"]), start=1)}
    column = _column(
        rows, "status", "", 0, lambda row: row["status"] + (f" [{reasons[row['reason']]}]" if row["reason"] else ""),
        right=False,
    )  # fmt: skip
    return column, list(reasons)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
