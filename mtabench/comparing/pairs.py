"""Measures two sides in pairs of fresh, alternating processes: A B, B A, A B, and so on.

A process measures all cells of a sweep with the code of its side, by that code's own command line, and writes a results
file. What the two sides share is the command line and the file, nothing else: the base may be older than this.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

import mtabench
from mtabench.comparing.revisions import Checkout, Revision
from mtabench.console import say
from mtabench.errors import MtabenchError, NothingTimedError, UsageError
from mtabench.escaping import printable
from mtabench.git import clean_environment, make_folder
from mtabench.implementations._user_code import is_reference
from mtabench.measuring.ceilings import FILE_NAME
from mtabench.measuring.statistics import Summary, geometric_mean, summarize
from mtabench.options import NAMES
from mtabench.problem.axes import parse_names
from mtabench.processes import ending, run_module
from mtabench.prose import plural
from mtabench.results.columns import TABLE, Merged
from mtabench.results.results_file import Key, cell_of, key_of_row, read_file, samples_path
from mtabench.results.runs import Run, process_ids, read_run, samples_of
from mtabench.results.writer import Writer
from mtabench.sweeps.cells_plan import any_plan
from mtabench.sweeps.estimate import shown
from mtabench.sweeps.plan import Options, Plan

RAN = (0, 4, 5)  # 4: a result is wrong, 5: no cell has a time; their rows say so
USAGE = 2
CRASHED = "Fatal Python error"
FEWEST_PAIRS, PAIRS, MOST_PAIRS = 2, 5, 999  # the second is the default
# What is decided for each process, not typed: the options of a sweep by name, and what they are if not typed.
DECIDED = {"out": None, "resume": False, "plot": False, "quiet": False} | dict.fromkeys(NAMES)
FEWEST = 2  # pairs without which nothing is known of the noise between them
FAILED = ("wrong", "error", "oom", "timeout", "unsupported")  # the gravest first
# How the numbers of processes become one.
COMBINED: Mapping[Merged, Callable[[list[float]], float]] = {
    "sum": sum, "geometric mean": geometric_mean, "largest": max, "median": statistics.median,
}  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    """What is measured: `name` is base or head, `folder` holds its code; its revision is None outside a checkout.

    `own` is whether that has the suite. Its processes start in `start`, in the folder itself if there is none.
    """

    name: str
    folder: Path
    revision: Revision | None = None
    own: bool = True
    start: Path | None = None

    @property
    def words(self) -> str:
        """The side for a person."""
        return f"{self.name}, {self.revision.words}" if self.revision else self.name


class StoppedError(MtabenchError):
    """Ctrl-C between or in processes: what ended is kept."""

    exit_code = 130


class Progress:
    """A line a process as it ends, and on a terminal the cell that it ended last; `total` processes."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, 0
        # Drawn when something happens and never in between: a thread that draws would disturb what is timed.
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def doing(self, text: str) -> None:
        """Show on a terminal what goes on."""
        if self._console.is_terminal:
            self._live.update(Text(printable(text), no_wrap=True), refresh=True)

    def ended(self, text: str) -> None:
        """Print that a process ended."""
        self._done += 1
        say(self._console, f"[{self._done}/{self._total}] {text}")

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()


def check_pairs(pairs: int) -> None:
    """Raise UsageError for a number of pairs that says nothing of the noise."""
    if not FEWEST_PAIRS <= pairs <= MOST_PAIRS:
        raise UsageError(
            f"--pairs is {pairs}; it must be 2 or more, since it is pairs that show the noise between them"
        )


def process_folder(folder: Path, resume: bool = False) -> Path:
    """A folder for the files of processes, with the ceilings that are kept at the usual place, if any.

    It is a new one, or with `resume` one that may be there.
    """
    try:
        make_folder(folder, exist_ok=resume)
        kept = Path(mtabench.RESULTS, FILE_NAME)
        if kept.exists():
            shutil.copy(kept, folder / FILE_NAME)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}; give another --out") from error
    return folder


def measure_pairs(
    sides: tuple[Side, Side], words: Sequence[str], count: int, folder: Path, name: str, progress: Progress
) -> list[tuple[Path, Path]]:
    """Measure `mtabench words` with both sides in so many pairs.

    The results files of each pair, base and head, in `folder`. Raises MtabenchError, with what ended kept, if a process
    does not end well or does not measure the revision that it should.
    """
    files = []
    for number in range(1, count + 1):
        pair = tuple(folder / f"{name}{side.name}-{number:02}.csv" for side in sides)
        turns = list(zip(sides, pair, strict=True))
        for side, path in turns if number % 2 else reversed(turns):
            label = f"pair {number}, {side.words}"
            try:
                measure(side, words, path, label, progress)
            except KeyboardInterrupt:
                raise StoppedError(f"stopped; the processes that ended are kept in {folder}") from None
        files.append((pair[0], pair[1]))
    return files


