"""Which rows of a results file: `--where impl=triton,eager,seq=1k..4k`, and in which order: `--sort seq,-speedup`."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from mtabench.errors import UsageError, near_names
from mtabench.problem.axes import parse_convs, parse_ints, short
from mtabench.problem.operations import NONE, OPERATION_COLUMNS, STEPS, taps_text
from mtabench.results.columns import TABLE
from mtabench.results.results_file import COLUMNS, MEASURED_COLUMNS, NUMERIC_COLUMNS

Row = Mapping[str, str]

# A filter is about what was measured, where and how: not about what came out.
FILTERS = (
    *STEPS,
    *(name for name in COLUMNS if name not in (*MEASURED_COLUMNS, *OPERATION_COLUMNS, "schema_version", "repro")),
    *(name for name in MEASURED_COLUMNS if name not in NUMERIC_COLUMNS),
)
COUNTS = tuple(column.name for column in TABLE if column.field.kind == "whole" and column.name in FILTERS)
MOST_LISTED = 12

_CONDITION = re.compile(r"\s*([\w-]+)\s*(!?=)(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Condition:
    """One column and what may stand in it: texts with `*` for any; `excluded` keeps the rows with anything else."""

    text: str
    column: str
    patterns: tuple[str, ...]
    excluded: bool

    def holds(self, row: Row) -> bool:
        """Whether the condition keeps the row."""
        value = value_of(row, self.column)
        return any(fnmatchcase(value, pattern) for pattern in self.patterns) != self.excluded


def parse_where(texts: Iterable[str]) -> list[Condition]:
    """The conditions in texts such as `impl=triton,eager,seq=1k..4k,status!=ok`; all of them must hold.

    Numbers are written as in the options of a sweep. Raises UsageError.
    """
    return [_condition(name, sign == "!=", values) for text in texts for name, sign, values in _split(text.split(","))]


def select(rows: Sequence[dict[str, str]], conditions: Iterable[Condition], what: object) -> list[dict[str, str]]:
    """The rows for which all conditions hold; UsageError if there are none. `what` is the file that has them."""
    kept = list(rows)
    for condition in conditions:
        before, kept = kept, [row for row in kept if condition.holds(row)]
        if not kept:
            there = list(dict.fromkeys(_typed(row, condition.column) for row in before))
            more = f" and {len(there) - MOST_LISTED} more" if len(there) > MOST_LISTED else ""
            among = "" if len(before) == len(rows) else " among those that the conditions before it keep"
            raise UsageError(
                f"no row of {what} has {condition.text}{among}; "
                f"in the column {condition.column} they have {', '.join(there[:MOST_LISTED])}{more}"
            )
    return kept


def sort_key(text: str) -> Callable[[Sequence[dict[str, str]]], list[dict[str, str]]]:
    """What sorts rows by `seq,-speedup`: by seq, then the largest speedup first; empty fields come last.

    Raises UsageError for a column that is not there.
    """
    wanted = []
    for part in text.split(","):
        name = part.strip().removeprefix("-").replace("-", "_")
        if name not in COLUMNS:
            raise UsageError(f"--sort has no column {name!r}{_near(name, COLUMNS)}")
        wanted.append((name, part.strip().startswith("-")))

    def apply(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        ordered = list(rows)
        for name, descending in reversed(wanted):
            known = [row for row in ordered if row[name]]
            known.sort(key=partial(_comparable, name), reverse=descending)
            ordered = known + [row for row in ordered if not row[name]]
        return ordered

    return apply


def value_of(row: Row, column: str) -> str:
    """What stands in a column, or of a convolution query taps x key taps; nothing where there is no such step."""
    if column in ("conv", "post_conv"):
        return taps_text(row[f"{column}_q"], row[f"{column}_k"])
    return row[column]


def _split(parts: Iterable[str]) -> list[tuple[str, str, list[str]]]:
    """Name, sign and values of each condition: a part without a sign is one more value of the one before."""
    found: list[tuple[str, str, list[str]]] = []
    for part in parts:
        match = _CONDITION.fullmatch(part)
        if match:
            found.append((match[1], match[2], [match[3].strip()]))
        elif found and part.strip():
            found[-1][2].append(part.strip())
        else:
            raise UsageError(f"--where cannot read {part!r}; expected conditions such as impl=triton,seq=1k..4k")
    return found


def _condition(name: str, excluded: bool, values: Sequence[str]) -> Condition:
    column = name.replace("-", "_")
    text = f"{name}{'!=' if excluded else '='}{','.join(values)}"
    if column in MEASURED_COLUMNS and column not in FILTERS:
        raise UsageError(f"--where {text}: {column} is measured; expected a column that says what, where or how")
    if column not in FILTERS:
        raise UsageError(f"--where {text}: there is no column {name!r}{_near(column, FILTERS)}")
    return Condition(text, column, tuple(p for value in values for p in _patterns(column, value)), excluded)


def _patterns(column: str, value: str) -> list[str]:
    what = f"--where {column}"
    if column in STEPS and value.lower() == NONE:
        return [""]
    if column in ("conv", "post_conv") and value:
        return [taps_text(*taps) for taps in parse_convs(value)]
    if column in COUNTS or (column == "splits" and value[:1].isdigit()):
        return [str(number) for number in parse_ints(value, what)] if value else [""]
    return [value.replace("[", "[[]").replace("?", "[?]")]


def _typed(row: Row, column: str) -> str:
    """A value as one would type it in a condition."""
    value = value_of(row, column) or (NONE if column in STEPS else "(nothing)")
    return short(int(value)) if column in COUNTS and value.isdigit() else value[:60]


def _comparable(name: str, row: Row) -> float | str:
    if name == "splits":
        return float("inf") if row[name] == "auto" else float(row[name])
    return float(row[name]) if name in (*NUMERIC_COLUMNS, *COUNTS) else row[name]


def _near(name: str, names: Sequence[str]) -> str:
    near = [known for known in names if name.startswith(known)] or near_names(name, names)
    return f"; did you mean {' or '.join(near)}?" if near else f"; expected one of {', '.join(names)}"
