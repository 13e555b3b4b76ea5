"""A cell made ready to be profiled: checked or not, warmed up, called."""

import time

from mtabench.measuring.timing import Timed, synchronize, timed
from mtabench.problem.case import Case
from mtabench.problem.inputs import Inputs, make_inputs
from mtabench.registry import implementation_of

WARM_UP_CALLS = 3


def ready(case: Case, inputs: Inputs | None = None) -> Timed:
    """What to call of a cell; compiled and warmed up."""
    inputs = make_inputs(case) if inputs is None else inputs
    cell = timed(case, implementation_of(case).build, inputs)
    for _ in range(WARM_UP_CALLS):
        cell.run(cell.setup() if cell.setup else None)
    synchronize(case.device)()
    return cell


def wall_ms(cell: Timed, device: str, calls: int) -> float:
    """The fastest of some calls by the wall clock, each waited for; what comes before the window is not in it."""
    wait = synchronize(device)
    best = float("inf")
    for _ in range(calls):
        state = cell.setup() if cell.setup else None
        wait()
        started = time.perf_counter()
        cell.run(state)
        wait()
        best = min(best, time.perf_counter() - started)
        del state
    return best * 1e3
