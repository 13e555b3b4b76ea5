"""A sweep measured by a crew: groups go out, rows come back, and this process writes them."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mtabench.cluster.crew import Crew, Worker, WorkerEvent
from mtabench.cluster.facts import Facts, differences
from mtabench.cluster.groups import Group, Groups
from mtabench.errors import MtabenchError
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.kept_ceilings import FILE_NAME, read_ceilings
from mtabench.measuring.timing import Settings
from mtabench.results.results_file import key_of, key_of_row
from mtabench.results.rows import Row, RunFacts, cell_row
from mtabench.results.writer import Writer, to_resume
from mtabench.sweeps.estimate import estimate_seconds
from mtabench.sweeps.measuring_process import Outcome, Request
from mtabench.sweeps.plan import Plan
from mtabench.sweeps.sweep import facts_now, interruptible, shapes
from mtabench.sweeps.watching import Watcher

LOOK_AGAIN_S = 1.0
NO_WORKER_S = 120.0  # for workers to come back, all being gone


@dataclass(slots=True)
class _Member:
    """A worker that can measure, the ceilings that are known of its device, and the group that it has."""

    facts: Facts
    ceilings: dict[str, Ceilings | None]
    group: Group | None = None


class CrewSweep:
    """One sweep by a crew, whose first workers are known and fit; those that come later must be like them."""

    def __init__(
        self, crew: Crew, workers: Mapping[Worker, Facts], plan: Plan, writer: Writer, settings: Settings,
        watcher: Watcher, run_id: str,
    ) -> None:  # fmt: skip
        self.crew, self.plan, self.writer, self.settings, self.watcher = crew, plan, writer, settings, watcher
        self.statuses: Counter[str] = Counter()
        self._members: dict[Worker, _Member] = {}
        for worker, facts in workers.items():
            self._add(worker, facts)
        self._like = next(iter(workers.values()))
        self._run = facts_now(plan, run_id, {})
        self._last_seen = time.monotonic()

    def run(self) -> Counter[str]:
        """Measure the cells that the file does not have yet; how many rows of each status were written.

        Raises MtabenchError, with all that was measured kept, if no worker or no scheduler is left or the disk takes
        no more, and SweepInterruptedError after Ctrl-C.
        """
        waiting = Groups(self._groups())
        with interruptible(self.plan, self.writer):
            try:
                while waiting or any(member.group for member in self._members.values()):
                    self._hand_out(waiting)
                    self._check_anybody()
                    self._handle(self.crew.events(LOOK_AGAIN_S), waiting)
            except ConnectionError as error:
                raise MtabenchError(f"{error}; {self._kept()}") from error
        return self.statuses

    def _groups(self) -> Iterator[Group]:
        for number, cases in enumerate(shapes(self.plan.cases)):
            pending = [case for case in cases if key_of(case) not in self.writer.done]
            if pending:
                yield Group(number, cases, estimate_seconds(pending, self.settings))

    def _add(self, worker: Worker, facts: Facts) -> None:
        kept = read_ceilings(self.writer.path.with_name(FILE_NAME), facts.environment)
        self._members[worker] = _Member(facts, dict(kept))

    def _facts(self, facts: Facts) -> RunFacts:
        """What the rows of a worker share."""
        return replace(self._run, environment={**facts.environment, "worker": facts.place})

    def _hand_out(self, waiting: Groups) -> None:
        for worker, member in list(self._members.items() if waiting else ()):
            if member.group is not None:
                continue
            if not worker.is_there:
                del self._members[worker]
                continue
            member.group = waiting.take()
            if member.group is not None:
                request = self._request(member.group, member)
                self.crew.send(worker, request.packed(), partial(self.watcher.working, member.facts.place))

    def _request(self, group: Group, member: _Member) -> Request:
        done = self.writer.done
        return Request(
            plan=replace(self.plan, cases=tuple(group.cases)), settings=self.settings,
            facts=self._facts(member.facts), ceilings=member.ceilings,
            done={key: done[key] for key in map(key_of, group.cases) if key in done}, path=self.writer.path,
        )  # fmt: skip

    def _handle(self, events: Sequence[WorkerEvent], waiting: Groups) -> None:
        """Rows that came together are written together: the disk is waited for once."""
        rows: list[Row] = []
        samples: list[Sequence[object]] = []
        for event in events:
            member = self._members.get(event.worker)
            if event.kind == "ready":
                self._join(event.worker, event.value)
            elif event.kind == "failed":
                self.watcher.said(f"worker {event.worker.name} is left out: {event.value}")
            elif member is not None:
                outcome = event.value or Outcome(lost="its worker was lost")
                if event.kind == "lost":
                    del self._members[event.worker]
                    self.watcher.working(member.facts.place, "")
                rows += self._take(member, outcome, waiting)
                samples += outcome.samples
        if rows:
            self.writer.write(rows, samples)
        for row in rows:
            self.statuses[row["status"]] += 1
            self.watcher.ended(row)
        self.watcher.refresh()

    def _take(self, member: _Member, outcome: Outcome, waiting: Groups) -> list[Row]:
        """The rows of an outcome, with those of cells that are given up."""
        group, member.group = member.group, None
        assert group is not None
        member.ceilings |= outcome.ceilings
        if not outcome.lost:
            return outcome.rows
        place = member.facts.place
        given_up = waiting.lost(group, place, outcome.lost)
        if not given_up:
            self.watcher.said(f"{place} lost a group ({outcome.lost}): it is measured again")
            return outcome.rows
        self.watcher.said(f"{place} lost a group for the last time ({outcome.lost})")
        known = {key_of_row(row) for row in outcome.rows} | self.writer.done.keys()
        left = [case for case in group.cases if key_of(case) not in known]
        return outcome.rows + [cell_row(case, self._facts(member.facts), "error", given_up) for case in left]

    def _join(self, worker: Worker, facts: Facts) -> None:
        """A worker that came late, or again."""
        reason = reason_against(facts, self._like.versions())
        if not reason and facts.device != self._like.device:
            reason = f"it has {facts.device}, and this sweep runs on {self._like.device}"
        if not reason and facts.gpu in {member.facts.gpu for member in self._members.values()} - {""}:
            reason = f"its GPU {facts.gpu} is another worker's"
        if reason:
            self.watcher.said(f"worker {facts.place} is left out: {reason}")
        else:
            self._add(worker, facts)

    def _check_anybody(self) -> None:
        now = time.monotonic()
        if self._members:
            self._last_seen = now
        elif now - self._last_seen > NO_WORKER_S:
            raise MtabenchError(f"no worker was left for {NO_WORKER_S:g} s; {self._kept()}")

    def _kept(self) -> str:
        path = self.writer.path
        return f"what was measured is kept in {path}, and {to_resume(path)} measures the rest"


def reason_against(facts: Facts, versions: Mapping[str, str]) -> str:
    """Why a worker may not measure for a process with these versions; empty if it may."""
    different = differences(versions, facts.versions())
    return f"it has {different}" if different else ""
