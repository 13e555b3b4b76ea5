"""The commands `mtabench fwd`, `bwd`, `decode` and `model`: plan a sweep, run it, print the table, draw the charts."""

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from mtabench.commands import RESULTS_FOLDER, WRONG_RESULT
from mtabench.commands.show import print_rows
from mtabench.console import PipeTolerantWriter, make_console, say, warnings_at_end
from mtabench.errors import MtabenchError, NothingTimedError, UsageError
from mtabench.options import ClusterOptions, Options, SweepOutput
from mtabench.results.outputs import named
from mtabench.results.results_file import charts_folder, key_of, key_of_row
from mtabench.results.runs import without_samples
from mtabench.results.writer import Writer, check_destination
from mtabench.sweeps.cells_plan import any_plan
from mtabench.sweeps.plan import Plan
from mtabench.sweeps.this_process import ThisProcess
from mtabench.tables import print_prose


def run(options: Options, cluster: ClusterOptions, output: SweepOutput) -> int:
    """Plan and run a sweep; WRONG_RESULT if any of its cells is wrong.

    Raises NothingTimedError if none is wrong and none has a time.
    """
    dry_run = output.dry_run
    if output.resume and output.out is None:
        raise UsageError("--resume needs --out FILE, the results file to complete")
    plan = any_plan(options, cluster.device(options))
    path = output.out or RESULTS_FOLDER / f"{options.pass_}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.csv"
    found = check_destination(path, output.resume)
    bare = {key_of_row(row) for row in without_samples(path, found)}  # they cannot be compared
    already = {key: row for row in found if (key := key_of_row(row)) not in bare}
    with _measuring(cluster, plan, dry_run) as team:
        from mtabench.measuring.ceilings import FILE_NAME, check_ceilings
        from mtabench.sweeps.settings import make_settings
        from mtabench.sweeps.sweep import check_same_device, shapes
        from mtabench.sweeps.table import (
            Watcher,
            check_any,
            print_plan,
            roof_lines,
            settled_lines,
        )

        check_ceilings(path.with_name(FILE_NAME))
        stdout = PipeTolerantWriter(sys.stdout)
        console = make_console(stdout, output.quiet and not dry_run)
        settings = make_settings(plan)
        again = len(bare & {key_of(case) for case in plan.cases})
        are, their = ("is", "its") if again == 1 else ("are", "their")
        note = [f"{again} of these cells {are} measured again: {their} samples are missing"] if again else []
        plan = replace(plan, notes=(*team.meet(), *plan.notes, *note))
        check_same_device(plan, path, already.values(), team.device_name)
        pending = [case for case in plan.cases if key_of(case) not in already]
        against = team.against(pending)
        runnable = [case for case in pending if case not in against]
        print_plan(
            console,
            plan,
            len(pending),
            against,
            team.seconds(runnable, settings),
            dry_run and len(against) < len(plan.cases),
        )
        check_any(plan.cases, against)
        if dry_run:
            print_prose(console, f"dry run: nothing was measured; the results would go to {named(path)}")
            return 0
        with Writer(path, resume=output.resume, command=shlex.join(["mtabench", *sys.argv[1:]]), again=bare) as writer:
            before = [writer.done[key] for key in map(key_of, plan.cases) if key in writer.done]
            guesses = {
                key_of(case): team.seconds(group, settings) / len(group) for group in shapes(runnable) for case in group
            }
            with warnings_at_end(), Watcher(console, len(plan.cases), before, guesses) as shown:
                team.run(plan, writer, settings, shown)
    if shown.rows:
        print_rows(console, plan.pass_, shown.rows)
    unsettled = settled_lines(shown.rows, settings.max_rounds, settings.time_limit_s)
    for text in (*unsettled, *roof_lines(shown.rows)):
        print_prose(console, text)
    say(console, f"results: {named(path)}")
    if output.quiet:
        print(path, file=stdout)
    stdout.report(f"the results are in {path}")
    any_wrong = any(row["status"] == "wrong" for row in shown.rows)
    if not any_wrong:
        _check_times(shown.rows, path)
    if output.plot:
        _draw_at_end(console, path)
    return WRONG_RESULT * any_wrong


def _measuring(cluster: ClusterOptions, plan: Plan, dry_run: bool) -> AbstractContextManager[ThisProcess]:
    """What measures the plan: this process, or the workers that the options name."""
    if not cluster.anything:
        return nullcontext(ThisProcess(plan.options.isolate))
    from mtabench.cluster.team import gathered

    return gathered(cluster, plan.device, dry_run)


def _draw_at_end(console: Console, path: Path) -> None:
    """Draw the charts of a sweep that just ended; a failure to draw is reported, and spoils nothing."""
    from mtabench.charts import draw

    try:
        for chart in draw([path], charts_folder(path)):
            say(console, f"chart: {chart}")
    except Exception as error:
        kind = "" if isinstance(error, MtabenchError) else f"{type(error).__name__}: "
        say(console, f"no charts: {kind}{' '.join(str(error).split())}")


def _check_times(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raise NothingTimedError, with what happened most often, if no row has a time."""
    from mtabench.results.rows import WITH_TIME

    if any(row["status"] in WITH_TIME for row in rows):
        return
    for (status, reason), count in Counter((row["status"], row["reason"]) for row in rows).most_common(1):
        raise NothingTimedError(
            f"no cell has a time: {status}, {reason} ({count} of {len(rows)} cells); their rows are in {path}"
        )
