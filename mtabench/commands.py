"""What each command does, once its options are parsed: calls the parts in turn and prints what they give."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mtabench.cluster.asked import NAMES, Asked
from mtabench.errors import MtabenchError, NothingCheckedError, NothingTimedError, UsageError
from mtabench.files.results import key_of, key_of_row, read_file, say_if_torn, text_of
from mtabench.files.writer import Writer, check_destination, to_resume
from mtabench.measuring.stopwatch import CHARTS, START, Stopwatch
from mtabench.ranks.asked import follow_torchrun, plan_over_ranks
from mtabench.ranks.lines import rank_lines
from mtabench.registry import GROUPS, chosen, find, names
from mtabench.sweeps import axes
from mtabench.sweeps.case import DTYPES, PASSES, Case
from mtabench.sweeps.plan import Options, Plan, check_seed, make_plan

CHECK_LINE = "{:<17} {:<24} {:<32} {:>8} {:>8}  {}"
RESULTS_FOLDER = Path("mtabench-results")


def sweep(pass_: str, typed: dict[str, Any], command_line: str) -> bool:
    """Plan and run a sweep; whether any of its cells is wrong. `typed` holds the options by name.

    Raises NothingTimedError if none is wrong and none has a time.
    """
    spent = Stopwatch()
    out, resume, dry_run, plot_at_end = (typed.pop(name) for name in ("out", "resume", "dry_run", "plot"))
    if resume and out is None:
        raise UsageError("--resume needs --out FILE, the results file to complete")
    asked, ranks = Asked(**{name: typed.pop(name) for name in NAMES}), typed.pop("ranks", None)
    options = Options(pass_, **typed)
    if ranks is None:
        plan = make_plan(options, asked.device(options))
    else:
        plan = plan_over_ranks(options, ranks, asked)
        if follow_torchrun(ranks, plan.device):
            return False
    path = out or RESULTS_FOLDER / f"{pass_}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.csv"
    already = {key_of_row(row): row for row in check_destination(path, resume)}
    with _measuring(asked, ranks, plan, dry_run) as team:
        # By now the workers, if there are any, import torch; this process does as well.
        from mtabench.files.table import auto_lines, make_console, print_plan, results_table, settled_lines
        from mtabench.measuring.kept_ceilings import FILE_NAME, check_ceilings
        from mtabench.sweeps.settings import make_settings
        from mtabench.sweeps.sweep import check_same_device

        check_ceilings(path.with_name(FILE_NAME))
        console = make_console()
        settings = make_settings(plan)
        plan = replace(plan, notes=(*team.meet(), *plan.notes))
        check_same_device(plan, path, already.values(), team.device_name)
        pending = [case for case in plan.cases if key_of(case) not in already]
        runnable = team.runnable(pending)
        print_plan(console, plan, len(pending), len(runnable), team.seconds(runnable, settings))
        if dry_run:
            _say(console, f"dry run: nothing was measured; the results would go to {path}")
            return False
        with Writer(path, resume=resume, command=command_line) as writer:
            before = [writer.done[key] for key in map(key_of, plan.cases) if key in writer.done]
            with team.watcher(console, len(plan.cases), before) as shown:
                spent.since_start(START)
                team.run(plan, writer, settings, shown, spent)
    console.print(results_table(shown.rows, console.width))
    unsettled = settled_lines(shown.rows, settings.max_rounds, settings.time_limit_s)
    for text in (*auto_lines(shown.rows), *rank_lines(shown.rows), *unsettled):
        _say(console, text)
    _say(console, f"results: {path}")
    any_wrong = any(row["status"] == "wrong" for row in shown.rows)
    if not any_wrong:
        _check_times(shown.rows, path)
    if plot_at_end:
        with spent.on(CHARTS):
            _draw_at_end(console, path)
    _say(console, spent.line())
    _say(console, f"next: mtabench plot {shlex.quote(str(path))}, or {to_resume(path)} and more on its axes")
    return any_wrong


def _measuring(asked: Asked, ranks: int | None, plan: Plan, dry_run: bool) -> AbstractContextManager[Any]:
    """What measures the plan: this process, with the ranks or by the workers that were asked for."""
    if ranks is not None:
        from mtabench.ranks.team import RankTeam

        return nullcontext(RankTeam(plan, ranks))
    if not asked.anything:
        from mtabench.sweeps.here import Here

        return nullcontext(Here(plan.options.isolate))
    from mtabench.cluster.team import gathered

    return gathered(asked, plan.device, dry_run)


def verify(impl: str | None, device: str, seed: int | None) -> bool:
    """Check implementations and print a line a check, as it ends; whether any result is wrong."""
    seed = check_seed(seed)
    wanted = names() if impl is None else [one.name for one in chosen(axes.parse_names(impl, "--impl"))]
    from mtabench.environment import resolve_device
    from mtabench.sweeps.verify import run_checks

    console, where = Console(), resolve_device(device)
    wrong = total = 0
    _say(console, CHECK_LINE.format("name", "check", "shape", "error", "allowed", "result"))
    for row in run_checks(wanted, where, seed):
        if not row.shape:
            _say(console, f"{row.implementation:<17} not checked: {row.reason}")
            continue
        total += 1
        wrong += not row.ok
        error, allowed = ("" if x is None else f"{x:.2g}" for x in (row.rel_error, row.tolerance))
        result = row.reason or "ok" if row.ok else f"wrong: {row.reason}"
        text = CHECK_LINE.format(row.implementation, row.check, row.shape, error, allowed, result)
        console.print(Text(text, style="" if row.ok else "bold red"), soft_wrap=True)
    if not total:
        raise NothingCheckedError("nothing was checked: no implementation that was asked for can run here")
    said = f"{wrong} of {total} checks failed" if wrong else f"all {total} checks passed"
    _say(console, f"{said}; --seed {seed} draws the same inputs again")
    return wrong > 0


def list_implementations(device: str) -> None:
    """Print every implementation, what it does and whether it is ready on this machine, and the groups of them."""
    from mtabench.environment import resolve_device
    from mtabench.measuring.readiness import unsupported_reason

    device = resolve_device(device)
    console = Console()
    width = max(map(len, names())) + 1
    for implementation in map(find, names()):
        reason = unsupported_reason(_typical_case(implementation.name, device))
        state = Text(f"not ready on this machine ({device}): {reason}" if reason else "ready")
        state.stylize("yellow" if reason else "green")
        console.print(Text(f"{implementation.name:<{width}}").append_text(state), soft_wrap=True)
        _say(console, f"{'':<{width}}{implementation.op}: {', '.join(implementation.passes)}; {implementation.summary}")
        if implementation.note:
            _say(console, f"{'':<{width}}note: {implementation.note}")
    for group, members in GROUPS.items():
        _say(console, f"{group:<{width}}--impl {group} stands for {', '.join(members)}")


def show_environment(device: str, measure: bool, out: Path | None) -> None:
    """Print where this runs and the ceilings kept for it in `out`; with `measure` they are measured anew."""
    from mtabench.environment import describe, resolve_device
    from mtabench.measuring.ceilings import measure_ceilings
    from mtabench.measuring.kept_ceilings import FILE_NAME, check_ceilings, keep_ceilings, read_ceilings
    from mtabench.sweeps.tune import effect_lines

    console = Console()
    device = resolve_device(device)
    path = out or RESULTS_FOLDER / FILE_NAME
    check_ceilings(path)
    environment = describe(device)
    for name, value in environment.items():
        _say(console, f"{name:<10} {'-' if value in ('', None) else text_of(value)}")
    for text in effect_lines(device):
        _say(console, f"{'tuned':<10} {text}")
    if measure:
        keep_ceilings(path, environment, {dtype: measure_ceilings(device, dtype) for dtype in DTYPES})
    for dtype, ceilings in read_ceilings(path, environment).items():
        copy, matmul = f"{ceilings.copy_gbytes_s:.4g} GB/s copy", f"{ceilings.matmul_tflops:.4g} TFLOP/s matmul"
        reads = ceilings.read_gbytes_s
        read = f"{reads:.4g} GB/s read" if reads else "reading not measured yet (--measure does)"
        _say(console, f"{'ceilings':<10} {dtype}: {copy}, {read}, {matmul} ({path})")


def plot(csv_paths: Sequence[Path], kinds: str | None, themes: str, formats: str, out: Path | None) -> None:
    """Draw charts from results files, and print the path of each when it is there."""
    from mtabench.charts import draw

    draw(
        csv_paths,
        out or _charts_folder(csv_paths[0]),
        axes.parse_names(kinds, "--kind") if kinds is not None else (),
        axes.parse_names(themes, "--theme"),
        axes.parse_names(formats, "--formats"),
        written=lambda path: print(path, flush=True),
    )
    for path in csv_paths:
        say_if_torn(read_file(path))


def _draw_at_end(console: Console, path: Path) -> None:
    """The charts of a sweep that just ended; a failure to draw is said, and spoils nothing."""
    from mtabench.charts import draw

    try:
        for chart in draw([path], _charts_folder(path)):
            _say(console, f"chart: {chart}")
    except MtabenchError as error:
        _say(console, f"no charts: {error}")


def _check_times(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raise NothingTimedError, with what happened most often, if no row has a time."""
    from mtabench.files.rows import TIMED

    if any(row["status"] in TIMED for row in rows):
        return
    for (status, reason), count in Counter((row["status"], row["reason"]) for row in rows).most_common(1):
        raise NothingTimedError(
            f"no cell has a time: {status}, {reason} ({count} of {len(rows)} cells); their rows are in {path}"
        )


def _charts_folder(csv_path: Path) -> Path:
    """Charts have the same names for every sweep, so each results file has a folder of its own."""
    return csv_path.parent / f"{csv_path.stem}-charts"


def _typical_case(name: str, device: str) -> Case:
    implementation = find(name)
    conv = (6, 11) if implementation.op == "conv-attention" else (None, None)
    return Case(
        pass_=next(pass_ for pass_ in PASSES if pass_ in implementation.passes),
        impl=name,
        op=implementation.op,
        dtype="fp32" if device == "cpu" in implementation.devices else "bf16",
        batch=1,
        heads=16,
        kv_heads=16,
        seq=1024,
        head_dim=64,
        conv_q=conv[0],
        conv_k=conv[1],
        causal=True,
        splits=None,
        device=device,
    )


def _say(console: Console, text: str) -> None:
    """A line as it is: paths are neither wrapped nor coloured, so that they can be copied."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
