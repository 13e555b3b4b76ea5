"""Measures a sweep whose cells are shared by ranks; has the face of `ThisProcess`."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from mta_kernels.conv_attention.context_parallel import passed_bytes
from mtabench import environment
from mtabench.checking.judge import Judge, Result
from mtabench.checking.probes import Probe
from mtabench.measuring import timing
from mtabench.measuring.failures import failure
from mtabench.measuring.statistics import summarize
from mtabench.problem.case import Case
from mtabench.problem.inputs import DTYPES
from mtabench.processes import EXIT_S
from mtabench.ranks.follower import follow_as
from mtabench.ranks.meeting import Meeting, check_devices, meet
from mtabench.ranks.part import NotLoadedError, Part, link_gbytes_s, load_part
from mtabench.registry import implementation_of
from mtabench.results.results_file import key_of
from mtabench.results.rows import Row, cell_row, sample_lines, timed_row
from mtabench.results.writer import Writer
from mtabench.sweeps.plan import Plan
from mtabench.sweeps.sweep import Sweep, interruptible, new_sweep, words
from mtabench.sweeps.this_process import ThisProcess
from mtabench.sweeps.watching import Watcher

ONE_RANK = "1 rank"


class RankTeam(ThisProcess):
    """This process, which is rank 0, and the others."""

    def __init__(self, plan: Plan, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        check_devices(ranks, plan.device)
        self._device_name = f"{ranks} x {environment.describe(plan.device)['device']}"

    @property
    def device_name(self) -> str:
        """The device of all ranks."""
        return self._device_name

    def meet(self) -> list[str]:
        """Who measures, in a line for a person."""
        return [f"over {self._ranks} ranks, beside the same kernels on one of them: {self.device_name}"]

    def run(self, plan: Plan, writer: Writer, settings: timing.Settings, watcher: Watcher) -> None:
        """Measure the cells that the writer's file does not have yet; raises as sweep.run does."""
        pending = [case for case in plan.cases if key_of(case) not in writer.done]
        sweep = new_sweep(plan, writer, settings, watcher)
        where = {**sweep.facts.environment, "device": self.device_name, "ranks": self._ranks}
        options = f"{sweep.facts.options} --ranks {self._ranks}".strip()
        sweep.facts = replace(sweep.facts, environment=where, options=options)
        kept = f"what was measured is kept in {writer.path}, and --resume goes on"
        with interruptible(plan, writer):
            pending = list(filter(sweep.can_run, pending))
            if not pending:
                return
            watcher.doing(f"starting {self._ranks} ranks")
            under_way = UnderWay(sweep)
            with meet(self._ranks, plan.device, follow_as, kept, under_way.lose) as meeting:
                meeting.give(("link",))
                link = link_gbytes_s(meeting)
                for case in pending:
                    under_way.begin(case)
                    under_way.end(*_measured(sweep, meeting, case, link))
                    meeting.drop()


