"""Three clocks: wall time on a CPU, CUDA events around calls, and replays of a CUDA graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtabench.measuring.poison import poison

Run = Callable[[Any], Any]  # takes what a setup returned
Action = Callable[[], Any]  # a setup, a flush, a wait
# Takes that many samples, in ms a call.
Sampler = Callable[[int], list[float]]

# How long a window of warm calls should last at least, so that its edges (about 2 us) are not what is measured.
SHORTEST_WINDOW_S = 5e-4
MAX_CALLS = 64
# And a replay, whose edges are about 5 us (decode-variants.csv): 0.13 % of it.
SHORTEST_REPLAY_S = 4e-3
MAX_REPLAYED_CALLS = 512
# A call that takes the GPU longer lets the CPU run ahead by itself.
LONGEST_HELD_S = 2e-2
# No GPU's clock is faster, so that a count of its cycles lasts at least that long.
FASTEST_CLOCK_HZ = 3e9


def cpu_sampler(run: Run, setup: Action | None, flush: Action | None, synchronize: Action) -> Sampler:
    """Wall time of `run(setup())`, with the setup and the flush outside the window; on a GPU launches included."""

    def sample(count: int) -> list[float]:
        times = []
        for _ in range(count):
            state = setup() if setup else None
            if flush is not None:
                flush()
            synchronize()
            started = time.perf_counter_ns()
            run(state)
            synchronize()
            times.append((time.perf_counter_ns() - started) / 1e6)
            del state
        return times

    return sample


def events_sampler(run: Run, setup: Action | None, flush: Action | None, call_s: float) -> Sampler:
    """Time on the GPU between two events around `run(setup())`; `flush` empties the cache before the window.

    With a warm cache and no setup a window holds several calls of a short kernel, of about `call_s` seconds. Before a
    window the GPU spins for as long as the CPU takes to launch what is in it, so that no late launch is measured.
    """
    calls = 1
    if flush is None and setup is None:
        calls = max(1, min(MAX_CALLS, math.ceil(SHORTEST_WINDOW_S / max(call_s, 1e-9))))

    def window(hold_s: float) -> tuple[torch.cuda.Event, torch.cuda.Event, float]:
        """The events around a window, and the seconds that it took the CPU to launch it."""
        state = setup() if setup else None
        if flush is not None:
            flush()
        if hold_s:
            torch.cuda._sleep(int(hold_s * FASTEST_CLOCK_HZ))
        started = time.perf_counter()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run(state)
        end.record()
        return start, end, time.perf_counter() - started

    def launch_s() -> float:
        torch.cuda.synchronize()
        return window(0.0)[2]

    hold_s = max(launch_s() for _ in range(3)) if call_s <= LONGEST_HELD_S else 0.0

    def sample(count: int) -> list[float]:
        windows = [window(hold_s) for _ in range(count)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / calls for start, end, _ in windows]

    return sample


@dataclass(slots=True)
class Replay:
    """A CUDA graph, and where a replay writes what each of its closures gave last."""

    graph: torch.cuda.CUDAGraph
    outputs: list[Any]

    def replay(self) -> None:
        """Launch it."""
        self.graph.replay()


@dataclass(frozen=True, slots=True)
class GraphSampler:
    """A sampler that replays a graph."""

    replays: Sampler
    recorded: Replay

    def __call__(self, count: int) -> list[float]:
        """So many samples, in ms a call."""
        return self.replays(count)

    def last(self) -> list[Any]:
        """What each closure gives in one more replay, into memory that is NaN before."""
        poison(self.recorded.outputs)
        self.recorded.replay()
        torch.cuda.synchronize()
        return self.recorded.outputs


def graph_sampler(closures: Sequence[Action], flush: Action | None) -> GraphSampler:
    """Time of replaying `closures`, a call each; no launch overhead. Captures at once.

    With `flush` the cache is emptied before each window, which then holds every closure once. Without, it holds as many
    calls as last `SHORTEST_REPLAY_S` on the GPU, whatever the CPU takes to launch them.
    """
    graph, repeats = capture(closures), 1

    def replays(count: int) -> list[float]:
        """The time of each, in ms."""
        windows = []
        for _ in range(count):
            if flush is not None:
                flush()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            windows.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in windows]

    if flush is None:
        wanted = math.ceil(SHORTEST_REPLAY_S / max(min(replays(3)) / 1e3, 1e-9))
        repeats = max(1, min(wanted, MAX_REPLAYED_CALLS // len(closures)))
    if repeats > 1:
        del graph  # before there is a second one: it holds memory
        graph = capture(closures, repeats)
    return GraphSampler(lambda count: [ms / (repeats * len(closures)) for ms in replays(count)], graph)


def capture(closures: Sequence[Action], repeats: int = 1) -> Replay:
    """A CUDA graph of calling all closures in turn, `repeats` times, replayed once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for closure in closures:
            closure()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    outputs: list[Any] = [None] * len(closures)
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for number, closure in enumerate(closures):
                outputs[number] = None  # before the call: its memory is what the next result takes
                outputs[number] = closure()
    graph.replay()
    torch.cuda.synchronize()
    return Replay(graph, outputs)
