"""What a table of results shows: the columns in which rows differ, and once, above it, what they share."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtabench.escaping import in_markdown, markdown_table
from mtabench.problem.axes import short
from mtabench.problem.case import CACHED_PASSES
from mtabench.problem.operations import PLAIN, PLAIN_LACKS, STEPS, page_size_text
from mtabench.prose import plural
from mtabench.results.columns import AXES, STATUSES, TABLE, clocks, clocks_differ, cut
from mtabench.results.row_filter import value_of

Row = Mapping[str, str]

DEVICE = tuple(column.name for column in TABLE if column.role == "environment" and column.name != "git_dirty")
SETTING = (*(axis for axis in AXES if axis != "seq"), "cache", "timer")
NAMES = {column.name: column.heading for column in TABLE if column.heading} | {"post_conv": "post conv"}
WORDS = {
    "device": "{}", "dtype": "{}", "layers": "{} layers", "heads": "{} heads", "kv_heads": "{} KV heads",
    "cache": "{} cache",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """One column: texts by row. Rank 0 stays in the narrowest table; the highest rank is left out first.

    `problem` if it is part of what was measured and not of what came out; `legend` says what is not clear by itself.
    `source` is the column of the file by which rows are sorted, or a step of the operation.
    """

    name: str
    texts: tuple[str, ...]
    unit: str = ""
    rank: int = 0
    right: bool = True
    problem: bool = False
    legend: str = ""
    source: str = ""

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
    columns: tuple[ViewColumn, ...]
    reasons: tuple[str, ...]


def make_view(rows: Sequence[Row]) -> View:
    """The view of some rows, at least one."""
    shared = {name: value for name in (*SETTING, *DEVICE) if (value := _shared(rows, name)) is not None}
    tokens = "" if "batch" in shared else _tokens(rows)
    stated = {*shared, "batch"} if tokens else set(shared)
    varying = [_problem_column(rows, name) for name in ("device", *SETTING, *DEVICE[1:]) if name not in stated]
    varying = [column for column in varying if any(column.texts)]
    splits = [column for column in varying if column.name == "splits"]
    varying = [column for column in varying if column.name != "splits"]
    seq = _column(rows, "seq", lambda row: short(int(row["seq"])), problem=True, source="seq")
    impl = _column(rows, "impl", lambda row: cut(row["impl"]), right=False, problem=True, source="impl")
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


def _measured(rows: Sequence[Row]) -> list[ViewColumn]:
    """What columns show of what came out, in the order of their places."""
    decode = all(row["pass"] in CACHED_PASSES for row in rows)
    found = []
    shown = [(column.name, column.shown) for column in TABLE if column.shown]
    for source, one in sorted(shown, key=lambda item: item[1].place):
        one = one.instead(rows) or one
        rank = one.rank if one.decode_rank is None or not decode else one.decode_rank
        text = one.text if one.wanted(rows) else lambda row: ""
        legend = one.legend(rows)
        more: dict[str, Any] = {"unit": one.unit, "rank": rank, "right": one.right, "legend": legend, "source": source}
        found.append(_column(rows, one.heading, text, **more))
    return found


def _column(rows: Sequence[Row], name: str, text: Callable[[Row], str], **more: Any) -> ViewColumn:
    return ViewColumn(name, tuple(map(text, rows)), **more)


def _problem_column(rows: Sequence[Row], name: str) -> ViewColumn:
    right = name in ("layers", "batch", "heads", "kv_heads", "head_dim", "splits", *STEPS)
    rank = 2 if name in DEVICE[1:] else 0
    more: dict[str, Any] = {"rank": rank, "right": right, "problem": True, "source": name}
    return _column(rows, NAMES.get(name, name), lambda row: _shown(row, name), **more)


def _shown(row: Row, name: str) -> str:
    if name == "causal":
        return "" if row["pass"] in CACHED_PASSES else {"true": "yes", "false": "no"}[row["causal"]]
    if name == "splits" and row["splits"] == "auto" and row["splits_used"]:
        return f"auto ({row['splits_used']})"
    if name == "page_size":
        return page_size_text(row["pass"], row["page_size"])
    if name == "git_sha":
        return _revision(row)
    return cut(value_of(row, name))


def _shared(rows: Sequence[Row], name: str) -> str | None:
    """The one value that stands in a column, where anything does: a failed row has no timer. None for several."""
    values = {_shown(row, name) if name in ("splits", "conv", "post_conv") else row[name] for row in rows}
    if name not in STEPS:
        values.discard("")
    elif name in PLAIN_LACKS and any(row["op"] != PLAIN for row in rows):  # which its implementation implies
        values = {value_of(row, name) for row in rows if row["op"] != PLAIN}
    if name == "kv_heads" and all(row["kv_heads"] == row["heads"] for row in rows):
        return ""
    if name == "git_sha" and len({row["git_dirty"] for row in rows if row["git_sha"]}) > 1:
        return None
    return None if len(values) > 1 else "".join(values)


def _tokens(rows: Sequence[Row]) -> str:
    """`16k` if each batch is so many tokens over the sequence length, as with --tokens; else nothing."""
    most = max(int(row["batch"]) * int(row["seq"]) for row in rows)
    same = all(int(row["batch"]) == max(1, most // int(row["seq"])) for row in rows)
    return short(most) if same else ""


def _setting(rows: Sequence[Row], shared: Mapping[str, str], tokens: str) -> list[str]:
    words = {name: _in_words(name, value) for name, value in shared.items() if value}
    if tokens:
        words["batch"] = f"{tokens} tokens a batch"
    if all(row["pass"] in CACHED_PASSES for row in rows):
        words.pop("causal", None)
    if baselines := sorted({row["baseline"] for row in rows} - {""}):
        words["baseline"] = f"speedup over {' or '.join(map(cut, baselines))}"
    return [words[name] for name in (*SETTING, "baseline") if name in words]


def _device(rows: Sequence[Row], shared: Mapping[str, str]) -> list[str]:
    words = [_in_words(name, shared[name]) for name in DEVICE[:-1] if shared.get(name)]
    if shared.get("git_sha"):
        words.append(f"git {next(filter(None, map(_revision, rows)))}")
    if (found := clocks(rows)) and not clocks_differ(rows):
        low, high = (f"{bound(found):.0f}" for bound in (min, max))
        words.append(f"{low} MHz" if low == high else f"{low} to {high} MHz")
    first, last = min(row["started_utc"] for row in rows), max(row["started_utc"] for row in rows)
    return [*words, first if first == last else f"{first} to {last}"]


def _in_words(name: str, value: str) -> str:
    """What all rows share in a column."""
    if name == "causal":
        return "causal" if value == "true" else "not causal"
    if name == "pass":
        return {"fwd": "forward", "bwd": "backward"}.get(value, value)
    words = WORDS.get(name, f"{NAMES.get(name, name)} {{}}").format(cut(value))
    return words.removesuffix("s") if value == "1" else words


def _revision(row: Row) -> str:
    return row["git_sha"][:12] + (" with changes" if row["git_dirty"] == "true" and row["git_sha"] else "")


def _counted(rows: Sequence[Row]) -> str:
    """How many cells there are of each status."""
    counts = Counter(row["status"] for row in rows)
    cells = plural(len(rows), "cell")
    if len(counts) == 1:
        return f"{cells}, {'' if len(rows) == 1 else 'all '}{rows[0]['status']}"
    return f"{cells}: {', '.join(f'{counts[status]} {status}' for status in STATUSES if counts[status])}"


def _status(rows: Sequence[Row]) -> tuple[ViewColumn, list[str]]:
    """The column of each cell's outcome, with numbers that stand for reasons, and the reasons."""
    reasons = {reason: i for i, reason in enumerate(dict.fromkeys(r["reason"] for r in rows if r["reason"]), start=1)}

    def text(row: Row) -> str:
        return row["status"] + (f" [{reasons[row['reason']]}]" if row["reason"] else "")

    return _column(rows, "status", text, right=False, source="status"), list(reasons)


def up_to_rank(view: View, most: int) -> View:
    """The view without the columns of higher rank, for where there is no room for all."""
    return replace(view, columns=tuple(column for column in view.columns if column.rank <= most))


def markdown_of(view: View) -> str:
    """The view as a table in GitHub's Markdown under what all rows share."""
    columns = view.columns
    lines = [in_markdown(", ".join(facts)) + "\n" for facts in (view.setting, view.device) if facts]
    header, right = [in_markdown(column.title) for column in columns], [column.right for column in columns]
    rows = zip(*(map(in_markdown, column.texts) for column in columns), strict=True)
    lines += markdown_table(header, rows, right)
    lines += [f"\n{in_markdown(f'{column.name}: {column.legend}')}" for column in columns if column.legend]
    lines += [f"\n\\[{i}\\] {in_markdown(reason)}" for i, reason in enumerate(view.reasons, start=1)]
    return "\n".join(lines) + "\n"
