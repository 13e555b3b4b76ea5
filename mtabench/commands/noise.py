"""The command `mtabench noise`: measure the same code in pairs of fresh processes, and say what that noise hides."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import mtabench
from mtabench.commands import RESULTS_FOLDER
from mtabench.comparing.compare import parse_threshold
from mtabench.comparing.inference import POWER
from mtabench.comparing.noise import Alarms, Noise, find_noise
from mtabench.comparing.pairs import PAIRS, Progress, Side, check_pairs, measure_pairs, process_folder
from mtabench.comparing.sweep_words import SweepWords, announce
from mtabench.console import PipeTolerantWriter, make_console, say
from mtabench.errors import MtabenchError, UsageError
from mtabench.measuring.settled import unsettled_of
from mtabench.results.cell_names import told_apart
from mtabench.results.outputs import check_folder, named, write_text
from mtabench.results.results_file import KEY_COLUMNS, key_of_cell
from mtabench.results.runs import Run, read_run
from mtabench.results.writer import csv_text
from mtabench.tables import as_columns, print_columns, print_prose

FACTS = ("device", "driver", "cuda", "torch", "triton", "mtabench", "git_sha", "git_dirty", "timer", "cache")
MEASURED = (
    "pairs", "median_ms", "pair_noise", "smallest_change", "ab_pairs", "threshold", "ab_false_alarms", "ab_comparisons",
    "compare_false_alarms", "compare_comparisons",
)  # fmt: skip
SHOWN = ("median\nms", "noise of\na pair", "alarms of\ncompare", "alarms\nof ab", "ab\nsees")
COLUMNS = (*KEY_COLUMNS, *MEASURED, *FACTS, "started_utc")

Row = Mapping[str, Any]


def run(sweep: SweepWords, pairs: int, threshold: str, out: Path | None, resume: bool) -> int:
    """Measure a sweep in pairs of processes of this code, print the noise a cell, and write it to `out`.

    The results of each process go to the folder NAME-processes beside it; with `resume` those that are there are kept.
    Raises UsageError before anything is touched, and MtabenchError with what ended kept.
    """
    check_pairs(pairs)
    share = parse_threshold(threshold)
    plan = sweep.plan()
    path = out or Path(RESULTS_FOLDER, f"noise-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.csv")
    processes = path.parent / f"{path.stem}-processes"
    if resume and out is None:
        raise UsageError("--resume goes on with a measurement that has a name: give its --out")
    # A file that an earlier run ended with is made anew of the processes kept beside it.
    begins = csv_text([COLUMNS]).encode()
    if path.exists() and not (resume and path.is_file() and path.read_bytes().startswith(begins)):
        raise UsageError(f"{path} already exists; give another --out" + "; it is no file of noise" * resume)
    if processes.exists() and not resume:
        raise UsageError(f"{processes} already exists; give another --out, or --resume to go on with it")
    check_folder(path)
    output = PipeTolerantWriter(sys.stdout)
    console = make_console(output)
    announce(console, plan, 2 * pairs, f"{pairs} pairs of processes")
    if sweep.dry_run:
        print_prose(console, f"dry run: nothing was measured; the results would go to {named(path)}")
        return 0
    process_folder(processes, resume)
    code = Path(mtabench.__file__).parents[1]
    with Progress(console, 2 * pairs) as progress:
        start = Path.cwd() if sweep.own_code else None  # as a person's paths do
        sides = Side("base", code, start=start), Side("head", code, start=start)
        cells = len(plan.cases) if resume else None
        files = measure_pairs(sides, sweep.words, range(1, pairs + 1), processes, "", progress, cells)
    runs = [[read_run(paths[side]) for paths in files] for side in range(2)]
    _check_same_code(runs, processes)
    keys, missing = _timed_in_all(runs)
    if not keys:
        raise MtabenchError(f"no cell has a time in every process; their results are in {processes}")
    base, head = ([[run.cells[key].rounds for run in side] for key in keys] for side in runs)
    found = find_noise(base, head, PAIRS, share)
    rows = [_row(runs, key, found, i, pairs, share) for i, key in enumerate(keys)]
    try:
        write_text(path, csv_text([COLUMNS, *([row[name] for name in COLUMNS] for row in rows)]))
    except UsageError as error:
        raise MtabenchError(f"{error}; the processes' results are kept") from error
    _print(console, runs, keys, rows)
    timed = [run.cells[key].row for side in runs for run in side for key in keys]
    marked = unsettled_of(timed)  # then the noise is not that of a quiet machine
    for text in (*missing, *([marked] if marked else []), *_sentences(found, pairs, share)):
        print_prose(console, text)
    say(console, f"results: {named(path)}")
    output.report(f"the results are in {path}")
    return 0


def _check_same_code(runs: Sequence[Sequence[Run]], folder: Path) -> None:
    """Raise MtabenchError if processes measured different code, or on different machines: that is no noise."""
    for name in FACTS:
        found = sorted({str(cell.row[name]) for side in runs for run in side for cell in run.cells.values()})
        if len(found) > 1 and name not in ("timer", "cache"):
            raise MtabenchError(f"processes in {folder} differ in {name}: {', '.join(found)}; start with another --out")


def _timed_in_all(runs: Sequence[Sequence[Run]]) -> tuple[list[str], list[str]]:
    """The cells with a time in every process, and a sentence for each of the others."""
    every = [run for side in runs for run in side]
    names = {key: cell.name for run in every for key, cell in run.cells.items()}
    keys = [key for key in names if all(key in run.cells and run.cells[key].ok for run in every)]
    sentences = []
    for key in names.keys() - set(keys):
        outcome = next(
            (run.cells[key].outcome for run in every if key in run.cells and not run.cells[key].ok), "missing"
        )
        sentences.append(f"{names[key]}: not every process has a time ({outcome})")
    return keys, sorted(sentences)


def _row(
    runs: Sequence[Sequence[Run]], key: str, found: Noise, number: int, pairs: int, threshold: float
) -> dict[str, Any]:
    first: Mapping[str, Any] = runs[0][0].cells[key].row
    medians = sorted(float(run.cells[key].row["median_ms"]) for side in runs for run in side)
    return {
        **dict(zip(KEY_COLUMNS, key_of_cell(key), strict=True)),
        **{name: first[name] for name in (*FACTS, "started_utc")},
        "pairs": pairs,
        "median_ms": (medians[pairs - 1] + medians[pairs]) / 2,
        "pair_noise": float(found.pair_noise[number]),
        "smallest_change": float(found.smallest_change[number]),
        "ab_pairs": min(PAIRS, pairs),
        "threshold": threshold,
        "ab_false_alarms": found.paired.cells[number],
        "ab_comparisons": found.paired.comparisons,
        "compare_false_alarms": found.single.cells[number],
        "compare_comparisons": found.single.comparisons,
    }


def _print(console: Console, runs: Sequence[Sequence[Run]], keys: Sequence[str], rows: Sequence[Row]) -> None:
    """A line a cell, and once above what all cells share."""
    shared, parts, _ = told_apart([runs[0][0].cells[key].row for key in keys])
    if shared:
        print_prose(console, f"all cells: {shared}", style="bold")
    print_columns(console, [*parts, *as_columns(SHOWN, map(_texts, rows), ("none",))], keep=len(parts))


def _texts(row: Row) -> list[str]:
    """The texts under SHOWN."""
    shares = (row[f"{kind}_false_alarms"] / row[f"{kind}_comparisons"] for kind in ("compare", "ab"))
    return [f"{row['median_ms']:.4g}", *map(_percent, (row["pair_noise"], *shares, row["smallest_change"]))]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < 10 else "over 1000 %"


def _sentences(found: Noise, pairs: int, threshold: float) -> list[str]:
    """What the columns of the table mean, with the shares of comparisons in which any cell was slower."""

    def share(alarms: Alarms) -> str:
        return f"{alarms.any} of {alarms.comparisons} ({100 * alarms.any / alarms.comparisons:.1f} %)"

    count = min(PAIRS, pairs)
    return [
        f"false alarms are cells of the same code called slower, beyond a threshold of {100 * threshold:g} %",
        f"compare, one process against another in all pairings: {share(found.single)} had any",
        f"ab, {count} of {pairs} pairs with either process of each as the base: {share(found.paired)} had any",
        f"ab sees: the smallest slowdown that {count} pairs find in {100 * POWER:g} % of comparisons of these cells",
    ]
