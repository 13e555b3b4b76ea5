"""What `memory` prints: tables with a row an implementation and a column a length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from mtabench.console import significant
from mtabench.prediction.roofline import Storage
from mtabench.problem.axes import short
from mtabench.problem.case import Case
from mtabench.tables import Cell, Column, as_columns


@dataclass(frozen=True, slots=True)
class Row:
    """A cell: what it stores and moves, and whether it fits `memory` bytes.

    `longest` is the longest sequence that fits with its batch.
    """

    case: Case
    storage: Storage
    memory: float
    longest: int

    @property
    def fits(self) -> bool:
        """Whether inputs and peak are at most the memory."""
        return self.storage.needed <= self.memory


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[Column]]]:
    """What is shown of the cells of a shape: titles and tables."""
    limit = gigabytes(rows[0].memory)
    yield f"bytes that a call takes with its inputs (! is more than {limit}), and the longest that fits", _needed(rows)
    if any(row.storage.traffic for row in rows):
        yield "bytes through memory", _filled(rows, lambda row: _known(row.storage.traffic, _size))
        yield "FLOP for each of them", _filled(rows, lambda row: _known(row.storage.intensity, _size))


def _needed(rows: Sequence[Row]) -> list[Column]:
    """Peaks with inputs, in red where they do not fit; the first such length and the last that fits."""
    lines: list[list[Cell]] = []
    matrices = {(row.case.dtype, row.case.seq): _size(row.storage.score_matrix) for row in rows}
    lengths, dtypes = sorted({seq for _, seq in matrices}), sorted({dtype for dtype, _ in matrices})
    for dtype in dtypes:
        sizes = (matrices.get((dtype, seq), "") for seq in lengths)
        name = f"(score matrix{f' {dtype}' if len(dtypes) > 1 else ''})"
        lines.append([Text(text, style="dim") for text in (name, *sizes, "", "")])
    for name, line in _lines(rows):
        cells = [
            Text(_size(row.storage.needed) + ("" if row.fits else "!"), style="" if row.fits else "red") for row in line
        ]
        too_long = next((short(row.case.seq) for row in line if not row.fits), "")
        lines.append([name, *cells, too_long, f"{line[-1].longest:,}"])
    columns = as_columns((*_lengths(rows), "too long", "fits"), lines)
    return [column for column in columns if any(map(str, column.texts))]  # nothing may be too long


def gigabytes(count: float) -> str:
    """Bytes as people speak of memory."""
    return f"{count / 1e9:.4g} GB"


def _lines(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each implementation, by length; convolutions and dtypes apart, and named where there are several."""
    steps, dtypes = ({getattr(row.case, name) for row in rows} - {""} for name in ("steps", "dtype"))

    def label(case: Case) -> str:
        words = [
            case.label,
            case.steps.removeprefix("conv ") if len(steps) > 1 else "",
            case.dtype if len(dtypes) > 1 else "",
        ]
        return " ".join(filter(None, words))

    lines: dict[str, list[Row]] = {label(row.case): [] for row in rows}
    for row in sorted(rows, key=lambda row: row.case.seq):
        lines[label(row.case)].append(row)
    return list(lines.items())


def _lengths(rows: Sequence[Row]) -> list[str]:
    """The headings of a table with a column a length."""
    return ["", *(short(seq) for seq in sorted({row.case.seq for row in rows}))]


def _filled(rows: Sequence[Row], cell: Callable[[Row], str]) -> list[Column]:
    """A line an implementation, none for those of which nothing is known."""
    lines = [[name, *map(cell, line)] for name, line in _lines(rows)]
    return as_columns(_lengths(rows), [line for line in lines if any(line[1:])])


def _known(value: float | None, shown: Callable[[float], str]) -> str:
    return "" if value is None else shown(value)


def _size(count: float) -> str:
    """Bytes in thousands, millions and so on: 8.39M."""
    for unit in ("", "K", "M", "G"):
        if count < 999.5:
            return f"{significant(count, 3)}{unit}"
        count /= 1000
    return f"{significant(count, 3)}T"
