"""Workers of a fuzz that find a fault, or die: in the place of `run_share`, found by name in a fresh process.

They import PyTorch when they are called, so that one that cannot start ends quickly.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

from fuzz.workers import run_share

FAULT = "a key dropped"
DIES_ON = 1


def with_a_fault(*arguments: Any) -> None:
    """As `run_share`, of an operator that drops a key."""
    from fuzz import trial
    from fuzz_faults import FAULTS

    trial.try_case = functools.partial(trial.try_case, operation=FAULTS[FAULT].operation())
    run_share(*arguments)


def that_dies(*arguments: Any) -> None:
    """As `run_share`, in a process that is killed on one case."""
    from fuzz import trial

    right = trial.try_case

    def try_case(case):
        if case.number == DIES_ON:
            os.kill(os.getpid(), signal.SIGKILL)
        return right(case)

    trial.try_case = try_case
    run_share(*arguments)


def that_cannot_start(*arguments: Any) -> None:
    """As `run_share`, in a process that ends at once."""
    raise RuntimeError("no start")
