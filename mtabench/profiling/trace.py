"""PyTorch's profiler around some calls of a cell: a trace for Perfetto or Chrome, and the time of each kernel."""

import time
from dataclasses import dataclass
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mtabench.measuring.timing import Timed, synchronize, timed
from mtabench.problem.case import Case
from mtabench.problem.inputs import Inputs, make_inputs
from mtabench.registry import implementation_of

CALLS = 5


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel (on a CPU: an operator, without those that it calls) in one call of a cell; milliseconds.

    `calls` is how often it runs in one call of the cell, `share` its part of the time of all.
    """

    kernel: str
    calls: float
    total_ms: float
    mean_ms: float
    share: float


def trace(cell: Timed, device: str, path: Path) -> list[KernelUse]:
    """Profile calls of a warm cell and write the trace to `path`; its kernels, the longest first.

    Where a call needs something made before it (the graph of a backward), one call is profiled.
    """
    calls = 1 if cell.setup else CALLS
    state = cell.setup() if cell.setup else None
    wait = synchronize(device)
    wait()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiler:
        for _ in range(calls):
            cell.run(state)
        wait()
    profiler.export_chrome_trace(str(path))
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    found = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if event.device_type == wanted and us > 0:
            found.append((event.key, event.count / calls, us / calls / 1e3))
    whole = sum(ms for _, _, ms in found)
    uses = [KernelUse(name, count, ms, ms / count, ms / whole) for name, count, ms in found]
    return sorted(uses, key=lambda use: -use.total_ms)


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
