"""Run a plan: verify every cell, time in turns those that are right, write each row as its cell ends."""

from __future__ import annotations

import gc
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtabench import environment
from mtabench.checking.judge import Judge
from mtabench.checking.oracle import Check
from mtabench.errors import MtabenchError, UsageError
from mtabench.measuring import timing
from mtabench.measuring.ceilings import FILE_NAME, Ceilings, keep_ceilings, measure_ceilings, read_ceilings
from mtabench.measuring.failures import failure
from mtabench.measuring.timing import phase
from mtabench.problem.axes import short
from mtabench.problem.case import Case
from mtabench.problem.inputs import make_inputs
from mtabench.registry import implementation_of, loaded_files
from mtabench.results.results_file import Key, key_of
from mtabench.results.rows import WITH_TIME, Row, RunFacts, add_speedups, cell_row, sample_lines, timed_row
from mtabench.results.writer import Writer, to_resume
from mtabench.sweeps.estimate import memory_reason, unsupported_reason
from mtabench.sweeps.plan import Plan
from mtabench.sweeps.settings import measuring_words
from mtabench.sweeps.table import Watcher

if TYPE_CHECKING:
    from mtabench.sweeps.table import Watcher
    from mtabench.transformer.problem import ModelProblem


@dataclass(frozen=True, slots=True)
class Verified:
    """A cell whose result is right: what to time, and the error its result has against float64."""

    timed: timing.Timed
    rel_error: float | None


class KernelProblem:
    """The kernels of one problem, judged by float64: whether their results are right, and what to time."""

    def __init__(self, case: Case, seed: int) -> None:
        self._inputs = make_inputs(case, seed)
        self._judge = Judge(case, self._inputs, seed)

    def check(self, case: Case) -> Check:
        """Judge the implementation of a cell."""
        return self._judge.first_of(implementation_of(case).build(case, self._inputs), case)

    def timed(self, case: Case) -> timing.Timed:
        """What to time of a cell that was right; raises WrongResultError if it is not after all."""
        made = implementation_of(case)
        return replace(timing.timed(case, made.build, self._inputs), watch=self._judge.watch(), within=made.within)

    def rest(self) -> None:
        """Hold no memory of a GPU that timing does not need."""
        self._judge.rest()


def problem_of(case: Case, seed: int) -> KernelProblem | ModelProblem:
    """The problem of a cell, of kernels or of a model; raises torch.OutOfMemoryError, say, where it does not fit."""
    if case.layers is None:
        return KernelProblem(case, seed)
    from mtabench.transformer.problem import ModelProblem

    return ModelProblem(case, seed)


class SweepInterruptedError(MtabenchError):
    """Ctrl-C in a sweep: what ended is kept."""

    exit_code = 130


@dataclass(eq=False)
class Messenger:
    """Stands for the sink and the watcher of a sweep in another process, which sends what they receive.

    `pack` makes the message of rows and their samples; what the process works on is sent as a text.
    """

    path: Path
    send: Callable[[object], None]
    pack: Callable[[list[Row], list[Sequence[object]]], object]
    done: dict[Key, dict[str, str]] = field(default_factory=dict)
    rows: int = 0  # that were sent

    def write(self, rows: Sequence[Row], samples: Iterable[Sequence[object]] = ()) -> None:
        """Send rows and samples."""
        self.rows += len(rows)
        self.send(self.pack(list(rows), list(samples)))

    def doing(self, text: str) -> None:
        """Send what the process works on."""
        self.send(text)

    def ended(self, row: Row) -> None:
        """The caller has written the row."""


def check_same_device(
    plan: Plan, path: Path, rows: Iterable[Mapping[str, str]], device_name: str | None = None
) -> None:
    """Raise UsageError if rows of the file at `path` were measured on another device than this sweep's.

    `device_name` names the workers' device, empty if it is not known; None if this process measures.
    """
    others = {row["device"] for row in rows}
    here = device_name
    if here is None:
        here = environment.describe(plan.device)["device"] if others else ""
    if others - {here} and device_name != "":
        raise UsageError(
            f"{path} was measured on {', '.join(sorted(others - {here}))}, and this sweep runs on {here}; "
            "give another --out"
        )


