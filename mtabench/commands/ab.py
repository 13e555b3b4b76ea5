"""The command `mtabench ab`: measure two revisions in pairs of fresh processes on this machine, and compare them."""

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from mtabench.commands import RESULTS_FOLDER
from mtabench.comparing.compare import ComparedCell, Comparison, compare, unclear_cells
from mtabench.comparing.pairs import (
    Progress,
    Side,
    SweepWords,
    announce,
    check_pairs,
    measure_pairs,
    merge,
    process_folder,
)
from mtabench.comparing.reporting import ComparisonOptions, check_outputs, refusal_reported, report
from mtabench.comparing.revisions import Revision, find_checkout, folders_of, resolve, working_tree
from mtabench.console import PipeTolerantWriter, make_console, say
from mtabench.errors import UsageError
from mtabench.problem.case import Case
from mtabench.prose import plural
from mtabench.registry import typed_as
from mtabench.results.outputs import check_folder
from mtabench.results.runs import read_run
from mtabench.tables import print_prose

MOST_RERUNS = 2
LOOKS = 1 + MOST_RERUNS

Pairs = list[tuple[Path, Path]]


def run(
    sweep: SweepWords, base: str, head: str | None, pairs: int, out: Path | None, rerun_unclear: bool,
    options: ComparisonOptions,
) -> int:  # fmt: skip
    """Measure a sweep with the code of two revisions and report what changed; the exit code, as of `compare`.

    `head` None is the working tree. The results go to base.csv and head.csv in the new folder `out`, each process's
    to `out`/processes. Raises UsageError before anything is touched, and MtabenchError with what ended kept.
    """
    check_pairs(pairs)
    checkout = find_checkout(sweep.own_code)
    revisions = {"base": resolve(checkout.root, base, "--base")}
    revisions["head"] = resolve(checkout.root, head, "--head") if head is not None else working_tree(checkout)
    plan = sweep.plan(checkout)
    folder = out or Path(RESULTS_FOLDER, f"ab-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    if folder.suffix == ".csv":
        raise UsageError(f"ab writes a folder with base.csv and head.csv in it; give --out {folder.with_suffix('')}")
    if folder.exists():
        raise UsageError(f"{folder} already exists; give another --out")
    check_outputs(options, (folder / "base.csv", folder / "head.csv"))
    check_folder(folder)
    output = PipeTolerantWriter(sys.stdout)
    console = make_console(output)
    announce(console, plan, 2 * pairs, f"{pairs} pairs of processes")
    _say_revisions(console, revisions)
    looks = LOOKS if rerun_unclear else 1
    if sweep.dry_run:
        print_prose(console, f"dry run: nothing was measured; the results would go to {folder}")
        return 0
    processes = process_folder(folder / "processes")
    with refusal_reported(options), _nothing_left_of_wrong_usage(folder), folders_of(checkout, revisions) as folders:
        both = [
            Side(name, folders[name], revision, checkout.own, folders[name] / checkout.start)
            for name, revision in revisions.items()
        ]
        sides = both[0], both[1]
        with Progress(console, 2 * pairs) as progress:
            files = measure_pairs(sides, sweep.words, pairs, processes, "", progress)
        found = _compared(files, folder, options, looks)
        for rerun in range(1, looks):
            cells = unclear_cells(found)
            if cells:
                from mtabench.sweeps.settings import measuring_words

                say(
                    console,
                    f"measuring {plural(len(cells), 'unclear cell')} again, {rerun} of at most {MOST_RERUNS} times",
                )
                words = [_repro(cell, plan.device, measuring_words(plan.options)) for cell in cells]
                with Progress(console, 2 * pairs * len(cells)) as progress:
                    for number, one in enumerate(words, start=1):
                        files += measure_pairs(sides, one, pairs, processes, f"rerun{rerun}-cell{number}-", progress)
                found = _compared(files, folder, options, looks)
    code = report(found, options)
    print_prose(console, f"results: {folder / 'base.csv'} and {folder / 'head.csv'}")
    output.report(f"the results are in {folder}")
    return code


def _repro(cell: ComparedCell, device: str, how: Sequence[str]) -> list[str]:
    """What measures a cell again on "cuda" or "cpu", with the options `how`."""
    case = Case.of_row(cell.sides[-1].row, device)
    return [*shlex.split(case.repro(typed_as(case.impl)))[1:], *how]


def _compared(files: Pairs, folder: Path, options: ComparisonOptions, looks: int) -> Comparison:
    """Put what the processes measured together in `folder`, and compare it."""
    paths = folder / "base.csv", folder / "head.csv"
    notes = merge(files, *paths)
    base, head = map(read_run, paths)
    found = compare(base, head, options.threshold, options.fail_on, looks)
    return replace(found, notes=(*found.notes, *notes))


@contextmanager
def _nothing_left_of_wrong_usage(folder: Path) -> Iterator[None]:
    """Options that only the code of a revision could refuse leave no folder, unless something was measured."""
    try:
        yield
    except UsageError:
        if not any(folder.rglob("*.csv")):
            shutil.rmtree(folder)
        raise


def _say_revisions(console: Console, revisions: Mapping[str, Revision]) -> None:
    for name, revision in revisions.items():
        say(console, f"  {name}: {revision.words}{', measured as it is' if revision.dirty else ''}")
    base, head = revisions.values()
    if base.sha == head.sha and not head.dirty:
        say(console, "  base and head are the same code: what is found is noise")
