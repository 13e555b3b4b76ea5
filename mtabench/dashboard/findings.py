"""What a reader wants to know first: which cells got slower, when and by which revision, and which fail now."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from mtabench import registry
from mtabench.dashboard.changes import FEWEST_RUNS, Change, find_changes
from mtabench.dashboard.histories import CELL_COLUMNS, VERSIONS, History, HistoryRun
from mtabench.problem.operations import OPERATION_COLUMNS

ALIKE = 0.5  # of a change: a yardstick that changed by so much of it, or more, changed alike
# A cell is held against yardsticks of its shape; where there is none, against all of its device and pass.
SHAPE = tuple(name for name in CELL_COLUMNS if name not in ("impl", "op", "splits", *OPERATION_COLUMNS))
LOOSELY = ("device", "pass")
UNSUPPORTED = "unsupported"
SURE = ("step", "drift")  # evidence that accounts for noise from run to run
UNEXPLAINED = "unexplained"  # by any commit
NEWS = ("slower", "maybe_slower", "faster", "maybe_faster", UNEXPLAINED)


class Yardsticks:
    """The histories of plain attention by other projects, whose times no commit of ours changes."""

    def __init__(self, histories: Iterable[History]) -> None:
        self._by_shape: dict[tuple[str, ...], list[History]] = defaultdict(list)
        self._by_pass: dict[tuple[str, ...], list[History]] = defaultdict(list)
        self._of_pass: dict[tuple[object, ...], list[float]] = {}
        for history in filter(is_yardstick, histories):
            self._by_shape[_values(history, SHAPE)].append(history)
            self._by_pass[_values(history, LOOSELY)].append(history)

    def changed_alike(self, history: History, change: Change, good: int, bad: int) -> bool:
        """Whether plain attention changed as a cell did between the runs `good` and `bad`, if they measured both.

        The same way, and at least by a share ALIKE of the log ratio, in the median of the yardsticks. A yardstick's
        own change is one of plain attention.
        """
        if is_yardstick(history):
            return True
        ratios = _ratios(self._by_shape[_values(history, SHAPE)], change.evidence, good, bad)
        if not ratios:
            key = _values(history, LOOSELY)
            runs = (*key, change.evidence, good, bad)
            if runs not in self._of_pass:
                self._of_pass[runs] = _ratios(self._by_pass[key], change.evidence, good, bad)
            ratios = self._of_pass[runs]
        return bool(ratios) and bool(np.median(ratios) / np.log1p(change.change) >= ALIKE)


def is_yardstick(history: History) -> bool:
    """Whether a history is of plain attention by another project."""
    return any(entry.yardstick and entry.name == history.cell["impl"] for entry in registry.IMPLEMENTATIONS)


def _values(history: History, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(history.cell[name] for name in names)


def _ratios(histories: Iterable[History], evidence: str, good: int, bad: int) -> list[float]:
    """The log ratios of times around the runs `good` and `bad`, of the histories that have times in both.

    Times are medians of as many runs as a level must have, on the far sides of a step and inside a drift; of one run
    where the history is too short for levels.
    """
    count = 1 if evidence == "few" else FEWEST_RUNS
    found = []
    for history in histories:
        runs = history.runs[history.timed]
        first, last = np.searchsorted(runs, [good, bad])
        if last >= len(runs) or (runs[first], runs[last]) != (good, bad):
            continue
        logs = np.log(history.median_ms[history.timed])
        ends = logs[max(0, first - count + 1) : first + 1], logs[last : last + count]
        if evidence == "drift":
            ends = logs[first : first + count], logs[max(0, last - count + 1) : last + 1]
        found.append(float(np.median(ends[1]) - np.median(ends[0])))
    return found


@dataclass(frozen=True, slots=True)
class Found:
    """A change of one cell between the runs `good` and `bad`; `lasting` if it can still be seen in the last runs.

    `same_commit` if both runs are of one, `alike` if plain attention changed as much between them.
    """

    cell: int
    good: int
    bad: int
    change: Change
    lasting: bool
    same_commit: bool
    alike: bool

    @property
    def slower(self) -> bool:
        """Whether the cell took longer afterwards."""
        return self.change.change > 0

    @property
    def unexplained(self) -> bool:
        """Whether no commit explains it."""
        return self.same_commit or self.alike


@dataclass(frozen=True, slots=True)
class Event:
    """Changes of several cells of one device in one direction and between the same revisions, the largest first.

    All or none of them are unexplained by a commit.

    `change` is their geometric mean, `notes` what else changed between the runs. `recent` if the first of the later
    runs is among the last days of its device.
    """

    slower: bool
    device: str
    good: int
    bad: int
    found: Sequence[Found]
    change: float
    notes: Sequence[str]
    recent: bool

    @property
    def lasting(self) -> bool:
        """Whether any of the cells is still as it was after the change."""
        return any(one.lasting for one in self.found)

    @property
    def unexplained(self) -> bool:
        """Whether no commit explains the changes."""
        return self.found[0].unexplained


@dataclass(frozen=True, slots=True)
class FailingCell:
    """A cell whose last run failed: since which run, and the last that had a time, if there was one."""

    cell: int
    since: int
    good: int | None
    status: str
    reason: str

    @property
    def broken(self) -> bool:
        """Whether that is news: it had a time before, or its result is wrong."""
        return self.good is not None or self.status == "wrong"


@dataclass(frozen=True, slots=True)
class Findings:
    """All of it. For each history: its changes, its `news` (one of NEWS, or empty), and its state.

    That is "slower", "maybe slower", "failing", "faster", "maybe faster", "unexplained", "steady", "new" or "never
    timed". `compared` cells have two times or more.
    """

    changes: Sequence[Sequence[Found]]
    events: Sequence[Event]
    failures: Sequence[FailingCell]
    news: Sequence[str]
    states: Sequence[str]
    compared: int

    @property
    def counts(self) -> dict[str, int]:
        """How many cells have each of NEWS, and how many are `broken` or `compared`."""
        counts = Counter(self.news)
        broken = sum(failure.broken for failure in self.failures)
        return {name: counts[name] for name in NEWS} | {"broken": broken, "compared": self.compared}


def find(runs: Sequence[HistoryRun], histories: Sequence[History], threshold: float, days: int) -> Findings:
    """Find changes of at least `threshold` in every history; changes in a device's last `days` of runs are news.

    The last run is the newest that does not lie in the future, where a clock was wrong. Raises UsageError if ruptures
    is not installed.
    """
    yardsticks = Yardsticks(histories)
    changes = [_changes(runs, cell, history, yardsticks, threshold) for cell, history in enumerate(histories)]
    recent = _recent(runs, timedelta(days=days))
    events = _events(runs, histories, [one for found in changes for one in found], recent)
    failures = [failure for cell, history in enumerate(histories) if (failure := _failure(cell, history))]
    failures.sort(key=lambda failure: (not failure.broken, -failure.since))
    news = [_news([one for one in found if recent[one.bad]], threshold) for found in changes]
    times = [len(history.timed) for history in histories]
    without_news = ["steady" if count > 1 else "new" if count else "never timed" for count in times]
    states = [one.replace("_", " ") or state for one, state in zip(news, without_news, strict=True)]
    for failure in failures:
        states[failure.cell] = "failing"
    return Findings(changes, events, failures, news, states, sum(count > 1 for count in times))


def _recent(runs: Sequence[HistoryRun], span: timedelta) -> list[bool]:
    """Whether each run is among the last of its device."""
    now = datetime.now(UTC)
    times = [datetime.fromisoformat(run.started_utc) for run in runs]
    newest = {run.device: time for run, time in zip(runs, times, strict=True) if time <= now}
    return [newest.get(run.device, time) - time <= span for run, time in zip(runs, times, strict=True)]


def _changes(
    runs: Sequence[HistoryRun], cell: int, history: History, yardsticks: Yardsticks, threshold: float
) -> list[Found]:
    timed = history.timed
    changes = find_changes(history.median_ms[timed], history.ci95_low_ms[timed], history.ci95_high_ms[timed], threshold)
    found = []
    for change in changes:
        good, bad = (int(history.runs[timed[place]]) for place in (change.good, change.bad))
        same_commit = bool(runs[good].git_sha) and runs[good].git_sha == runs[bad].git_sha
        alike = yardsticks.changed_alike(history, change, good, bad)
        now_ms, before_ms = changes[-1].after_ms, change.before_ms
        slower = change.change > 0  # it lasts if the level now is still apart from the one before, on the same side
        lasting = now_ms >= before_ms * (1 + threshold) if slower else now_ms * (1 + threshold) <= before_ms
        found.append(Found(cell, good, bad, change, lasting, same_commit, alike))
    return found


def _events(
    runs: Sequence[HistoryRun], histories: Sequence[History], found: Sequence[Found], recent: Sequence[bool]
) -> list[Event]:
    """Changes together that one cause may explain."""
    groups: dict[tuple[object, ...], list[Found]] = {}
    for one in found:
        device = histories[one.cell].cell["device"]
        revisions = runs[one.good].revision, runs[one.bad].revision
        groups.setdefault((one.slower, device, *revisions, one.unexplained), []).append(one)
    events = []
    for group in groups.values():
        group.sort(key=lambda one: -abs(np.log1p(one.change.change)))
        good, bad = max(one.good for one in group), min(one.bad for one in group)
        mean = float(np.expm1(np.mean([np.log1p(one.change.change) for one in group])))
        device = histories[group[0].cell].cell["device"]
        events.append(Event(group[0].slower, device, good, bad, group, mean, _notes(runs, group), recent[bad]))
    return sorted(events, key=_urgency)


def _urgency(event: Event) -> tuple[object, ...]:
    """Slowdowns first, then what a commit may explain, what is news and lasts, what has a date, what is newest, what is
    largest."""
    news = event.recent and event.lasting
    gradual = all(one.change.evidence == "drift" for one in event.found)
    return not event.slower, event.unexplained, not news, gradual, -event.bad, -len(event.found)


def _notes(runs: Sequence[HistoryRun], group: Sequence[Found]) -> list[str]:
    """What beside the commit differs between the runs before and after a change: it may be the cause."""
    pairs = {(one.good, one.bad) for one in group}
    notes = []
    for i, name in enumerate(VERSIONS):
        differ = {(runs[good].versions[i], runs[bad].versions[i]) for good, bad in pairs}
        notes += [f"{name} {old or 'unknown'} → {new or 'unknown'}" for old, new in sorted(differ) if old != new]
    if group[0].same_commit:
        notes.append("same commit before and after")
    if any(one.alike for one in group):
        notes.append("plain attention changed alike, so perhaps the machine")
    if runs[group[0].bad].git_dirty == "true":
        notes.append("uncommitted changes after")
    return notes


def _failure(cell: int, history: History) -> FailingCell | None:
    """The failure with which a history ends; what was never supported is none."""
    status, reason = history.outcomes[-1]
    timed = history.timed
    if status == "ok" or (status == UNSUPPORTED and not len(timed)):
        return None
    if not len(timed):
        return FailingCell(cell, int(history.runs[0]), None, status, reason)
    last = timed[-1]
    return FailingCell(cell, int(history.runs[last + 1]), int(history.runs[last]), status, reason)


def _news(recent: Sequence[Found], threshold: float) -> str:
    """What all recent changes of a cell come to: one that was undone is no news, nor what no commit explains."""
    if not recent:
        return ""
    total = np.log(recent[-1].change.after_ms / recent[0].change.before_ms)
    by_commits = total - sum(np.log1p(one.change.change) for one in recent if one.unexplained)
    explained = [one for one in recent if not one.unexplained]
    if not explained or abs(by_commits) < np.log1p(threshold):
        return UNEXPLAINED if abs(total) >= np.log1p(threshold) and len(explained) < len(recent) else ""
    word = "slower" if by_commits > 0 else "faster"
    sure = any(one.slower == (by_commits > 0) and one.change.evidence in SURE for one in explained)
    return word if sure else f"maybe_{word}"