def measure(side: Side, words: Sequence[str], path: Path, label: str, progress: Progress) -> None:
    """Measure `mtabench words` with a side in a fresh process, which writes `path`.

    Raises MtabenchError if it does not end well or does not measure the revision that it should.
    """
    last, started = "", time.monotonic()

    def receive(line: str) -> None:
        nonlocal last
        if line.strip() and not last.startswith(CRASHED):  # a trace follows, which ends with nothing that matters
            last = line.strip()
            progress.doing(f"{label}: {last}")

    progress.doing(f"{label}: starting")
    command = [*words, "--out", str(path.absolute()), "--no-plot"]
    code = run_module("mtabench", command, side.start or side.folder, _environment(side), receive)
    message = last.removeprefix("mtabench: ") or "it said nothing"
    if code == USAGE:
        raise UsageError(f"the code of {side.words} cannot run `mtabench {' '.join(words)}`: {message}")
    if code == NothingTimedError.exit_code and not path.exists():
        raise NothingTimedError(f"the code of {side.words}: {message}")
    if code not in RAN:
        raise MtabenchError(
            f"{ending(code).replace('its process', f'a process of {side.words}')}: {message}; "
            f"what ended is kept in {path.parent}, and with --isolate a crash costs one cell"
        )
    cells = _check(side, path)
    progress.ended(f"{label}: {plural(cells, 'cell')} in {shown(time.monotonic() - started)}")


def _environment(side: Side) -> dict[str, str]:
    """The side's own code before any that is installed or was given, whose paths may be relative to this folder."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [*code_folders(side.folder, side.own), *map(os.path.abspath, given)]
    return clean_environment() | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def code_folders(root: Path, own: bool) -> tuple[Path, Path]:
    """Where the code of a checkout lies: of this project, or of another."""
    return root, root / ("kernels" if own else "src")


def _check(side: Side, path: Path) -> int:
    """How many rows the process wrote; raises MtabenchError unless this mtabench reads them, of the right code."""
    try:
        rows = read_file(path).rows()
    except UsageError as error:
        raise MtabenchError(
            f"the code of {side.words} writes results that this mtabench does not read: {error}"
        ) from error
    if side.revision:
        for row in rows:
            if not row["git_sha"] or not side.revision.sha.startswith(row["git_sha"]):
                found = row["git_sha"] or "none that it knows of"
                what = "mtabench" if side.own else "file of this name"
                raise MtabenchError(
                    f"a process of {side.words} measured another revision, {found}; "
                    f"is another {what} found before the one in its folder?"
                )
    return len(rows)


@dataclass(frozen=True, slots=True)
class SweepWords:
    """PASS and its options in words, and the options by name as the command line understood them."""

    words: tuple[str, ...]
    typed: Mapping[str, Any]

    @property
    def dry_run(self) -> bool:
        """Whether to stop at the plan."""
        return bool(self.typed["dry_run"])

    @property
    def own_code(self) -> list[str]:
        """What --impl names that is a person's own: functions in files, and what packages offer."""
        typed = self.typed.get("impl")
        return [text for text in parse_names(typed, "--impl") if is_reference(text)] if typed else []

    def check(self) -> None:
        """Raise UsageError for an option that is not typed here."""
        for name, usual in DECIDED.items():
            if self.typed.get(name, usual) != usual:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for one sweep; here each process writes a file of its own, and "
                    "no charts: leave it out"
                )

    def plan(self, checkout: Checkout | None = None) -> Plan:
        """Its cells, where a person's own file may import what its checkout has, as it will in the processes.

        Raises UsageError for what a sweep could not do or is not typed here.
        """
        self.check()
        if checkout and self.own_code:
            sys.path += map(str, code_folders(checkout.root, checkout.own))
        given = {name: value for name, value in self.typed.items() if name not in (*DECIDED, "dry_run")}
        return any_plan(Options(self.words[0], **given))


def announce(console: Console, plan: Plan, count: int, processes: str) -> None:
    """Print the plan of a sweep that so many processes run, and what these are, with a guess of the time.

    Raises NothingTimedError if none of its cells can run here.
    """
    from mtabench.sweeps.estimate import PROCESS_S
    from mtabench.sweeps.settings import make_settings
    from mtabench.sweeps.table import check_any, print_plan
    from mtabench.sweeps.this_process import ThisProcess

    here = ThisProcess(plan.options.isolate)
    against = here.against(plan.cases)
    check_any(plan.cases, against)
    seconds = here.seconds([case for case in plan.cases if case not in against], make_settings(plan))
    print_plan(console, plan, len(plan.cases), against, count * (seconds + PROCESS_S), reasons=True)
    say(console, f"  {processes}, each of which measures all cells")


