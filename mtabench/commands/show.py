"""The command `mtabench show`: a results file as a table that fits the terminal, a pipe or a log."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mtabench import tables
from mtabench.console import make_console
from mtabench.escaping import in_log, printable
from mtabench.json_output import print_json
from mtabench.results.columns import values_of
from mtabench.results.result_view import View, ViewColumn, make_view, markdown_of, up_to_rank
from mtabench.results.results_file import COLUMNS, read_file, say_if_torn, text_of
from mtabench.results.row_filter import parse_where, select, sort_key
from mtabench.sweeps.table import STYLES

STAYS_IN_ROW = ("seq", "impl", "splits")  # the rest of a problem can stand above its rows
MOST_REASON = 500  # characters
HIGHEST_RANK = 8  # of the columns in Markdown: a page is narrower than a screen
ASCII = str.maketrans({"±": "+-", "·": "-"})

Row = Mapping[str, str]


def run(path: Path, where: Sequence[str], sort: str | None, as_markdown: bool, as_json: bool) -> int:
    """Print the rows of a results file for which `where` holds; raises UsageError."""
    conditions, in_order = parse_where(where), sort_key(sort) if sort is not None else list
    file = read_file(path, with_rows=True)
    rows = in_order(select(file.rows(), conditions, path))
    if as_json:
        values = [values_of(row) for row in rows]
        print_json("show", {"file": path, "torn": file.torn, "rows": values})
        return 0
    if as_markdown:
        say_if_torn(file)
        print(in_log(markdown_of(up_to_rank(make_view(rows), HIGHEST_RANK))), end="")
        return 0
    notes = ["the file ends in the middle of a row, which is left out"] if file.torn else []
    view, console = make_view(rows), make_console()
    title = f"{path}: {view.cells}" + (f"; {len(file.columns['seq'])} in the file" if conditions else "")
    tables.print_lines(console, _lines(title, view, notes, console))
    return 0


def print_rows(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as they were measured, as `show` prints a file's rows."""
    view = make_view([{name: text_of(row.get(name)) for name in COLUMNS} for row in rows])
    tables.print_lines(console, _lines(f"{title}: {view.cells}", view, [], console))


def _lines(title: str, view: View, notes: Sequence[str], console: Console) -> Iterable[Text]:
    width = console.width

    fit = partial(_encodable, encoding=console.encoding)
    yield from (Text(line, "bold") for line in tables.wrapped(fit(printable(title)), width))
    for facts in (view.setting, view.device):
        yield from (Text(f"  {line}") for line in _filled([fit(fact) for fact in facts], fit(" · "), width - 2))
    yield Text("")
    columns = [_as_column(column, fit) for column in view.columns]
    above, kept, dropped = tables.fitted(columns, width)
    yield from tables.lines(kept, above)
    if dropped:
        titles = {column.heading: shown.title for column, shown in zip(columns, view.columns, strict=True)}
        names = ", ".join(titles[column.heading] for column in dropped)
        yield from _wrapped(f"left out for {width} columns: {names}", "", width)
    for number, reason in enumerate(view.reasons, start=1):
        yield from _wrapped(fit(reason[:MOST_REASON]), f"[{number}] ", width)
    shown_headings = {column.heading for column in kept}
    legends = [
        f"{shown.name}: {shown.legend}"
        for column, shown in zip(columns, view.columns, strict=True)
        if shown.legend and column.heading in shown_headings
    ]
    for note in (*legends, *notes):
        yield from _wrapped(fit(printable(note)), "", width)


def _as_column(column: ViewColumn, fit: Callable[[str], str]) -> tables.Column:
    """The column as a table takes it, with the status in its colour."""
    whole = "".join(column.texts)
    texts: Sequence[str | Text] = column.texts if fit(whole) == whole else [fit(text) for text in column.texts]
    if column.name == "status":
        texts = [Text(str(text), STYLES.get(str(text).partition(" ")[0], "")) for text in texts]
    heading = f"{fit(column.name)}\n{column.unit}"
    apart = column.problem and column.name not in STAYS_IN_ROW
    return tables.Column(heading, texts, column.rank, "right" if column.right else "left", apart)


def _filled(parts: Sequence[str], separator: str, width: int) -> list[str]:
    """The parts in lines that break between them."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1] + separator + part) <= width:
            lines[-1] += separator + part
        else:
            lines.append(part)
    return lines


def _wrapped(text: str, mark: str, width: int) -> list[Text]:
    return list(map(Text, tables.wrapped(text, width, mark)))


def _encodable(text: str, encoding: str) -> str:
    """The text, or what stands for it in ASCII where the terminal's encoding lacks some of it."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode("ascii", "backslashreplace").decode()
    return text
