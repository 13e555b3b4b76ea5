"""A sweep over ranks, one of which is killed."""

from __future__ import annotations

import os
import signal

from mtabench.checking.oracle import Oracle
from mtabench.cli import main
from mtabench.ranks import meeting


def run_with_a_rank_that_dies() -> None:
    """The command line of this process, whose second rank is killed once rank 0 has results to check."""
    started, start = [], meeting.Helper.start
    meeting.Helper.start = lambda helper: started.append(helper) or start(helper)
    check = Oracle.check

    def kill_then_check(self, result, sign=1):
        os.kill(started[0].process.pid, signal.SIGKILL)
        return check(self, result, sign)

    Oracle.check = kill_then_check
    main()
