"""A sweep as it is typed, to be run by other processes: checked here, announced here, measured there."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from mtabench.cluster_options import NAMES
from mtabench.comparing.pairs import code_folders
from mtabench.comparing.revisions import Checkout
from mtabench.console import say
from mtabench.errors import UsageError
from mtabench.implementations._user_code import is_reference
from mtabench.problem.axes import parse_names
from mtabench.sweeps.cells_plan import any_plan
from mtabench.sweeps.plan import Options, Plan

# What is decided for each process, not typed: the options of a sweep by name, and what they are if not typed.
DECIDED = {"out": None, "resume": False, "plot": False, "quiet": False} | dict.fromkeys(NAMES)


@dataclass(frozen=True, slots=True)
class SweepWords:
    """PASS and its options in words, and the options by name as the command line understood them."""

    words: tuple[str, ...]
    typed: Mapping[str, Any]

    @property
    def dry_run(self) -> bool:
        """Whether to stop at the plan."""
        return bool(self.typed["dry_run"])

    @property
    def own_code(self) -> list[str]:
        """What --impl names that is a person's own: functions in files, and what packages offer."""
        typed = self.typed.get("impl")
        return [text for text in parse_names(typed, "--impl") if is_reference(text)] if typed else []

    def check(self) -> None:
        """Raise UsageError for an option that is not typed here."""
        for name, usual in DECIDED.items():
            if self.typed.get(name, usual) != usual:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for one sweep; here each process writes a file of its own, and "
                    "no charts: leave it out"
                )

    def plan(self, checkout: Checkout | None = None) -> Plan:
        """Its cells, where a person's own file may import what its checkout has, as it will in the processes.

        Raises UsageError for what a sweep could not do or is not typed here.
        """
        self.check()
        if checkout and self.own_code:
            sys.path += map(str, code_folders(checkout.root, checkout.own))
        given = {name: value for name, value in self.typed.items() if name not in (*DECIDED, "dry_run")}
        return any_plan(Options(self.words[0], **given))


def announce(console: Console, plan: Plan, count: int, processes: str) -> None:
    """Print the plan of a sweep that so many processes run, and what these are, with a guess of the time.

    Raises NothingTimedError if none of its cells can run here.
    """
    from mtabench.sweeps.estimate import PROCESS_S
    from mtabench.sweeps.settings import make_settings
    from mtabench.sweeps.table import check_any, print_plan
    from mtabench.sweeps.this_process import ThisProcess

    here = ThisProcess(plan.options.isolate)
    against = here.against(plan.cases)
    check_any(plan.cases, against)
    seconds = here.seconds([case for case in plan.cases if case not in against], make_settings(plan))
    print_plan(console, plan, len(plan.cases), against, count * (seconds + PROCESS_S), reasons=True)
    say(console, f"  {processes}, each of which measures all cells")
