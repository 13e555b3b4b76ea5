"""Measure unclear cells again, in pairs of fresh processes of both revisions, each cell by its own command line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mtabench.comparing.compare import ComparedCell, Comparison, compare
from mtabench.comparing.pairs import Progress, Side, measure_pairs
from mtabench.comparing.reporting import ComparisonOptions
from mtabench.console import make_console, say
from mtabench.problem.case import Case
from mtabench.prose import plural
from mtabench.registry import typed_as
from mtabench.results.merging import merge
from mtabench.results.runs import read_run

MOST_RERUNS = 2
LOOKS = 1 + MOST_RERUNS

Pairs = list[tuple[Path, Path]]


def measure_again(
    sides: tuple[Side, Side],
    cells: Sequence[ComparedCell],
    device: str,
    how: Sequence[str],
    pairs: int,
    folder: Path,
    rerun: int,
) -> Pairs:
    """Measure the cells on "cuda" or "cpu", options `how` added, in so many more pairs each; their results files."""
    console = make_console()
    say(console, f"measuring {plural(len(cells), 'unclear cell')} again, {rerun} of at most {MOST_RERUNS} times")
    files: Pairs = []
    with Progress(console, 2 * pairs * len(cells)) as progress:
        for number, cell in enumerate(cells, start=1):
            case = Case.of_row(cell.sides[-1].row, device)
            words = [*shlex.split(case.repro(typed_as(case.impl)))[1:], *how]
            name = f"rerun{rerun}-cell{number}-"
            files += measure_pairs(sides, words, pairs, folder, name, progress)
    return files


def compare_pairs(files: Pairs, folder: Path, asked: ComparisonOptions, looks: int) -> Comparison:
    """Put what the processes measured together in `folder`, and compare it."""
    paths = folder / "base.csv", folder / "head.csv"
    notes = merge(files, *paths)
    base, head = map(read_run, paths)
    found = compare(base, head, asked.threshold, asked.fail_on, looks)
    return replace(found, notes=(*found.notes, *notes))
