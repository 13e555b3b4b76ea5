"""The command `memory`: what implementations store and move, and where memory ends."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from rich.console import Console
from rich.text import Text

from mtabench.console import make_console, say, significant
from mtabench.errors import UsageError
from mtabench.prediction.devices import Device, find_device, known_device
from mtabench.prediction.memory import longest_seq
from mtabench.prediction.predict import unpredicted
from mtabench.prediction.roofline import Storage, storage_of
from mtabench.problem.axes import short
from mtabench.problem.case import Case
from mtabench.registry import implementation_of
from mtabench.sweeps.plan import Options, make_plan
from mtabench.tables import Cell, Column, as_columns, print_columns, print_prose

UNITS = {"": 1, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
TRAFFIC = (
    "through memory: what a kernel reads comes from there once, and from the caches when it is read again; "
    "implementations that are not planned are left out"
)


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
    """A line an implementation, none where nothing is known."""
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


def run(options: Options, device_name: str | None, memory: str | None) -> int:
    """Print what the cells of these axes store and move."""
    bytes_given = None if memory is None else parse_bytes(memory)
    if options.batch is None and options.tokens is None:
        options = replace(options, batch="1")
    plan = make_plan(options, device="cuda")
    device, bytes_there, source = _device(device_name)
    limit = bytes_given or bytes_there
    impossible = {case: reason for case in plan.cases if (reason := _impossible(case, device))}
    rows = [_row(case, limit) for case in plan.cases if case not in impossible]
    if not rows:
        raise UsageError("; ".join(dict.fromkeys(f"{case.impl}: {reason}" for case, reason in impossible.items())))
    console = make_console()
    say(console, f"{plan.pass_} on {source}; memory: {gigabytes(limit)}")
    _show(console, rows, by_tokens=options.tokens is not None)
    for text in dict.fromkeys(f"{case.label}: {reason}" for case, reason in impossible.items()):
        print_prose(console, text)
    return 0


def parse_bytes(text: str) -> float:
    """The bytes in a text such as 80GB, 24GiB or 141e9; raises UsageError."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?(?:e\d{1,2})?)\s*([a-z]*)", text.strip(), re.IGNORECASE | re.ASCII)
    if not match or match[2].upper() not in UNITS:
        raise UsageError(f"--memory cannot read {text!r}; expected a size such as 80GB, 24GiB or 512MB")
    found = float(match[1]) * UNITS[match[2].upper()]
    if not 1e6 <= found <= 1e15:
        raise UsageError(f"--memory {text} is {found:.3g} bytes; expected 1MB to 1000TB")
    return found


def _device(name: str | None) -> tuple[Device | None, float, str]:
    """The device named, or this machine's GPU (None if its limits are not known), its memory, and both in words.

    Raises UsageError where there is none.
    """
    if name is not None:
        device = find_device(name)
        return device, device.memory_bytes, device.name
    if not torch.cuda.is_available():
        raise UsageError("memory is told of a GPU, and PyTorch finds none here; name one: --device-name h200")
    name = torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return known_device(name), float(memory), name


def _impossible(case: Case, device: Device | None) -> str | None:
    """Why an implementation never runs a cell on this device, as far as that is known here, or None."""
    implementation = implementation_of(case)
    if case.pass_ not in implementation.passes:
        return f"has no {case.pass_} pass"
    if "cuda" not in implementation.devices:
        return "runs on the CPU alone"
    return unpredicted(case, device) if device and implementation.planned else None


def _row(case: Case, limit: float) -> Row:
    longest = longest_seq(case, implementation_of(case).work, limit, multiple=1)
    return Row(case=case, storage=storage_of(case), memory=limit, longest=longest)


def _show(console: Console, rows: Sequence[Row], by_tokens: bool) -> None:
    """The tables of each shape, then the notes on all of them."""

    def shape(row: Row) -> tuple:
        case = row.case
        return case.head_dim, case.heads, case.kv_heads, 0 if by_tokens else case.batch

    for _, group in groupby(sorted(rows, key=shape), key=shape):
        of_shape = list(group)
        say(console, "")
        print_prose(console, _title(of_shape), style="bold")
        for title, columns in tables(of_shape):
            print_prose(console, title)
            print_columns(console, columns)
            say(console, "")
    print_prose(console, TRAFFIC)


def _title(rows: Sequence[Row]) -> str:
    case = rows[0].case
    batches = list(dict.fromkeys(row.case.batch for row in sorted(rows, key=lambda row: row.case.seq)))
    steps = list(dict.fromkeys(row.case.steps for row in rows if row.case.steps))
    grouped = f" (KV {case.kv_heads})" if case.kv_heads != case.heads else ""
    batch = f"batch {batches[0]}" + (f" to {batches[-1]}" if len(batches) > 1 else "")
    words = [
        ", ".join(dict.fromkeys(row.case.dtype for row in rows)),
        batch,
        f"{case.heads} heads{grouped} of {case.head_dim}",
    ]
    words += [" or ".join(steps).replace(" or conv ", ", ")] if steps else []
    words += [] if case.operation.causal else ["not causal"]
    return ", ".join(words)
