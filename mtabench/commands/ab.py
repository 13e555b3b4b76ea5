"""The command `mtabench ab`: measure two revisions in pairs of fresh processes on this machine, and compare them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console

from mtabench.commands import RESULTS_FOLDER
from mtabench.comparing.compare import LEVEL, unclear_cells
from mtabench.comparing.comparison_reports import share
from mtabench.comparing.inference import detectable
from mtabench.comparing.pairs import (
    MOST_PAIRS,
    Progress,
    check_pairs,
    measure_pairs,
    process_folder,
    sides_of,
)
from mtabench.comparing.reporting import ComparisonOptions, check_outputs, refusal_reported, report
from mtabench.comparing.rerun import LOOKS, compare_pairs, measure_again
from mtabench.comparing.revisions import Revision, find_checkout, folders_of, resolve, working_tree
from mtabench.comparing.sweep_words import SweepWords, announce
from mtabench.console import PipeTolerantWriter, make_console, say
from mtabench.errors import UsageError
from mtabench.results.outputs import check_folder
from mtabench.tables import print_prose

USUAL_NOISE = 0.005  # of a pair, as results/nvidia-h200/noise.csv has it, in three cells of four
FINE_ENOUGH = 2  # times the threshold: what pairs should find, since a change as small as it is missed half the time


def run(
    sweep: SweepWords, base: str, head: str | None, pairs: int, out: Path | None, rerun_unclear: bool,
    asked: ComparisonOptions,
) -> int:  # fmt: skip
    """Measure a sweep with the code of two revisions and report what changed; the exit code, as of `compare`.

    `head` None is the working tree. The results go to base.csv and head.csv in the new folder `out`, those of each
    process to `out`/processes. Raises UsageError before anything is touched, and MtabenchError with what ended kept.
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
    check_outputs(asked, (folder / "base.csv", folder / "head.csv"))
    check_folder(folder)
    output = PipeTolerantWriter(sys.stdout)
    console = make_console(output)
    announce(console, plan, 2 * pairs, f"{pairs} pairs of processes")
    _say_revisions(console, revisions)
    looks = LOOKS if rerun_unclear else 1
    few = few_pairs(pairs, len(plan.cases), asked.threshold, LEVEL / looks)
    if few:
        print_prose(console, few, "  ")
    if sweep.dry_run:
        print_prose(console, f"dry run: nothing was measured; the results would go to {folder}")
        return 0
    processes = process_folder(folder / "processes")
    with refusal_reported(asked), _nothing_left_of_wrong_usage(folder), folders_of(checkout, revisions) as folders:
        sides = sides_of(checkout, revisions, folders)
        with Progress(console, 2 * pairs) as progress:
            files = measure_pairs(sides, sweep.words, pairs, processes, "", progress)
        found = compare_pairs(files, folder, asked, looks)
        for rerun in range(1, looks):
            cells = unclear_cells(found)
            if cells:
                from mtabench.sweeps.settings import measuring_words

                how = measuring_words(plan.options)
                files += measure_again(sides, cells, plan.device, how, pairs, processes, rerun)
                found = compare_pairs(files, folder, asked, looks)
    code = report(found, asked)
    print_prose(console, f"results: {folder / 'base.csv'} and {folder / 'head.csv'}")
    output.report(f"the results are in {folder}")
    return code


def few_pairs(pairs: int, cells: int, threshold: float, level: float) -> str:
    """What to type instead if so many pairs find large slowdowns only, where pairs differ as usual; else empty."""
    goal = FINE_ENOUGH * threshold
    found = _found_by(pairs, cells, threshold, level)
    if found <= goal:
        return ""
    enough = next((n for n in range(pairs, MOST_PAIRS) if _found_by(n, cells, threshold, level) <= goal), MOST_PAIRS)
    return (
        f"{pairs} pairs are too few: where pairs differ by {100 * USUAL_NOISE:g} %, they find slowdowns from "
        f"{share(found)} on; type --pairs {enough}, which finds {share(goal)}"
    )


def _found_by(pairs: int, cells: int, threshold: float, level: float) -> float:
    """The smallest slowdown that so many pairs with the usual noise find in a share POWER of cases."""
    errors, freedom = np.full(cells, USUAL_NOISE / np.sqrt(pairs)), np.full(cells, pairs - 1.0)
    return float(np.expm1(detectable(errors, freedom, np.log1p(threshold), level)[0]))


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
