"""What measures a sweep: the process of the command itself; workers stand in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mtabench.problem.case import Case
from mtabench.results.writer import Writer
from mtabench.sweeps.plan import Plan

if TYPE_CHECKING:
    from mtabench.measuring.timing import Settings


class ThisProcess:
    """Measures in this process, or with --isolate in one a cell."""

    def __init__(self, isolate: bool = False) -> None:
        self._isolate = isolate

    @property
    def device_name(self) -> str | None:
        """The device of all cells, empty if it is not known yet; None if this process is to look when it needs it."""
        return None

    def meet(self) -> list[str]:
        """Who measures, in lines for a person: nothing to tell."""
        return []

    def against(self, cases: Sequence[Case]) -> dict[Case, str]:
        """Why cells cannot run on this machine, of those that cannot."""
        from mtabench.sweeps.readiness import memory_reason, unsupported_reason

        return {case: reason for case in cases if (reason := unsupported_reason(case) or memory_reason(case))}

    def seconds(self, cases: Sequence[Case], settings: Settings) -> float:
        """A guess of the time that these cells take."""
        from mtabench.sweeps.estimate import estimate_seconds

        return estimate_seconds(cases, settings, self._isolate)

    def run(self, plan: Plan, writer: Writer, settings: Settings, watcher: Any) -> None:
        """Measure the cells that the writer's file does not have yet; raises as sweep.run does."""
        from mtabench.sweeps.isolation import run_isolated
        from mtabench.sweeps.sweep import run

        (run_isolated if self._isolate else run)(plan, writer, settings, watcher)
