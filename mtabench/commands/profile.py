"""The command `profile`: each cell checked, traced, and measured by what profilers this machine has."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mtabench.checking.judge import Judge
from mtabench.commands import RESULTS_FOLDER, WRONG_RESULT
from mtabench.console import make_console, say
from mtabench.environment import describe, git_columns
from mtabench.errors import MtabenchError, UsageError, first_line
from mtabench.git import make_folder
from mtabench.prediction.devices import known_device, rates_of
from mtabench.prediction.predict import predict, unpredicted
from mtabench.problem import axes
from mtabench.problem.case import Case
from mtabench.problem.inputs import SEED, Inputs, make_inputs
from mtabench.profiling.ncu_report import measure, read_report, reason_against
from mtabench.profiling.tables import (
    COUNTERS_FILE,
    KERNELS_FILE,
    append_counters,
    append_kernels,
    counters_table,
    kernels_table,
    launch_verdict,
    least_verdict,
    verdict_lines,
)
from mtabench.profiling.trace import ready, trace, wall_ms
from mtabench.prose import plural
from mtabench.registry import implementation_of, loaded_files
from mtabench.results.results_file import key_of
from mtabench.sweeps.estimate import memory_reason, unsupported_reason
from mtabench.sweeps.plan import Options, make_plan
from mtabench.sweeps.sweep import words
from mtabench.tables import print_columns

TOOLS = {"trace": lambda device: None, "ncu": reason_against}
WALL_CALLS = 5


def run(options: Options | None, tools: str | None, out: Path | None, ncu_report: Path | None) -> int:
    """Profile the cells of these axes, or read a saved report of Nsight Compute; WRONG_RESULT if a cell's is wrong.

    Raises UsageError for a tool that is named and cannot be used here; without `tools` those that can be are.
    """
    if ncu_report is not None:
        show_report(options, ncu_report, out)
        return 0
    if options is None:
        raise UsageError("name what to profile, such as `mtabench profile fwd --seq 4k`, or give --ncu-report FILE")
    plan = make_plan(options)
    used, notes = _tools(tools, plan.device)
    folder = out or RESULTS_FOLDER / f"profile-{plan.pass_}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    _check_folder(folder)
    console = make_console()
    for note in notes:
        say(console, note)
    say(console, f"{plural(len(plan.cases), 'cell')}, by {', '.join(used)}")
    profiler = _Profiler(console, folder, used, tools is not None, describe(plan.device) | git_columns(loaded_files()))
    any_wrong = False
    for _, problem in groupby(plan.cases, key=lambda case: case.problem_key):
        any_wrong |= profiler.profile_problem(list(problem))
    if folder.is_dir():
        say(console, f"profiles: {folder}; open its .trace.json files at https://ui.perfetto.dev")
    return WRONG_RESULT * any_wrong


def show_report(options: Options | None, report: Path, out: Path | None) -> None:
    """Print what a saved raw page says, and write its counters into the folder `out` if one is given."""
    if options is not None:
        raise UsageError("--ncu-report reads a report that is there: give it without a pass")
    counters = read_report(report)
    if out is not None:
        _check_folder(out)
        _make_folder(out)
        append_counters(out / COUNTERS_FILE, None, counters)
    console = make_console()
    print_columns(console, counters_table(counters))
    for line in verdict_lines(counters):
        say(console, line)
    if out is not None:
        say(console, f"counters: {out / COUNTERS_FILE}")


@dataclass
class _Profiler:
    """What cells are profiled by, `named` on the command line or found here, where that goes, and what is `here`."""

    console: Console
    folder: Path
    used: list[str]
    named: bool
    here: dict[str, Any]

    def profile_problem(self, cases: Sequence[Case]) -> bool:
        """Cells that compute the same thing, checked against one reference; whether one is wrong."""
        runnable = [case for case in cases if self._can_run(case)]
        if not runnable:
            return False
        any_wrong = False
        say(self.console, f"{words(runnable[0])}: float64 reference")
        try:
            inputs = make_inputs(runnable[0])
            judge = Judge(runnable[0], inputs, SEED)
        except Exception as error:
            say(self.console, f"{words(runnable[0])}: not profiled, in the float64 check: {first_line(error)}")
            return False
        for case in runnable:
            try:
                # Nothing of a wrong result is shown, as in a sweep.
                implementation = implementation_of(case)
                check = judge.first_of(implementation.build(case, inputs), case)
                if check.ok:
                    with implementation.within():
                        self._profile(case, inputs)
                else:
                    any_wrong = True
                    say(self.console, f"{case.pass_} {case.label}: not profiled, the result is wrong: {check.reason}")
            except MtabenchError:
                raise
            except Exception as error:
                say(self.console, f"{case.pass_} {case.label}: not profiled: {first_line(error)}")
        return any_wrong

    def _profile(self, case: Case, inputs: Inputs) -> None:
        _make_folder(self.folder)
        say(self.console, "")
        say(self.console, f"{case.pass_} {case.label}: {words(case)}")
        profilers: dict[str, Callable[[Case], None]] = {
            "trace": partial(self._trace, inputs=inputs), "ncu": self._ncu
        }  # fmt: skip
        for name in list(self.used):
            try:
                profilers[name](case)
            except MtabenchError as error:
                if self.named:
                    raise
                self.used.remove(name)
                say(self.console, f"without {name} from here on: {error}")

    def _trace(self, case: Case, inputs: Inputs) -> None:
        cell = ready(case, inputs)
        wall = wall_ms(cell, case.device, WALL_CALLS)
        uses = trace(cell, case.device, self.folder / f"{_stem(case)}.trace.json")
        append_kernels(self.folder / KERNELS_FILE, case, uses, self.here)
        print_columns(self.console, kernels_table(uses))
        if case.device == "cuda":
            kernel_ms = sum(use.total_ms for use in uses)
            say(self.console, launch_verdict(kernel_ms, wall))
            if kernel_ms and (of_model := _least_words(case, kernel_ms)):
                say(self.console, of_model)
            del cell
            torch.cuda.empty_cache()  # the other profilers run the cell in processes of their own

    def _ncu(self, case: Case) -> None:
        say(self.console, "ncu: each kernel is run again for each group of counters, which may take minutes")
        raw = self.folder / f"{_stem(case)}.ncu.csv"
        measure(case, raw)
        counters = read_report(raw)
        append_counters(self.folder / COUNTERS_FILE, case, counters, self.here)
        print_columns(self.console, counters_table(counters))
        for line in verdict_lines(counters):
            say(self.console, line)

    def _can_run(self, case: Case) -> bool:
        reason = unsupported_reason(case) or memory_reason(case)
        if reason:
            say(self.console, f"{case.pass_} {case.label}: not profiled: {reason}")
        return reason is None


def _least_words(case: Case, kernel_ms: float) -> str:
    """The least time of a cell whose kernels took so long here; empty where this GPU or the cell is not predicted."""
    gpu = known_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if gpu is None or unpredicted(case, gpu):
        return ""
    return least_verdict(predict(case, gpu, rates_of(gpu)), kernel_ms)


def _tools(text: str | None, device: str) -> tuple[list[str], list[str]]:
    """The profilers to use, and a note on each that is not; raises UsageError for one that is named and cannot be."""
    named = list(TOOLS) if text is None else axes.parse_names(text, "--tools")
    used, notes = [], []
    for name in named:
        if name not in TOOLS:
            raise UsageError(f"--tools {name!r} is not known; expected one or more of {', '.join(TOOLS)}")
        reason = TOOLS[name](device)
        if reason and text is not None:
            raise UsageError(f"--tools {name} cannot be had here: {reason}")
        if reason:
            notes.append(f"without {name}: {reason}")
        else:
            used.append(name)
    return used, notes


def _check_folder(folder: Path) -> None:
    """Raise UsageError unless `folder` is empty or not there: profiles never mix."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists and is not an empty folder; give another --out")


def _make_folder(folder: Path) -> None:
    try:
        make_folder(folder)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}; give another --out") from error


def _stem(case: Case) -> str:
    """A file name for a cell."""
    return re.sub(r"[^a-z0-9.-]+", "-", "-".join(text for text in key_of(case) if text).lower())
