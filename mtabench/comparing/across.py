"""The same cells on two devices: how many times as long one takes, without a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from mtabench.comparing.compare import NotComparableError
from mtabench.comparing.inference import compare_samples
from mtabench.console import make_console, significant
from mtabench.escaping import in_markdown, markdown_table
from mtabench.measuring.settled import UNSETTLED, mark_of, unsettled_of
from mtabench.prose import plural
from mtabench.results.cell_names import told_apart
from mtabench.results.results_file import find_samples
from mtabench.results.runs import Cell, Run
from mtabench.tables import as_columns, fitted, lines, print_columns, print_lines, print_prose, width_of

HEADER = ("base ms", "head ms", "ratio", "95 % interval")
DIFFERING = ("timer", "cache")  # of which a ratio depends, and which are no part of a device
ONE_ROUND = "one round says nothing of the noise"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A cell with a time on both devices: `ratio` is that of the head's time to the base's.

    Its 95 % interval is None where samples are missing on a side, or one round says nothing of the noise.
    """

    key: str
    base: Cell
    head: Cell
    base_ms: float
    head_ms: float
    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Ratios:
    """The cells of two runs that both have a time of, and what to know of them in sentences."""

    base: Run
    head: Run
    cells: tuple[Ratio, ...]
    notes: tuple[str, ...]

    def devices(self) -> dict[str, str]:
        """The device of each side, with the versions that its times depend on."""
        return {side: _device(run) for side, run in (("base", self.base), ("head", self.head))}

    def means(self) -> dict[str, tuple[float, int]]:
        """For each implementation the geometric mean of its ratios, and of how many cells."""
        found: dict[str, list[float]] = {}
        for cell in self.cells:
            found.setdefault(cell.base.row["impl"], []).append(math.log(cell.ratio))
        return {impl: (math.exp(sum(logs) / len(logs)), len(logs)) for impl, logs in found.items()}


def ratios(base: Run, head: Run) -> Ratios:
    """Pair the cells of two runs. Raises NotComparableError if no cell has a time in both."""
    both = [key for key, cell in base.cells.items() if cell.ok and key in head.cells and head.cells[key].ok]
    if not both:
        raise NotComparableError(
            f"{base.path} and {head.path} have no cell with a time in common; measure the same shapes, dtype and "
            "implementations, as the column repro of either says"
        )
    pairs = [(key, base.cells[key], head.cells[key]) for key in both]
    sampled = [pair for pair in pairs if pair[1].processes and pair[2].processes]
    found = {}
    for key, one, other in pairs:
        base_ms, head_ms = (float(side.row["median_ms"]) for side in (one, other))
        found[key] = Ratio(key, one, other, base_ms, head_ms, head_ms / base_ms)
    if sampled:
        compared = compare_samples([one.processes for _, one, _ in sampled], [two.processes for _, _, two in sampled])
        of_logs = compared.ratios
        for i, (key, one, other) in enumerate(sampled):
            known = bool(np.isfinite(of_logs.low[i]))
            ends = [float(np.exp(end[i])) if known else None for end in (of_logs.low, of_logs.high)]
            times = float(compared.base_ms[i]), float(compared.head_ms[i]), float(np.exp(of_logs.values[i]))
            found[key] = Ratio(key, one, other, *times, *ends)
    return Ratios(base, head, tuple(found.values()), tuple(_notes(base, head, list(found.values()))))


def report(found: Ratios, markdown: bool) -> None:
    """Print the ratios, as a table or as Markdown."""
    if markdown:
        print(markdown_text(found))
        return
    console = make_console()
    for side, device in found.devices().items():
        print_prose(console, device, f"{side}: ", "bold")
    _print_table(console, found)
    for text in (*_means_text(found), *found.notes):
        print_prose(console, text)


def markdown_text(found: Ratios) -> str:
    """The ratios as Markdown."""
    sides = [f"- {side}: {in_markdown(device)}" for side, device in found.devices().items()]
    rows = (map(in_markdown, (cell.base.name, *_fields(cell))) for cell in found.cells)
    table = markdown_table(("cell", *HEADER), rows, (False, *[True] * len(HEADER)))
    notes = [f"- {in_markdown(text)}" for text in (*_means_text(found), *found.notes)]
    return "\n".join(["## mtabench compare --across-devices", "", *sides, "", *table, "", *notes])


def _print_table(console: Console, found: Ratios) -> None:
    shared, parts, _ = told_apart([cell.base.row for cell in found.cells])
    if shared:
        print_prose(console, f"all cells: {shared}", style="bold")
    columns = [one for one in as_columns(HEADER, map(_fields, found.cells), ("none",)) if any(one.texts)]
    above, kept, _ = fitted([*parts, *columns], console.width)
    if width_of(kept) <= console.width:
        print_lines(console, lines(kept, above))
    else:
        print_columns(console, [*parts, *columns], keep=len(parts))


def _fields(cell: Ratio) -> list[str]:
    interval = "" if cell.low is None or cell.high is None else f"{_ratio(cell.low)} to {_ratio(cell.high)}"
    sides = ((cell.base_ms, cell.base), (cell.head_ms, cell.head))
    times = (mark_of(side.row) + significant(ms) for ms, side in sides)
    return [*times, _ratio(cell.ratio), interval]


def _ratio(value: float) -> str:
    return significant(value, 4, zeros=True)


def _means_text(found: Ratios) -> Iterator[str]:
    """A sentence an implementation."""
    yield "ratio: the head's time over the base's; below 1 the head's device is faster"
    for impl, (mean, count) in found.means().items():
        yield f"{impl}: {_ratio(mean)}, the geometric mean of {plural(count, 'cell')}"


def _notes(base: Run, head: Run, found: Sequence[Ratio]) -> Iterator[str]:
    """What is missing, what differs besides the device, and which cells have no ratio."""
    lacking = [run.path for run in (base, head) if not any(cell.processes for cell in run.cells.values())]
    if lacking:
        files = " and ".join(str(find_samples(path)) for path in lacking)
        yield f"no intervals, and ratios of medians: raw samples are missing, there is no file {files}"
    if not lacking and any(cell.low is None for cell in found):
        yield f"no interval: {ONE_ROUND}"
    if marked := unsettled_of([side.row for sides in _sides(found) for side in sides]):
        yield f"{UNSETTLED} {marked}"
    for column in DIFFERING:
        there, here = ({side.row[column] or "(none)" for side in sides} for sides in zip(*_sides(found), strict=True))
        if there != here:
            yield f"{column} differs, {', '.join(sorted(there))} and {', '.join(sorted(here))}: ratios depend on it"
    if base.values("device") == head.values("device"):
        yield "both are of the same device: without --across-devices, compare says what changed"
    for run, other, name in ((base, head, "base"), (head, base, "head")):
        timed = [key for key, cell in run.cells.items() if cell.ok and not (key in other.cells and other.cells[key].ok)]
        if timed:
            failed = [other.cells[key].outcome for key in timed if key in other.cells]
            why = f"; {len(failed)} of them failed there, such as {failed[0]}" if failed else ""
            yield f"{plural(len(timed), 'cell')} of {name} without a time in {other.path}{why}"


def _sides(found: Sequence[Ratio]) -> list[tuple[Cell, Cell]]:
    return [(cell.base, cell.head) for cell in found]


def _device(run: Run) -> str:
    words = [", ".join(sorted(run.values("device")))]
    words += [f"{name} {'/'.join(sorted(found))}" for name in ("torch", "triton") if (found := run.values(name) - {""})]
    return f"{', '.join(words)} ({run.path})"
