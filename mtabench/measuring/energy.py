"""Energy of one call, from a counter of the GPU that moves a few times a second.

Calls follow each other without a pause. First they run for a while, so that what came before no longer shows in the
counter; then from one step of the counter to one at least `WINDOW_S` later. A step is seen late by a batch of calls at
most, or by a step: the window is twenty times that, which bounds the error at about 5 %. GPUs such as the H100 look at
their power in a part of the time only (arXiv 2312.02741), which calls that are alike and short do not suffer from.
Power at rest is included. Caches stay as the calls leave them.
"""

import time
from collections.abc import Callable
from typing import Any

LEAD_S = 0.5
WINDOW_S = 0.5
STEP_S = 0.1  # the slowest counters move ten times a second
EDGES = 20
BATCH_S = 0.01  # calls are given to the GPU in batches; the counter is looked at after each
STUCK_S = 2.0  # a counter that has not moved for so long never will


def joules(call: Callable[[], Any], read: Callable[[], float | None], synchronize: Callable[[], Any]) -> float | None:
    """Joules of one `call`; `read` gives the counter. None if there is no counter, or if it does not move."""
    last = read()
    if last is None:
        return None
    started = moved = time.perf_counter()
    first: tuple[float, int, float] | None = None
    calls, batch = 0, 1
    while True:
        begun = time.perf_counter()
        for _ in range(batch):
            call()
        synchronize()
        now, counter = time.perf_counter(), read()
        calls += batch
        batch = max(1, min(2 * batch, int(BATCH_S * batch / max(now - begun, 1e-9))))
        if counter is None or (counter == last and now - moved > STUCK_S):
            return None
        if counter == last:
            continue
        last, moved = counter, now
        if first is None and now - started >= LEAD_S:
            first = counter, calls, now
        elif first is not None and now - first[2] >= max(WINDOW_S, EDGES * min(now - begun, STEP_S)):
            return (counter - first[0]) / (calls - first[1])
