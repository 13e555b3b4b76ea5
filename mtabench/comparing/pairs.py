"""Measure two sides in pairs of fresh processes that take turns: A B, B A, A B, and so on.

A process measures all cells of a sweep with the code of its side, by that code's own command line, and writes a results
file. What the two sides share is the command line and the file, nothing else: the base may be older than this.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

import mtabench
from mtabench.comparing.revisions import Revision
from mtabench.console import say
from mtabench.errors import MtabenchError, NothingTimedError, UsageError
from mtabench.escaping import printable
from mtabench.git import clean_environment, make_folder
from mtabench.measuring.kept_ceilings import FILE_NAME
from mtabench.processes import ending, run_module
from mtabench.prose import plural
from mtabench.results.results_file import read_file
from mtabench.sweeps.estimate import shown

RAN = (0, 4, 5)  # 4: a result is wrong, 5: no cell has a time; their rows say so
USAGE = 2
CRASHED = "Fatal Python error"
FEWEST_PAIRS, PAIRS, MOST_PAIRS = 2, 5, 999  # the second is the default


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
    said = last.removeprefix("mtabench: ") or "it said nothing"
    if code == USAGE:
        raise UsageError(f"the code of {side.words} cannot run `mtabench {' '.join(words)}`: {said}")
    if code == NothingTimedError.exit_code and not path.exists():
        raise NothingTimedError(f"the code of {side.words}: {said}")
    if code not in RAN:
        raise MtabenchError(
            f"{ending(code).replace('its process', f'a process of {side.words}')}: {said}; "
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