class UnderWay:
    """The cell that is measured, whose row is written once: with what came out, or that a rank was lost."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._lock = sweep, threading.Lock()
        self._case: Case | None = None

    def begin(self, case: Case) -> None:
        """It is this one from now on."""
        self._case = case

    def end(self, row: Row, samples: list[tuple[object, ...]]) -> None:
        """Write its row."""
        with self._lock:
            if self._case is not None:
                self._case = None
                self._sweep.write([row], samples)

    def lose(self, reason: str) -> None:
        """Write that a rank died; from another thread, while this one may wait for that rank."""
        with self._lock:
            if self._case is not None:
                case, self._case = self._case, None
                self._sweep.write([cell_row(case, self._sweep.facts, "error", reason)])


def _measured(sweep: Sweep, meeting: Meeting, case: Case, link: float) -> tuple[Row, list[tuple[object, ...]]]:
    """A cell, checked over ranks and on one, timed on both in turns: its row and its samples."""
    seed = sweep.plan.seed
    meeting.give(("load", case, seed))
    try:
        part, inputs = load_part(meeting, case, seed)
    except NotLoadedError as error:
        return cell_row(case, sweep.facts, error.status, error.reason), []
    build = implementation_of(case).build
    sweep.watcher.doing(f"{words(case)}: float64 reference")
    try:
        judge = Judge(case, inputs, seed)
        sweep.watcher.doing(f"{words(case)}, {case.label}: verifying")
        check = judge.first(lambda probe: _results(meeting, case, seed, part, judge, probe))
        judge.rest()
    except Exception as error:
        return cell_row(case, sweep.facts, *_failure(meeting, error)), []
    if not check.ok:
        return cell_row(case, sweep.facts, "wrong", check.reason, check.rel_error), []
    together = f"{meeting.size} ranks"
    alone_timed = replace(timing.timed(case, build, inputs), watch=judge.watch())
    cells = {together: _timed(meeting, case, part, judge), ONE_RANK: alone_timed}
    sweep.watcher.doing(f"{words(case)}: timing {case.impl} over {together} and on one")
    measured = timing.measure(cells, case.device, sweep.settings)
    outcome, alone = measured[together], measured[ONE_RANK]
    if isinstance(outcome, Exception):
        return cell_row(case, sweep.facts, *_failure(meeting, outcome), check.rel_error), []
    outcome.energy_j = None  # this rank's alone
    row = timed_row(case, sweep.facts, outcome, check.rel_error, None)
    row |= _compared(row, alone, meeting.size) | _communication(case, meeting.size, link)
    return row, list(sample_lines(case, sweep.facts, outcome.rounds))


def _failure(meeting: Meeting, error: Exception) -> tuple[str, str]:
    """Status and reason of a cell that failed: with how a rank died, if that is what is behind it."""
    reason = meeting.lost(EXIT_S / 10)
    return ("error", reason) if reason else failure(error)


def _results(meeting: Meeting, case: Case, seed: int, part: Part, judge: Judge, probe: Probe | None) -> Result:
    """The whole result by all ranks, of the inputs as they are or as a probe changes them."""
    number = None if probe is None else judge.probes.index(probe)
    meeting.give(("results", number))
    if number is not None:
        part, _ = load_part(meeting, case, seed, number)
    with meeting.shared_call():
        return part.results()


def _timed(meeting: Meeting, case: Case, part: Part, judge: Judge) -> timing.Timed:
    """As timing.timed, on all ranks."""

    def forward(_: Any = None) -> torch.Tensor:
        meeting.give(("forward",))
        with meeting.shared_call():
            return part.forward()

    def backward(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        meeting.give(("backward",))
        with meeting.shared_call():
            return part.backward(out)

    def last() -> Result:
        meeting.give(("results", None))
        with meeting.shared_call():
            return part.results()

    def negate() -> None:
        meeting.give(("negate",))
        part.negate()

    def confirm() -> str:
        """Of the whole result, of which the timed call gives this rank's part alone."""
        negate()
        reason = judge.last(last)
        negate()
        return reason

    if case.pass_ == "bwd":
        return timing.Timed(run=backward, setup=forward, confirm=confirm)
    return timing.Timed(run=forward, confirm=confirm)


def _compared(row: Row, alone: timing.Measurement | Exception, ranks: int) -> Row:
    """Speedup over one rank and efficiency, where one rank could do it at all."""
    if isinstance(alone, Exception) or row["status"] != "ok":
        return {}
    speedup = summarize(alone.rounds).median_ms / row["median_ms"]
    return {"baseline": ONE_RANK, "speedup": speedup, "efficiency": speedup / ranks}


def _communication(case: Case, ranks: int, link: float) -> Row:
    """What the link allows at best: the bytes that a rank passes on, at the bandwidth measured before."""
    passed = passed_bytes(
        case.operation, case.seq, ranks, batch=case.batch, kv_heads=case.kv_heads, head_dim=case.head_dim,
        dtype=DTYPES[case.dtype], backward=case.pass_ == "bwd",
    )  # fmt: skip
    return {"link_gbytes_s": link, "communication_ms": passed / link / 1e6}