@dataclass(frozen=True, slots=True)
class _Process:
    """The results file of a process: its rows as texts, and its run."""

    path: Path
    rows: Mapping[Key, Row]
    run: Run


def merge(pairs: Sequence[tuple[Path, Path]], base: Path, head: Path) -> list[str]:
    """Write the results files of pairs of processes as one at `base` and one at `head`, with their samples.

    Each cell has one row, over the samples of all its processes; its `run_id` joins theirs with plus signs, by which
    the samples, which keep theirs, are found and distinguished.

    Files that are there are replaced: they are what a call with fewer pairs wrote. A cell that failed in any process of
    a side has failed. Pairs in which a cell was `invalid` on either side are left out of it, which the sentences
    returned say, and if that leaves fewer than two the cell is `invalid`.
    """
    sides = [
        [_Process(path, {key_of_row(row): row for row in read_file(path).rows()}, read_run(path)) for path in paths]
        for paths in zip(*pairs, strict=True)
    ]
    keys = dict.fromkeys(key for side in sides for process in side for key in process.rows)
    merged: list[dict[Key, Row]] = [{}, {}]
    notes = []
    for key in keys:
        measured = [two for two in zip(*sides, strict=True) if any(key in process.rows for process in two)]
        kept = [two for two in measured if not any(one.rows.get(key, {}).get("status") == "invalid" for one in two)]
        for number, rows in enumerate(merged):
            row = _merged_row([two[number] for two in measured], [two[number] for two in kept], key)
            if row is not None:
                rows[key] = row
        if len(kept) < len(measured) and any(rows[key]["status"] == "ok" for rows in merged if key in rows):
            name = next(process.run.cells[cell_of(key)].name for process in measured[0] if key in process.rows)
            notes.append(f"{name}: invalid in {len(measured) - len(kept)} of {len(measured)} pairs, which are left out")
    for path, side, rows in zip((base, head), sides, merged, strict=True):
        for old in (path, samples_path(path)):
            old.unlink(missing_ok=True)
        with Writer(path) as writer:
            timed = {key: process_ids(row["run_id"]) for key, row in rows.items() if row["status"] == "ok"}
            parts = [
                (process.path, [row for key, row in process.rows.items() if row["run_id"] in timed.get(key, ())])
                for process in side
            ]
            writer.write(list(rows.values()), samples_of(parts))
    return notes


def _merged_row(measured: Sequence[_Process], kept: Sequence[_Process], key: Key) -> Row | None:
    """The row of a cell on one side, from the processes that measured it and those that may count."""
    rows = [process.rows[key] for process in measured if key in process.rows]
    for status in FAILED:
        if any(row["status"] == status for row in rows):
            return _in_some(status, rows)
    kept = [process for process in kept if key in process.rows]
    if len(kept) >= FEWEST:
        return _summed(kept, key)
    if any(row["status"] == "invalid" for row in rows):
        return _in_some("invalid", rows)
    # On the other side it was, in too many pairs.
    return {**rows[0], "status": "invalid", "reason": "too few pairs have a time in both"} if rows else None


def _in_some(status: str, rows: Sequence[Row]) -> Row:
    """The first row of that status, saying in how many processes it was so if not in all."""
    chosen = [row for row in rows if row["status"] == status]
    share = "" if len(chosen) == len(rows) else f"in {len(chosen)} of {len(rows)} processes: "
    return {**chosen[0], "reason": share + chosen[0]["reason"]}


def _summed(processes: Sequence[_Process], key: Key) -> Row:
    """One row for a cell with a time in several processes; its interval is by bootstrap over whole processes."""
    rows = [process.rows[key] for process in processes]
    cells = [process.run.cells[cell_of(key)] for process in processes]
    summary = summarize([[ms for samples in cell.rounds for ms in samples] for cell in cells])
    found = dict(rows[0])
    for column in TABLE:
        how = column.merged or ("median" if column.role == "measured" and column.field.numeric else "first")
        found[column.name] = _merged(column.name, how, rows, summary)
    return found


def _merged(name: str, how: Merged, rows: Sequence[Row], summary: Summary) -> Any:
    """What stands in a column of the one row that takes the place of several."""
    known = [row[name] for row in rows if row[name]]
    match how:
        case "summary":
            return getattr(summary, name)
        case "joined":
            return "+".join(row[name] for row in rows)
        case "least":
            return min(row[name] for row in rows)
        case "per time" if rows[0][name]:
            return float(rows[0][name]) * float(rows[0]["median_ms"]) / summary.median_ms
        case _ if how in COMBINED and known:
            return COMBINED[how](list(map(float, known)))
    return rows[0][name]
