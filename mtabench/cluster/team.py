"""The workers of a sweep: starts or finds them, reads their facts, gives them groups one by one, and lets them go."""

from __future__ import annotations

import secrets
import textwrap
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mtabench.cluster.facts import Facts, differences, facts_here
from mtabench.cluster.worker import LocalWorkers
from mtabench.errors import MtabenchError, UsageError
from mtabench.measuring.ceilings import FILE_NAME, Ceilings, read_ceilings
from mtabench.measuring.timing import Settings
from mtabench.options import ClusterOptions
from mtabench.problem.case import Case
from mtabench.results.results_file import key_of, key_of_row
from mtabench.results.rows import Row, RunFacts, cell_row
from mtabench.results.writer import Writer, to_resume
from mtabench.sweeps.estimate import estimate_seconds
from mtabench.sweeps.measuring_process import Outcome, Request
from mtabench.sweeps.plan import Plan
from mtabench.sweeps.sweep import facts_now, interruptible, shapes
from mtabench.sweeps.table import Watcher
from mtabench.sweeps.this_process import ThisProcess

if TYPE_CHECKING:
    from mtabench.cluster.dask_cluster import DaskWorkers

MOST_DEATHS = 3  # a group is given to a worker again twice
COME_S = 60.0  # for a cluster's first worker, which its queue may still be starting
START_S = 300.0  # for measuring processes: torch may have to come from a slow disk
NO_WORKER_S = 120.0  # for workers to come back, all being gone
LOOK_AGAIN_S = 1.0
LONGEST_LINE = 500


@dataclass(eq=False, slots=True)
class Group:
    """Cells that take turns in the same rounds, and so on the same device; where and how its workers died, if so."""

    cases: Sequence[Case]
    deaths: list[str] = field(default_factory=list)


class Groups:
    """The groups that `waiting` has, the longest first; those whose worker died come last."""

    def __init__(self, plan: Plan, writer: Writer, settings: Settings, watcher: Watcher, run_id: str) -> None:
        self._plan, self._writer, self._settings, self._watcher = plan, writer, settings, watcher
        self._run = facts_now(plan, run_id, {})
        self._ceilings: defaultdict[str, dict[str, Ceilings | None]] = defaultdict(dict)  # by worker
        pending = {
            tuple(cases): estimate_seconds(left, settings)
            for cases in shapes(plan.cases)
            if (left := [case for case in cases if key_of(case) not in writer.done])
        }
        self.waiting = deque(map(Group, sorted(pending, key=lambda cases: -pending[cases])))

    def request(self, group: Group, facts: Facts) -> bytes:
        """What the worker of these facts needs to measure a group."""
        done, kept = self._writer.done, read_ceilings(self._writer.path.with_name(FILE_NAME), facts)
        return Request(
            plan=replace(self._plan, cases=tuple(group.cases)),
            settings=self._settings,
            facts=self._facts(facts),
            ceilings={**kept, **self._ceilings[facts["worker"]]},
            done={key: done[key] for key in map(key_of, group.cases) if key in done},
            path=self._writer.path,
        ).packed()

    def write(self, ended: Iterable[tuple[Group, Facts, Outcome | str]]) -> None:
        """Write rows that came together, so that the disk is waited for once; a text is why a group was lost."""
        rows: list[Row] = []
        samples: list[Sequence[object]] = []
        for group, facts, found in ended:
            outcome = Outcome(lost=found) if isinstance(found, str) else found
            rows += self._rows(group, facts, outcome)
            samples += outcome.samples
        if rows:
            self._writer.write(rows, samples)
        for row in rows:
            self._watcher.ended(row)
        self._watcher.refresh()

    def _rows(self, group: Group, facts: Facts, outcome: Outcome) -> list[Row]:
        """The rows of an outcome, with rows of cells that are given up; a group whose worker died waits again."""
        place = facts["worker"]
        self._ceilings[place] |= outcome.ceilings
        if not outcome.lost:
            return outcome.rows
        group.deaths.append(f"on {place}: {outcome.lost}")
        if len(group.deaths) < MOST_DEATHS:
            self.waiting.append(group)
            self._watcher.said(f"{place} lost a group ({outcome.lost}): it is measured again")
            return outcome.rows
        self._watcher.said(f"{place} lost a group for the last time ({outcome.lost})")
        reason = f"its worker died {len(group.deaths)} times while measuring cells of this shape, " + "; ".join(
            dict.fromkeys(group.deaths)
        )
        known = {key_of_row(row) for row in outcome.rows} | self._writer.done.keys()
        left = [case for case in group.cases if key_of(case) not in known]
        return outcome.rows + [cell_row(case, self._facts(facts), "error", reason) for case in left]

    def _facts(self, facts: Facts) -> RunFacts:
        """What the rows of a worker share."""
        return replace(self._run, environment=facts)


