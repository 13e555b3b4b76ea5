"""What a sweep is measured by: this process, ranks or workers, behind one face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from mtabench.measuring.stopwatch import Stopwatch
    from mtabench.measuring.timing import Settings
    from mtabench.problem.case import Case
    from mtabench.results.writer import Writer
    from mtabench.sweeps.plan import Plan
    from mtabench.sweeps.watching import Pace


class Timing(str):
    """What a sweep works on while it takes times: whoever shows it does nothing else in the meantime."""

    __slots__ = ()


class Measurer(Protocol):
    """Measures the cells of a plan."""

    @property
    def device_name(self) -> str | None:
        """The device of all cells; None if this process is to look when it needs it."""

    def meet(self) -> Sequence[str]:
        """Who measures, in lines for a person."""

    def against(self, cases: Sequence[Case]) -> Mapping[Case, str]:
        """Why cells cannot run, of those that cannot."""

    def seconds(self, cases: Sequence[Case], settings: Settings) -> float:
        """A guess of the time that these cells take."""

    def watcher(
        self, console: Console, total: int, before: Sequence[Mapping[str, Any]], pace: Pace
    ) -> AbstractContextManager[Any]:
        """What shows a sweep of `total` cells to a person, some of which were measured before."""

    def run(self, plan: Plan, writer: Writer, settings: Settings, watcher: Any, spent: Stopwatch) -> None:
        """Measure the cells that the writer's file does not have yet; raises as `sweep.run` does."""