def run(plan: Plan, writer: Writer, settings: timing.Settings, watcher: Watcher) -> Counter[str]:
    """Measure the cells that the writer's file does not have yet; how many rows of each status were written.

    Raises MtabenchError, with all that was measured kept, if the GPU can't go on or the disk takes no more, and
    SweepInterruptedError after Ctrl-C.
    """
    sweep = new_sweep(plan, writer, settings, watcher)
    with interruptible(plan, writer):
        for cases in shapes(plan.cases):
            sweep.measure_shape(cases)
            sweep.keep_ceilings()
    return sweep.statuses


def shapes(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """The cells of each shape, which alternate in the same rounds, and so on the same device."""
    for _, group in groupby(cases, key=lambda case: case.shape_key):
        yield list(group)


def facts_now(plan: Plan, run_id: str, where: Mapping[str, Any]) -> RunFacts:
    """What the rows of a run that starts now share."""
    started = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return RunFacts(run_id, started, where, " ".join(measuring_words(plan.options)))


def new_sweep(plan: Plan, writer: Writer, settings: timing.Settings, watcher: Watcher) -> Sweep:
    """A sweep that starts now, with the ceilings that are kept beside its file."""
    where = environment.describe(plan.device) | environment.git_columns(loaded_files())
    facts = facts_now(plan, secrets.token_hex(6), where)
    kept = read_ceilings(writer.path.with_name(FILE_NAME), facts.environment)
    return Sweep(plan, writer, settings, watcher, facts, dict(kept))


@contextmanager
def interruptible(plan: Plan, writer: Writer) -> Iterator[None]:
    """Turns Ctrl-C into SweepInterruptedError, which says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = sum(key_of(case) in writer.done for case in plan.cases)
        raise SweepInterruptedError(
            f"stopped with {kept} of {len(plan.cases)} cells in {writer.path}; "
            f"{to_resume(writer.path)} measures the others"
        ) from None


@dataclass(eq=False)
class Sweep:
    """One process's part of a sweep; `ceilings` by dtype, to which it adds those it needs, None if there are none."""

    plan: Plan
    writer: Writer | Messenger
    settings: timing.Settings
    watcher: Watcher | Messenger
    facts: RunFacts
    ceilings: dict[str, Ceilings | None]
    statuses: Counter[str] = field(default_factory=Counter)

    def measure_shape(self, cases: Sequence[Case]) -> None:
        """Cells of one shape: verified one by one, then timed in the same rounds."""
        pending = [case for case in cases if key_of(case) not in self.writer.done]
        if not pending:
            return
        # A baseline whose row is in the file already takes part again: a speedup compares times of one round.
        taking_part = [case for case in cases if case in pending or self._is_baseline_of(case, pending)]
        self._measure_ceilings(cases[0])
        verified: dict[Case, Verified] = {}
        for _, problem in groupby(taking_part, key=lambda case: case.problem_key):
            runnable = list(filter(self.can_run, problem))
            verified |= self._verify(runnable)
        if verified:
            self._time(verified, set(pending))
        verified.clear()
        free_memory(cases[0].device)

    def keep_ceilings(self) -> None:
        """Keep those that were measured beside the file, so that other sweeps and `roofline` find them there."""
        path = self.writer.path.with_name(FILE_NAME)
        with suppress(UsageError):  # a folder that takes no more files: the rows are what counts
            kept = read_ceilings(path, self.facts.environment)
            known = {dtype: one for dtype, one in self.ceilings.items() if one is not None}
            if new := {dtype: one for dtype, one in known.items() if not _is_whole(kept.get(dtype))}:
                keep_ceilings(path, self.facts.environment, new)

    def _measure_ceilings(self, case: Case) -> None:
        """Once a dtype, unless they are known; without them (no room, say) the fraction of the roofline stays empty."""
        known = self.ceilings.get(case.dtype)
        if _is_whole(known) or (known is None and case.dtype in self.ceilings):
            return
        self.watcher.doing(f"measuring what the device can do in {case.dtype}")
        self.ceilings[case.dtype] = None
        with suppress(Exception):
            self.ceilings[case.dtype] = measure_ceilings(case.device, case.dtype)
        free_memory(case.device)

    def _is_baseline_of(self, case: Case, pending: Iterable[Case]) -> bool:
        row = self.writer.done.get(key_of(case))
        return (
            row is not None
            and row["status"] == "ok"
            and self.plan.is_baseline(case)
            and any(other.is_compared_with(case) for other in pending)
        )

    def can_run(self, case: Case) -> bool:
        """Whether a cell is worth trying; if not, its row says why."""
        for status, reason_of in (("unsupported", unsupported_reason), ("oom", memory_reason)):
            if reason := reason_of(case):
                self.write([cell_row(case, self.facts, status, reason)])
                return False
        return True

    def _verify(self, cases: Sequence[Case]) -> dict[Case, Verified]:
        """Those cells of one problem whose result is right, ready to be timed; the others get their rows."""
        if not cases:
            return {}
        self.watcher.doing(f"{words(cases[0])}: float64 reference")
        try:
            problem = problem_of(cases[0], self.plan.seed)
        except Exception as error:
            status, reason = failure(error)
            reason = f"in the float64 check: {reason}"
            self.write([cell_row(case, self.facts, status, reason) for case in cases])
            self._check_device(cases[0])
            return {}
        verified = {}
        for case in cases:
            self.watcher.doing(f"{words(case)}, {case.label}: verifying")
            try:
                with phase(case.device, f"{words(case)}, {case.label}: verify"):
                    check = problem.check(case)
                if check.ok:
                    verified[case] = Verified(problem.timed(case), check.rel_error)
                    continue
                row = cell_row(case, self.facts, "wrong", check.reason, check.rel_error)
            except Exception as error:
                row = cell_row(case, self.facts, *failure(error))
            self.write([row])
            self._check_device(case)
            free_memory(case.device)
        problem.rest()
        return verified

    def _time(self, verified: Mapping[Case, Verified], pending: Set[Case]) -> None:
        """Time cells in turns and write the rows of those that are pending."""
        case = next(iter(verified))
        self.watcher.doing(f"{words(case)}: timing {', '.join(dict.fromkeys(case.impl for case in verified))}")
        with phase(case.device, f"{words(case)}: time"):
            measured = timing.measure({case: cell.timed for case, cell in verified.items()}, case.device, self.settings)
        rows: dict[Case, Row] = {}
        failed = False
        for case, outcome in measured.items():
            if isinstance(outcome, BaseException):
                rows[case] = cell_row(case, self.facts, *failure(outcome), verified[case].rel_error)
                failed = True
            else:
                ceilings, rel_error = self.ceilings[case.dtype], verified[case].rel_error
                rows[case] = timed_row(case, self.facts, outcome, rel_error, ceilings)
        add_speedups(rows, self.plan.is_baseline)
        if failed and not environment.device_works(case.device):
            rows = _first_failure_only(rows)  # those that came later failed because the context was broken
        written = [case for case in verified if case in rows and case in pending]
        samples = [
            line
            for case in written
            if isinstance(outcome := measured[case], timing.Measurement)
            for line in sample_lines(case, self.facts, outcome.rounds)
        ]
        self.write([rows[case] for case in written], samples)
        self._check_device(case)

    def write(self, rows: Sequence[Row], samples: Sequence[Sequence[object]] = ()) -> None:
        """Keep rows, count and show them."""
        self.writer.write(rows, samples)
        for row in rows:
            self.statuses[row["status"]] += 1
            self.watcher.ended(row)

    def _check_device(self, case: Case) -> None:
        """Raise MtabenchError if a kernel broke the GPU's context: this process can measure nothing more."""
        if not environment.device_works(case.device):
            raise MtabenchError(
                f"the GPU's context is broken after a failure at {words(case)}; what was measured is kept in "
                f"{self.writer.path}, and {to_resume(self.writer.path)} goes on in a fresh process "
                "(with --isolate each cell has one)"
            )


def words(case: Case) -> str:
    """The problem of a cell, in a few words."""
    steps = f", {case.steps}" if case.steps else ""
    steps = f", {case.layers} layers, {case.pass_}{steps}" if case.layers else steps
    return f"{case.dtype} {case.batch} x {case.heads} heads of {case.head_dim}, seq {short(case.seq)}{steps}"


def _first_failure_only(rows: Mapping[Case, Row]) -> dict[Case, Row]:
    """The rows with a time, and the first without one."""
    kept: dict[Case, Row] = {}
    failed = False
    for case, row in rows.items():
        has_time = row["status"] in WITH_TIME
        if has_time or not failed:
            kept[case] = row
        failed = failed or not has_time
    return kept


def _is_whole(ceilings: Ceilings | None) -> bool:
    """Whether these are ceilings with every rate: an earlier version kept none of reading."""
    return ceilings is not None and ceilings.read_gbytes_s is not None


def free_memory(device: str) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
