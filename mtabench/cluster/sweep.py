"""A sweep measured by a crew: groups go out, rows come back, and this process writes them."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mtabench.cluster.crew import Crew, WorkerEvent
from mtabench.cluster.facts import Facts, differences, fits
from mtabench.cluster.groups import Group, Groups
from mtabench.cluster.measurer import Outcome, Request
from mtabench.cluster.watching import CrewWatcher
from mtabench.errors import MtabenchError
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.kept_ceilings import FILE_NAME, read_ceilings
from mtabench.measuring.timing import Settings
from mtabench.results.results_file import key_of, key_of_row
from mtabench.results.rows import Row, cell_row
from mtabench.results.writer import Writer, to_resume
from mtabench.sweeps.plan import Plan
from mtabench.sweeps.sweep import facts_now, interruptible

LOOK_AGAIN_S = 1.0
NO_WORKER_S = 120.0  # for workers to come back, all being gone


@dataclass(slots=True)
class _Worker:
    """A worker that can measure, the ceilings that are kept for its device, and the group that it has."""

    facts: Facts
    ceilings: Mapping[str, Ceilings]
    group: Group | None = None


class CrewSweep:
    """One sweep by a crew, whose first workers are known and fit; those that come later must be like them."""

    def __init__(
        self, crew: Crew, workers: Mapping[str, Facts], on: str | None, plan: Plan, writer: Writer,
        settings: Settings, watcher: CrewWatcher,
    ) -> None:  # fmt: skip
        self.crew, self.plan, self.writer, self.settings, self.watcher = crew, plan, writer, settings, watcher
        self.statuses: Counter[str] = Counter()
        self.spent: Counter[str] = Counter()
        self._on = on
        self._workers: dict[str, _Worker] = {}
        self._idle: set[str] = set()
        for address, facts in workers.items():
            self._add(address, facts)
        self._like = next(iter(workers.values()))
        self._run = facts_now(plan, crew.run_id, {})
        self._last_seen = time.monotonic()

    def run(self, groups: Iterable[Group]) -> Counter[str]:
        """Measure the groups; how many rows of each status were written.

        Raises MtabenchError, with all that was measured kept, if no worker or no scheduler is left or the disk takes
        no more, and SweepInterruptedError after Ctrl-C.
        """
        waiting = Groups(groups)
        with interruptible(self.plan, self.writer):
            try:
                while waiting or len(self._idle) < len(self._workers):
                    self._hand_out(waiting)
                    self._check_anybody()
                    self._handle(self.crew.events(LOOK_AGAIN_S), waiting)
            except ConnectionError as error:
                raise MtabenchError(f"{error}; {self._kept()}") from error
        return self.statuses

    def _add(self, address: str, facts: Facts) -> None:
        kept = read_ceilings(self.writer.path.with_name(FILE_NAME), facts.environment)
        self._workers[address] = _Worker(facts, kept)
        self._idle.add(address)

    def _hand_out(self, waiting: Groups) -> None:
        for address in list(self._idle if waiting else ()):
            worker = self._workers[address]
            worker.group = waiting.take(
                worker.facts.place, lambda: {other.facts.place for other in self._workers.values()}
            )
            if worker.group is not None:
                self._idle.discard(address)
                self.crew.send(address, pickle.dumps(self._request(worker.group, worker.ceilings)))

    def _request(self, group: Group, ceilings: Mapping[str, Ceilings]) -> Request:
        done = self.writer.done
        return Request(
            plan=replace(self.plan, cases=tuple(group.cases)), settings=self.settings, facts=self._run,
            ceilings=ceilings, done={key: done[key] for key in map(key_of, group.cases) if key in done},
            path=self.writer.path,
        )  # fmt: skip

    def _handle(self, events: Sequence[WorkerEvent], waiting: Groups) -> None:
        """Rows that came together are written together: the disk is waited for once."""
        rows: list[Row] = []
        samples: list[Sequence[object]] = []
        for event in events:
            worker = self._workers.get(event.worker)
            if event.kind == "ready":
                self._join(event.worker, event.value)
            elif event.kind == "failed":
                self.watcher.said(f"worker {event.worker} is left out: {event.value}")
            elif worker is None:
                continue
            elif event.kind == "doing":
                self.watcher.working(worker.facts.place, event.value)
            elif event.kind == "done":
                self._idle.add(event.worker)
                rows += self._take(worker, event.value, waiting)
                samples += event.value.samples
            else:
                del self._workers[event.worker]
                self._idle.discard(event.worker)
                self.watcher.working(worker.facts.place, "")
                if worker.group is not None:
                    rows += self._take(worker, Outcome(lost="its worker was lost"), waiting)
        if rows:
            self.writer.write(rows, samples)
        for row in rows:
            self.statuses[row["status"]] += 1
            self.watcher.ended(row)
        self.watcher.refresh()

    def _take(self, worker: _Worker, outcome: Outcome, waiting: Groups) -> list[Row]:
        """The rows of an outcome, with those of cells that are given up."""
        group, worker.group = worker.group, None
        assert group is not None
        self.spent.update(outcome.spent)
        if not outcome.lost:
            return outcome.rows
        place = worker.facts.place
        given_up = waiting.lost(group, place, outcome.lost)
        if not given_up:
            self.watcher.said(f"{place} lost a group ({outcome.lost}): it is measured again, elsewhere if possible")
            return outcome.rows
        self.watcher.said(f"{place} lost a group for the last time ({outcome.lost})")
        known = {key_of_row(row) for row in outcome.rows} | self.writer.done.keys()
        facts = replace(self._run, environment={**worker.facts.environment, "worker": place})
        left = [case for case in group.cases if key_of(case) not in known]
        return outcome.rows + [cell_row(case, facts, "error", given_up) for case in left]

    def _join(self, address: str, facts: Facts) -> None:
        """A worker that came late, or again."""
        reason = reason_against(facts, self._like.versions(), self._on)
        if not reason and facts.device != self._like.device:
            reason = f"it has {facts.device}, and this sweep runs on {self._like.device}"
        if not reason and facts.gpu in {worker.facts.gpu for worker in self._workers.values()} - {""}:
            reason = f"its GPU {facts.gpu} is another worker's"
        if reason:
            self.watcher.said(f"worker {facts.place} is left out: {reason}")
        else:
            self._add(address, facts)

    def _check_anybody(self) -> None:
        now = time.monotonic()
        if self._workers:
            self._last_seen = now
        elif now - self._last_seen > NO_WORKER_S:
            raise MtabenchError(f"no worker was left for {NO_WORKER_S:g} s; {self._kept()}")

    def _kept(self) -> str:
        path = self.writer.path
        return f"what was measured is kept in {path}, and {to_resume(path)} measures the rest"


def reason_against(facts: Facts, versions: Mapping[str, str], on: str | None) -> str:
    """Why a worker may not measure for a process with these versions, or for `--on`; empty if it may."""
    if not fits(on, facts.device):
        return f"it has {facts.device}, not {on}"
    different = differences(versions, facts.versions())
    return f"it has {different}" if different else ""
