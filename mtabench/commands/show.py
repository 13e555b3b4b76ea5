"""The command `mtabench show`: a results file as a table that fits the terminal, a pipe or a log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mtabench.console import leave_out, make_console
from mtabench.errors import UsageError
from mtabench.escaping import in_log, printable
from mtabench.results.result_view import Column, View, make_view
from mtabench.results.results_file import cell_of, find_samples, key_of_row, read_file
from mtabench.results.runs import Rounds, find_rounds, process_ids, read_samples
from mtabench.results.sparklines import MARKS, against_seq, drift
from mtabench.results.where import parse_where, select, sort_key
from mtabench.sweeps.table import STYLES

GAP = "  "
STAYS_IN_ROW = ("seq", "impl", "splits")  # the rest of a problem can stand above its rows
MOST_REASON = 500  # characters
ASCII = str.maketrans({"±": "+-", "·": "-", **dict(zip(MARKS, "_.-~=+*#", strict=True))})

Row = Mapping[str, str]


def run(path: Path, where: Sequence[str], sort: str | None) -> int:
    """Print the rows of a results file for which `where` holds; raises UsageError."""
    conditions, in_order = parse_where(where), sort_key(sort) if sort is not None else list
    file = read_file(path, with_rows=True)
    rows = in_order(select(file.rows(), conditions, path))
    notes = ["the file ends in the middle of a row, which is left out"] if file.torn else []
    view = make_view(rows)
    if find_samples(path).exists():
        try:
            view = _with_rounds(rows, view, read_samples(path))
        except UsageError as error:
            notes.append(f"no rounds: {error}")
    console = make_console()
    title = f"{path}: {view.cells}" + (f"; {len(file.columns['seq'])} in the file" if conditions else "")
    with console.capture() as drawn:
        console.print(Text("\n").join(_lines(title, rows, view, notes, console)), soft_wrap=True, highlight=False)
    print(in_log(drawn.get()), end="")
    return 0


def _with_rounds(rows: Sequence[Row], view: View, samples: Mapping[tuple[str, str], Rounds]) -> View:
    """The view with a picture of each cell's rounds, where there are samples."""
    found = drift([_rounds(samples, row) for row in rows])
    if not any(found.texts):
        return view
    scale = f"{100 * found.scale:.2g}"
    legend = f"their medians in the order measured, from -{scale} % to +{scale} % of the cell's median"
    column = Column("rounds", found.texts, rank=3, right=False, legend=legend)
    place = len(view.columns) - (view.columns[-1].name == "status")
    return replace(view, columns=(*view.columns[:place], column, *view.columns[place:]))


def _rounds(samples: Mapping[tuple[str, str], Rounds], row: Row) -> Rounds:
    """The samples of a cell by round, of one process after the other."""
    key = cell_of(key_of_row(row))
    return tuple(one for run_id in process_ids(row["run_id"]) for one in find_rounds(samples, run_id, key))


def _lines(title: str, rows: Sequence[Row], view: View, notes: Sequence[str], console: Console) -> Iterable[Text]:
    width = console.width

    def fit(text: str) -> str:
        return _encodable(text, console.encoding)

    yield Text(fit(printable(title)), "bold")
    for facts in (view.setting, view.device):
        yield from (Text(f"  {line}") for line in _filled([fit(fact) for fact in facts], fit(" · "), width - 2))
    yield Text("")
    columns = [
        replace(column, name=fit(column.name), texts=tuple(fit(text) for text in column.texts))
        for column in view.columns
    ]
    above, columns, dropped = _fitted(columns, width)
    yield from _table(above, columns)
    if dropped:
        yield from _wrapped(f"left out for {width} columns: {', '.join(c.title for c in dropped)}", "", width)
    for number, reason in enumerate(view.reasons, start=1):
        yield from _wrapped(fit(reason[:MOST_REASON]), f"[{number}] ", width)
    pictures = [(fit(a), fit(b), c) for a, b, c in against_seq(rows, view)]
    if pictures:
        yield Text("")
        yield from _wrapped(pictures[0][1], "", width)
        labels = max(cell_len(label) for label, _, _ in pictures)
        drawn = max(cell_len(f"{GAP}{marks}{GAP}{ends}") for _, marks, ends in pictures[1:])
        for label, marks, ends in pictures[1:]:
            if len(GAP) + labels + drawn <= width:
                yield Text(f"{GAP}{_padded(label, labels, False)}{GAP}{marks}{GAP}{ends}")
            else:
                yield from _wrapped(label, GAP, width)
                yield Text(f"{GAP}{GAP}{marks}{GAP}{ends}")
    for note in (*(f"{column.name}: {column.legend}" for column in columns if column.legend), *notes):
        yield from _wrapped(fit(printable(note)), "", width)


def _fitted(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column], list[Column]]:
    """What stands above groups of rows, what is in the table, and what is left out to fit the width."""
    kept, dropped = leave_out(columns, lambda some: _width(some) <= width)
    above = []
    for column in [column for column in kept if column.problem and column.name not in STAYS_IN_ROW]:
        if _width(kept) <= width:
            break
        above.append(column)
        kept.remove(column)
    return above, kept, dropped


def _table(above: Sequence[Column], columns: Sequence[Column]) -> Iterable[Text]:
    """The header, units below names, and a line a row; groups of rows under what they share."""
    widths = [_column_width(column) for column in columns]
    yield Text(_joined([column.name for column in columns], columns, widths), "bold")
    if any(column.unit for column in columns):
        yield Text(_joined([column.unit for column in columns], columns, widths), "bold")
    apart = above or [column for column in columns if column.problem and column.name not in STAYS_IN_ROW]
    # Neighbouring rows with the same texts in these columns: the texts, and the rows' numbers.
    found = groupby(range(len(columns[0].texts)), key=lambda i: tuple(column.texts[i] for column in apart))
    groups = [(texts, list(members)) for texts, members in found]
    ordered = len(groups) == len({texts for texts, _ in groups})  # else they are sorted by something else
    for number, (texts, members) in enumerate(groups):
        if number and ordered:
            yield Text("")
        if above:
            words = (f"{column.name} {text or '-'}" for column, text in zip(above, texts, strict=True))
            yield Text(", ".join(words), "bold")
        for i in members:
            line = Text(_joined([column.texts[i] for column in columns], columns, widths))
            if columns[-1].name == "status":
                status = columns[-1].texts[i]
                line.stylize(STYLES.get(status.partition(" ")[0], ""), max(0, len(line) - len(status)))
            yield line


def _joined(texts: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    cells = (_padded(text, size, c.right) for text, c, size in zip(texts, columns, widths, strict=True))
    return GAP.join(cells).rstrip()


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def _column_width(column: Column) -> int:
    return max(map(cell_len, (column.name, column.unit, *column.texts)))


def _width(columns: Sequence[Column]) -> int:
    return sum(map(_column_width, columns)) + len(GAP) * (len(columns) - 1)


def _filled(parts: Sequence[str], separator: str, width: int) -> list[str]:
    """The parts in lines that break between them."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1] + separator + part) <= width:
            lines[-1] += separator + part
        else:
            lines.append(part)
    return lines


def _wrapped(text: str, mark: str, width: int) -> Iterable[Text]:
    lines = textwrap.wrap(text, max(20, width - len(mark)), break_on_hyphens=False)
    return [Text((mark if i == 0 else " " * len(mark)) + line) for i, line in enumerate(lines)]


def _encodable(text: str, encoding: str) -> str:
    """The text, or what stands for it in ASCII where the terminal's encoding lacks some of it."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode("ascii", "backslashreplace").decode()
    return text
