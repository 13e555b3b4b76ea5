"""Tables on standard output: no text is ever cut, whatever the width of the terminal.

What does not fit is left out by rank and named, stands above the rows that share it, or goes into another block below.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mtabench.console import has_width
from mtabench.escaping import in_log, printable
from mtabench.prose import wrapped

GAP = "  "

Cell = str | Text


@dataclass(frozen=True)
class Column:
    """A column of texts under a heading of one line or several.

    Rank 0 stays; the highest rank is left out first. One that is `apart` may stand above the rows that share its text.
    """

    heading: str
    texts: Sequence[Cell]
    rank: int = 0
    justify: Literal["left", "right"] = "right"
    apart: bool = False

    @cached_property
    def width(self) -> int:
        """Characters of the widest text."""
        return max(_lengths([*self.heading.split("\n"), *self.texts]))

    def padded(self, texts: Sequence[Cell]) -> list[Cell]:
        """Texts as wide as the column."""
        spaces = [" " * (self.width - length) for length in _lengths(texts)]
        pairs = zip(spaces, texts, strict=True) if self.justify == "right" else zip(texts, spaces, strict=True)
        styled = Text in map(type, texts)
        return [Text.assemble(*two) if styled and Text in map(type, two) else f"{two[0]}{two[1]}" for two in pairs]

    @property
    def name(self) -> str:
        """The heading on one line."""
        return " ".join(self.heading.split())


def as_columns(headings: Sequence[str], rows: Iterable[Sequence[Cell]], left: Collection[str] = ()) -> list[Column]:
    """Rows as columns, what a row lacks at its end empty.

    Those in `left`, by default the first, stand to the left; the others, numbers, to the right.
    """
    left = left or headings[:1]
    return [
        Column(str(heading), texts, 0, "left" if heading in left else "right")
        for heading, *texts in zip_longest(headings, *rows, fillvalue="")
    ]


def width_of(columns: Sequence[Column]) -> int:
    """Characters of a line of these columns."""
    return sum(column.width for column in columns) + len(GAP) * (len(columns) - 1)


def fitted(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column], list[Column]]:
    """What stands above groups of rows, what is in the table, and what is left out to fit the width."""
    kept, dropped, above = list(columns), [], []
    while width_of(kept) > width and (worst := max(kept, key=lambda column: column.rank)).rank:
        kept.remove(worst)
        dropped.append(worst)
    for column in [column for column in kept if column.apart]:
        if width_of(kept) <= width:
            break
        above.append(column)
        kept.remove(column)
    return above, kept, dropped


def lines(columns: Sequence[Column], above: Sequence[Column] = ()) -> Iterator[Text]:
    """The headings and a line a row; groups of rows below what they share in `above`."""
    headings = [column.heading.split("\n") for column in columns]
    height = max(map(len, headings))
    heads = (one.padded([""] * (height - len(texts)) + texts) for one, texts in zip(columns, headings, strict=True))
    yield from filter(None, (_joined(texts, "bold") for texts in zip(*heads, strict=True)))
    rows = list(zip(*(column.padded(column.texts) for column in columns), strict=True))
    apart = above or [column for column in columns if column.apart]
    keys = list(zip(*(map(str, column.texts) for column in apart), strict=True)) or [()] * len(rows)
    # Neighbouring rows with the same texts in these columns: the texts, and the rows' numbers.
    groups = [(texts, list(members)) for texts, members in groupby(range(len(rows)), keys.__getitem__)]
    ordered = len(groups) == len({texts for texts, _ in groups})  # else they are sorted by something else
    for number, (texts, members) in enumerate(groups):
        if number and ordered:
            yield Text("")
        if above:
            words = (f"{column.name} {text or '-'}" for column, text in zip(above, texts, strict=True))
            yield Text(", ".join(words), "bold")
        for i in members:
            yield _joined(rows[i])


def blocks(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """The columns in tables that fit the width, the first in each."""
    first, *others = columns
    found = [[first]]
    for column in others:
        if len(found[-1]) > 1 and width_of([*found[-1], column]) > width:
            found.append([first])
        found[-1].append(column)
    return found


def print_columns(console: Console, columns: Sequence[Column]) -> None:
    """Print a table in as many blocks as the terminal's width needs, the first column in each."""
    for number, block in enumerate(blocks(columns, console.width)):
        print_lines(console, [*[Text("")] * bool(number), *lines(block)])


def print_lines(console: Console, texts: Iterable[Text]) -> None:
    """Print lines as they are, in which GitHub's runner finds no command."""
    if console.color_system is None and not console.quiet:  # many times as fast
        console.file.write(in_log("".join(f"{text.plain}\n" for text in texts)))
    elif safe := [text if (shown := in_log(text.plain)) == text.plain else Text(shown, text.style) for text in texts]:
        console.print(Text("\n").join(safe), soft_wrap=True, highlight=False)


def print_prose(console: Console, text: str, mark: str = "", style: str = "") -> None:
    """Print a sentence so that no terminal breaks a word, and whole in a log. What a person copies is for `say`."""
    text = printable(text)
    found = wrapped(text, console.width, mark) if has_width(console) else [mark + text]
    print_lines(console, (Text(line, style) for line in found))


def numbered(texts: Iterable[str]) -> dict[str, str]:
    """Marks such as [1] for the texts that are not empty, each once, in their order."""
    return {text: f"[{number}]" for number, text in enumerate(dict.fromkeys(filter(None, texts)), start=1)}


def _joined(cells: Sequence[Cell], style: str = "") -> Text:
    with suppress(TypeError):  # most lines have no style of their own, and are joined many times as fast
        return Text(GAP.join(cells).rstrip(), style)  # type: ignore[arg-type]
    line = Text(GAP).join(Text(cell) if isinstance(cell, str) else cell for cell in cells)
    line.rstrip()
    return line


def _lengths(texts: Iterable[Cell]) -> list[int]:
    return [len(plain) if (plain := str(text)).isascii() else cell_len(plain) for text in texts]
