"""Measure unclear cells again, in pairs of fresh processes of both revisions, each cell by its own command line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import mtabench
from mtabench.comparing.compare import ComparedCell, Comparison, compare, decided_again, unclear_cells
from mtabench.comparing.pairs import PAIRS, Progress, Side, measure_pairs, process_folder, sides_of
from mtabench.comparing.reporting import ComparisonOptions
from mtabench.comparing.revisions import Revision, find_checkout, folders_of, resolve
from mtabench.console import make_console, say
from mtabench.errors import UsageError
from mtabench.problem.case import Case
from mtabench.prose import plural
from mtabench.registry import typed_as
from mtabench.results.merging import merge
from mtabench.results.runs import Run, read_run

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


def compare_again(base: Run, head: Run, asked: ComparisonOptions) -> Comparison:
    """Compare two runs, then measure on this machine, with worktrees of both revisions, what is unclear.

    The cells measured again are judged by that alone. Raises UsageError where it cannot be the same code on the same
    device.
    """
    found = compare(base, head, asked.threshold, asked.fail_on, LOOKS)
    if not unclear_cells(found):
        return found
    checkout = find_checkout()
    revisions = {name: _revision(checkout.root, run) for name, run in (("base", base), ("head", head))}
    device = _device_here(head)
    folder = process_folder(Path(mtabench.RESULTS, f"rerun-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"))
    with folders_of(checkout, revisions) as folders:
        sides = sides_of(checkout, revisions, folders)
        files: Pairs = []
        for rerun in range(1, LOOKS):
            cells = unclear_cells(found)
            if cells:
                # As they were measured.
                row = next(side.row for side in reversed(cells[0].sides) if side.row["timer"])
                how = ["--timer", row["timer"], "--cache", row["cache"]]
                files += measure_again(sides, cells, device, how, PAIRS, folder, rerun)
                found = decided_again(found, compare_pairs(files, folder, asked, LOOKS))
    say(make_console(), f"what was measured again is in {folder}")
    return found


def compare_pairs(files: Pairs, folder: Path, asked: ComparisonOptions, looks: int) -> Comparison:
    """Put what the processes measured together in `folder`, and compare it."""
    paths = folder / "base.csv", folder / "head.csv"
    notes = merge(files, *paths)
    base, head = map(read_run, paths)
    found = compare(base, head, asked.threshold, asked.fail_on, looks)
    return replace(found, notes=(*found.notes, *notes))


def _revision(root: Path, run: Run) -> Revision:
    """The one clean commit that a run was measured at; raises UsageError."""
    shas = run.values("git_sha")
    if len(shas) > 1 or "" in shas:
        raise UsageError(
            f"{run.path} cannot be measured again: its rows are of {len(shas) if shas != {''} else 'no known'} "
            "revisions, and one commit is expected; measure both with `mtabench ab --base REV`"
        )
    if run.values("git_dirty") != {"false"}:
        raise UsageError(
            f"{run.path} cannot be measured again: it was measured with uncommitted changes, which are not known; "
            "commit them, and measure both with `mtabench ab --base REV`"
        )
    (sha,) = shas
    return resolve(root, sha, f"the revision of {run.path},")


def _device_here(run: Run) -> str:
    """ "cuda" or "cpu", whichever is the device of the run on this machine; raises UsageError if neither is."""
    import torch

    from mtabench.environment import describe

    measured = run.values("device")
    here = {describe(name)["device"]: name for name in (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])}
    if not measured <= set(here):
        raise UsageError(
            f"{run.path} cannot be measured again here: it was measured on {', '.join(sorted(measured))}, "
            f"and this machine has {', '.join(here)}"
        )
    return here[measured.pop()]