class Team(ThisProcess):
    """The workers of one sweep, by name, each with one call at a time: to start, or to measure a group."""

    def __init__(self, workers: LocalWorkers | DaskWorkers | None, run_id: str = "") -> None:
        """`workers` is None where they are not known, as in a dry run on a cluster; `run_id` is empty in a dry run."""
        super().__init__()
        self._workers, self._run_id = workers, run_id
        self._calls: dict[Future[Any], tuple[str, Group | None]] = {}
        self._known: set[str] = set()  # that are there
        self._fit: set[str] = set()  # of these, those that may measure
        self._facts: dict[str, Facts] = {}
        self._like: dict[str, Any] = {}  # facts with the versions of this process, and the first worker's device

    @property
    def device_name(self) -> str:
        """The device's name, empty if it is not known yet."""
        return str(self._like.get("device") or getattr(self._workers, "device_name", ""))

    @property
    def _count(self) -> int:
        """How many workers there are, as far as that is known."""
        return len(self._fit) or (len(self._workers.there()) if isinstance(self._workers, LocalWorkers) else 0)

    def meet(self) -> list[str]:
        """Wait for the workers; returns what measures, in lines for a person.

        Raises UsageError if there are none, or one that may not measure.
        """
        if self._run_id:
            try:
                with Console(stderr=True).status("waiting for the workers"):
                    self._wait()
            except ConnectionError as error:
                raise MtabenchError(f"{error}; nothing was measured yet") from error
        if not self._count:
            return ["workers: those of the cluster; the time is that of one"]
        where = f" on {self.device_name}" if self.device_name else ""
        places = ": " + ", ".join(facts["worker"] for facts in self._facts.values()) if self._facts else ""
        return [textwrap.shorten(f"workers: {self._count}{where}{places}", LONGEST_LINE, placeholder=" ...")]

    def against(self, cases: Sequence[Case]) -> dict[Case, str]:
        """Nothing: the workers find out which cells cannot run there."""
        return {}

    def seconds(self, cases: Sequence[Case], settings: Settings) -> float:
        """A guess of how long the team takes for these cells."""
        groups = [estimate_seconds(group, settings) for group in shapes(cases)]
        return max(0.0, *groups, sum(groups) / (self._count or 1))

    def run(self, plan: Plan, writer: Writer, settings: Settings, watcher: Watcher) -> None:
        """Measure the cells that the writer's file does not have yet.

        Keeps all that was measured. Raises MtabenchError if no worker or no scheduler is left or the disk takes no
        more, and SweepInterruptedError after Ctrl-C.
        """
        groups = Groups(plan, writer, settings, watcher, self._run_id)
        last_seen = time.monotonic()
        with interruptible(plan, writer):
            try:
                while groups.waiting or any(group for _, group in self._calls.values()):
                    self._hand_out(groups, watcher)
                    if self._fit:
                        last_seen = time.monotonic()
                    elif time.monotonic() - last_seen > NO_WORKER_S:
                        raise ConnectionError(f"no worker was left for {NO_WORKER_S:g} s")
                    ended = self._ended()
                    for name, group, found in ended:
                        if group is None and (reason := self._admit(name, found)):
                            watcher.said(f"worker {self._place(name)} is left out: {reason}")
                        elif name not in self._fit:
                            watcher.working(self._place(name), "")
                    groups.write([(group, self._facts[name], found) for name, group, found in ended if group])
            except ConnectionError as error:
                raise MtabenchError(
                    f"{error}; what was measured is kept in {writer.path}, and {to_resume(writer.path)} measures "
                    "the rest"
                ) from error

    def _hand_out(self, groups: Groups, watcher: Watcher) -> None:
        """Give a group to each worker that has none."""
        assert self._workers is not None
        busy = {name for name, _ in self._calls.values()}
        for name, group in zip(self._fit - busy, groups.waiting.copy(), strict=False):
            groups.waiting.popleft()
            facts = self._facts[name]
            doing = partial(watcher.working, facts["worker"])
            self._calls[self._workers.measure(name, groups.request(group, facts), doing)] = name, group

    def _ended(self) -> list[tuple[str, Group | None, Any]]:
        """Request the facts of new workers, and wait a little for calls to end.

        Returns these with Facts or an Outcome, or why there is none. Raises ConnectionError if the scheduler is gone.
        """
        assert self._workers is not None
        there = set(self._workers.there())
        for name in there - self._known:
            self._calls[self._workers.start(name)] = name, None
        self._known = there
        self._fit &= there
        for future, (name, _) in self._calls.items():
            if name not in there:
                future.cancel()
        if not self._calls:
            time.sleep(LOOK_AGAIN_S)
        wait(self._calls, LOOK_AGAIN_S, FIRST_COMPLETED)
        done = [future for future in self._calls if future.done()]
        if any(future.cancelled() and self._calls[future][0] in there for future in done):
            raise ConnectionError("the connection to Dask's scheduler was lost")  # Dask cancels all calls then
        ended = [(*self._calls.pop(future), future) for future in done]
        return [(name, group, _result(future)) for name, group, future in ended if group or not future.cancelled()]

    def _admit(self, name: str, found: Facts | str) -> str:
        """Let a worker take part, or why it may not."""
        if isinstance(found, str):
            return found
        self._facts[name] = found
        if not self._like:  # a login node has no GPU, and needs none to say which code it has
            self._like = facts_here("cpu") | {"device": found["device"]}
        if different := differences(self._like, found):
            return f"it has {different}"
        if found["gpu"] and found["gpu"] in {self._facts[other]["gpu"] for other in self._fit}:
            return f"its GPU {found['gpu']} is another worker's"
        self._fit.add(name)
        return ""

    def _place(self, name: str) -> str:
        return self._facts[name]["worker"] if name in self._facts else name

    def _wait(self) -> None:
        """Until those that are there now have started to measure, and one at least."""
        began = time.monotonic()
        while self._calls or not self._fit:
            waited = time.monotonic() - began
            if waited > START_S or (waited > COME_S and not self._calls):
                break
            for name, _, found in self._ended():
                if reason := self._admit(name, found):
                    raise UsageError(
                        f"the worker {self._place(name)} cannot measure: {reason}; workers need the versions of this "
                        "process and one kind of GPU, which --gpus 0,2 chooses, each a GPU of its own"
                    )
        if not self._fit:
            raise UsageError(
                f"no worker was free within {waited:.0f} s; start workers of a cluster with --resources GPU=1, or with "
                "CPU=1 for --device cpu, as docs/cluster.md says"
            )


def _result(future: Future[Any]) -> Any:
    """What a call returned, or why it returned nothing."""
    try:
        return future.result()
    except CancelledError:
        return "its worker was lost"
    except MtabenchError as error:
        return str(error)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def gathered(options: ClusterOptions, device: str, dry_run: bool) -> Iterator[Team]:
    """The workers of this machine or of a cluster, whose measuring processes end on the way out.

    Nothing is started or reached for a dry run. Raises UsageError for what is not there.
    """
    run_id = "" if dry_run else secrets.token_hex(6)
    with ExitStack() as stack:
        workers: LocalWorkers | DaskWorkers | None = None
        if options.scheduler is None:
            workers = LocalWorkers(options, run_id)
        else:
            from mtabench.cluster.dask_cluster import connected, security_of

            security = security_of(options.scheduler)
            if not dry_run:
                workers = stack.enter_context(connected(options.scheduler, security, device, run_id))
        try:
            yield Team(workers, run_id)
        finally:
            if workers is not None:
                with suppress(KeyboardInterrupt):  # once more, out of impatience
                    workers.stop()
