"""The command `mtabench history`: measure past commits in worktrees, so that a dashboard begins with a past."""

import hashlib
import random
import shlex
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mtabench.comparing.pairs import Progress, Side, StoppedError, SweepWords, announce, measure, process_folder
from mtabench.comparing.revisions import SHORT, Checkout, Revision, find_checkout, folders_of, past
from mtabench.console import PipeTolerantWriter, make_console, say
from mtabench.errors import MtabenchError, NothingTimedError, UsageError
from mtabench.prose import plural
from mtabench.results.outputs import check_folder
from mtabench.results.results_file import read_file, samples_path
from mtabench.tables import print_prose

PARTS = ".processes"  # of `out`: a dashboard does not look there


def run(sweep: SweepWords, commits: str, most: int | None, out: Path) -> int:
    """Measure a sweep with the code of past commits: of each a results file in `out`, dated as the commit.

    A commit that has its file is not measured again, so the same command goes on after an interruption. One that cannot
    be measured is named and left out. The order is random, since a machine that drifts would look like a slowdown.
    Raises UsageError before anything is touched, and NothingTimedError if no commit has a file at the end.
    """
    if most is not None and most < 1:
        raise UsageError(f"--most is {most}; expected a number of commits, 1 or more")
    checkout = find_checkout(sweep.own_code)
    dated = _spread(_ordered(past(checkout.root, commits)), most)
    plan = sweep.plan(checkout)
    check_folder(out / PARTS)
    output = PipeTolerantWriter(sys.stdout)
    console = make_console(output)
    kind = f"{plan.options.pass_}-{hashlib.sha256(shlex.join(sweep.words).encode()).hexdigest()[:8]}"
    files = {revision: out / f"{kind}-{revision.sha[:SHORT]}.csv" for revision, _ in dated}
    pending = [(revision, time) for revision, time in dated if not files[revision].exists()]
    announce(console, plan, len(pending), f"{plural(len(dated), 'commit')}, {len(dated) - len(pending)} of them kept")
    if sweep.dry_run:
        print_prose(console, f"dry run: nothing was measured; the results would go to {out}")
        return 0
    parts = process_folder(out / PARTS, resume=True)
    random.Random(0).shuffle(pending)
    with Progress(console, len(pending)) as progress:
        for revision, time in pending:
            try:
                part = _measured(checkout, revision, sweep.words, parts / files[revision].name, progress)
            except KeyboardInterrupt:
                raise StoppedError(f"stopped; {out} has the commits that ended, and the same command goes on") from None
            except MtabenchError as error:
                progress.ended(f"left out: {error}")
                continue
            _move(part, files[revision], time)
    if not any(parts.glob("*.csv")):  # of a process that failed
        shutil.rmtree(parts)
    there = sum(path.exists() for path in files.values())
    if not there:
        raise NothingTimedError(f"none of the {plural(len(dated), 'commit')} could be measured; see above")
    say(console, f"results of {there} of {plural(len(dated), 'commit')}: {out}")
    say(console, f"next: mtabench dashboard {out} -o site")
    output.report(f"the results are in {out}")
    return 0


def _ordered(commits: Sequence[tuple[Revision, datetime]]) -> list[tuple[Revision, datetime]]:
    """The commits, the oldest first, each dated before the next and before now: clocks differ, and rebases tie."""
    latest, found = datetime.now(UTC), []
    for revision, time in commits:
        latest = min(time, latest - timedelta(seconds=1))
        found.append((revision, latest))
    return found[::-1]


def _spread(commits: list[tuple[Revision, datetime]], most: int | None) -> list[tuple[Revision, datetime]]:
    """At most so many of them at equal distances, the newest among them."""
    count = min(most or len(commits), len(commits))
    return [commits[(number + 1) * len(commits) // count - 1] for number in range(count)]


def _measured(checkout: Checkout, revision: Revision, words: Sequence[str], part: Path, progress: Progress) -> Path:
    """The file that a process with the code of a commit wrote; what an earlier one left there is removed."""
    for left in (part, samples_path(part)):
        left.unlink(missing_ok=True)
    with folders_of(checkout, {"commit": revision}) as folders:
        folder = folders["commit"]
        side = Side("commit", folder, revision, checkout.own, folder / checkout.start)
        measure(side, words, part, side.words, progress)
    return part


def _move(part: Path, path: Path, time: datetime) -> None:
    """Put a results file and its samples where they belong, with the time of the commit in `started_utc`."""
    text = part.read_text()
    for started in set(read_file(part).columns["started_utc"]):
        text = text.replace(f",{started},", f",{time:%Y-%m-%dT%H:%M:%SZ},")
    part.write_text(text)
    if samples_path(part).exists():
        samples_path(part).replace(samples_path(path))
    part.replace(path)
