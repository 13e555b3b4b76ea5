"""The groups of cells of a sweep by workers: what a worker is given, and which rows come of what it returns."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mtabench.cluster.facts import Facts
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.kept_ceilings import FILE_NAME, read_ceilings
from mtabench.measuring.timing import Settings
from mtabench.problem.case import Case
from mtabench.results.results_file import key_of, key_of_row
from mtabench.results.rows import Row, RunFacts, cell_row
from mtabench.results.writer import Writer
from mtabench.sweeps.estimate import estimate_seconds
from mtabench.sweeps.measuring_process import Outcome, Request
from mtabench.sweeps.plan import Plan
from mtabench.sweeps.sweep import facts_now, shapes
from mtabench.sweeps.watching import Watcher

MOST_DEATHS = 3  # a group is given to a worker again twice


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
        """The rows of an outcome, with those of cells that are given up; a group whose worker died waits again."""
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
