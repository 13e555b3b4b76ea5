"""Which group of cells is measured next, and by whom. Knows nothing of Dask."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mtabench.problem.case import Case

MOST_DEATHS = 3  # a group is given to a worker again twice


@dataclass(eq=False, slots=True)
class Group:
    """Cells that take turns in the same rounds, and so on the same device; the guess of their time in seconds.

    `deaths` are the places where a worker died of it, or with it, and how.
    """

    number: int
    cases: Sequence[Case]
    seconds: float
    deaths: list[tuple[str, str]] = field(default_factory=list)


class Groups:
    """The groups that wait for a worker, the longest first; those whose worker died come last."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._waiting = deque(sorted(groups, key=lambda group: -group.seconds))

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> Group | None:
        """The next group, if there is one."""
        return self._waiting.popleft() if self._waiting else None

    def lost(self, group: Group, place: str, reason: str) -> str:
        """A worker died while it measured the group: it waits again, or the reason why it does so no more."""
        group.deaths.append((place, reason))
        if len(group.deaths) < MOST_DEATHS:
            self._waiting.append(group)
            return ""
        said = "; ".join(dict.fromkeys(f"on {where}: {why}" for where, why in group.deaths))
        return f"its worker died {len(group.deaths)} times while measuring cells of this shape, {said}"
