"""A thousand workers that measure nothing: what handing out groups, fetching rows and writing them costs a cell.

`Pretended` stands for the crew, Dask included, and answers at once: what is left is this suite's own part. `on_dask`
has a real scheduler and real workers of Dask, all in one process and connected by queues instead of sockets, whose
task is to make rows up. Run as a script it does that for `WORKERS CELLS` and prints the milliseconds a cell.
"""

import logging
import pickle
import sys
import time
from collections import deque
from pathlib import Path
from unittest.mock import Mock

import dask

from mtabench.cluster.crew import Crew, WorkerEvent
from mtabench.cluster.facts import Facts
from mtabench.cluster.groups import Group
from mtabench.cluster.measurer import Outcome
from mtabench.cluster.sweep import CrewSweep
from mtabench.measuring.timing import Settings
from mtabench.results.rows import cell_row, sample_lines
from mtabench.results.writer import Writer
from mtabench.sweeps.plan import Options, make_plan
from mtabench.sweeps.sweep import shapes

ENVIRONMENT = {
    "device": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0",
    "mtabench": "0.1.0", "git_sha": "0123456789ab", "git_dirty": False,
}  # fmt: skip
TIMES = {
    name: 1.25 for name in ("median_ms", "p10_ms", "p90_ms", "ci95_low_ms", "ci95_high_ms", "useful_tflops", "gbytes_s")
}
CELLS_A_GROUP = 10
ROUNDS = ((1.25,) * 10,) * 5


def facts(number):
    return Facts(f"node{number // 8:03} GPU {number % 8}", f"GPU-{number}", ENVIRONMENT, "")


async def start(run_id, device):
    """A worker's start, in the place of the real one. Not in a thread: a thousand would fight for the interpreter."""
    from distributed import get_worker

    return facts(get_worker().name)


async def measure(packed, run_id, topic):
    """A worker's group, in the place of the real one."""
    return made_up(packed)


def made_up(packed):
    """An outcome with as many rows and samples as usual."""
    request = pickle.loads(packed)
    rows = [cell_row(case, request.facts, "ok") | ENVIRONMENT | TIMES for case in request.plan.cases]
    samples = [line for case in request.plan.cases for line in sample_lines(case, request.facts, ROUNDS)]
    return Outcome(rows, samples, {"measuring": 0.0})


class Pretended:
    """A crew whose workers answer at once, a few at a time as results come from a network."""

    run_id = "0123456789ab"

    def __init__(self):
        self._answers = deque()

    def send(self, worker, request):
        self._answers.append(WorkerEvent("done", worker, made_up(request)))

    def events(self, timeout_s):
        return [self._answers.popleft() for _ in range(min(50, len(self._answers)))]


def plan_of(cells):
    """A plan of so many thousand cells, CELLS_A_GROUP of a shape."""
    taps = ",".join(f"{taps}x{taps}" for taps in range(1, CELLS_A_GROUP + 1))
    batches = f"1..{cells // 1000}:+1"
    return make_plan(Options("fwd", seq="16..1600:+16", batch=batches, conv=taps, impl="eager", head_dim="64"), "cuda")


def run(crew, workers, plan, path, clock=time.perf_counter):
    """Seconds a cell, by the clock."""
    groups = [Group(number, cases, float(number % 97)) for number, cases in enumerate(shapes(plan.cases))]
    with Writer(path) as writer:
        watcher = Mock(**{"said.side_effect": AssertionError})
        began = clock()
        statuses = CrewSweep(crew, workers, None, plan, writer, Settings(), watcher).run(groups)
        seconds = clock() - began
    assert statuses == {"ok": len(plan.cases)}
    assert watcher.ended.call_count == len(plan.cases)
    return seconds / len(plan.cases)


def pretended(workers, cells, path, clock=time.perf_counter):
    """Seconds a cell of this suite's part, by the clock."""
    return run(Pretended(), {str(number): facts(number) for number in range(workers)}, plan_of(cells), path, clock)


def on_dask(workers, cells, path):
    """Seconds a cell with Dask's part and that of the workers, all in this process."""
    from distributed import Client, Scheduler, SpecCluster, Worker

    # What each worker does in a process of its own, a thousand cannot do in one: looking at themselves.
    intervals = {"distributed.admin.system-monitor.interval": "60s", "distributed.admin.tick.interval": "10s"}
    dask.config.set(intervals | {"distributed.worker.profile.enabled": False})
    common = {"protocol": "inproc://", "dashboard": False}
    worker = {"nthreads": 1, "resources": {"GPU": 1}, "memory_limit": 0}
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with (
        SpecCluster(
            scheduler={"cls": Scheduler, "options": common | {"dashboard_address": "127.0.0.1:0"}},
            workers={number: {"cls": Worker, "options": common | worker} for number in range(workers)},
            silence_logs=logging.CRITICAL + 1,
        ) as cluster,
        Client(cluster, set_as_default=False, timeout=120) as client,
    ):
        crew = Crew(client, "cuda", start, measure)
        there = {}
        while len(there) < workers:
            there |= {event.worker: event.value for event in crew.events(1.0) if event.kind == "ready"}
        seconds = run(crew, there, plan_of(cells), path)
        crew.stop()
    return seconds


if __name__ == "__main__":
    import tempfile

    workers, cells = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        print(f"this suite's part: {1e3 * pretended(workers, cells, Path(folder) / 'a.csv'):.3f} ms a cell")
        print(f"with Dask and the workers: {1e3 * on_dask(workers, cells, Path(folder) / 'b.csv'):.3f} ms a cell")
