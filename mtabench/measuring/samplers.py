"""Three clocks: wall time on a CPU, CUDA events around calls, and replays of a CUDA graph; caches cold before them."""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns  # bound before a file of --impl could replace them
from typing import Any

import torch

from mtabench.environment import l2_bytes

Run = Callable[[Any], Any]  # takes what came before its window returned
Action = Callable[[], Any]  # what comes before a window, a wait
Look = Callable[[Sequence[Any]], Any]  # right behind the last window: at results, each of a call in it
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
PAGE_BYTES = 2 * 2**20  # of a GPU's memory
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED: a GPU whose L2 cache has no set-aside


def cpu_sampler(run: Run, before: Action, synchronize: Action, look: Look) -> Sampler:
    """Wall time of `run(before())`, of which `before()` lies outside the window; on a GPU launches included."""

    def sample(count: int) -> list[float]:
        times = []
        result = None
        for _ in range(count):
            result = None  # its memory is what the next result takes
            state = before()
            synchronize()
            started = perf_counter_ns()
            result = run(state)
            synchronize()
            times.append((perf_counter_ns() - started) / 1e6)
            del state
        look([result])
        return times

    return sample


def events_sampler(run: Run, before: Action, look: Look, call_s: float, *, several: bool) -> Sampler:
    """Time on the GPU between two events around `run(before())`, of which `before()` lies outside the window.

    With `several`, a window holds several calls of a short kernel, of about `call_s` seconds. Before a window the GPU
    spins for as long as the CPU takes to launch its calls, so that no late launch is measured.
    """
    calls = max(1, min(MAX_CALLS, math.ceil(SHORTEST_WINDOW_S / max(call_s, 1e-9)))) if several else 1

    def window(hold_s: float) -> tuple[torch.cuda.Event, torch.cuda.Event, float, Any]:
        """The events around a window, the seconds that it took the CPU to launch it, and what its last call gave."""
        state, result = before(), None
        if hold_s:
            torch.cuda._sleep(int(hold_s * FASTEST_CLOCK_HZ))
        started = perf_counter()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            result = run(state)
        end.record()
        return start, end, perf_counter() - started, result

    def launch_s() -> float:
        torch.cuda.synchronize()
        return window(0.0)[2]

    hold_s = max(launch_s() for _ in range(3)) if call_s <= LONGEST_HELD_S else 0.0

    def sample(count: int) -> list[float]:
        windows, result = [], None
        for _ in range(count):
            result = None  # its memory is what the next result takes
            *events, _, result = window(hold_s)
            windows.append(events)
        look([result])
        del result
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / calls for start, end in windows]

    return sample


@dataclass(slots=True)
class Replay:
    """A CUDA graph, and where a replay writes what each of its closures gave last."""

    graph: torch.cuda.CUDAGraph
    outputs: list[Any]

    def replay(self) -> None:
        """Launch it."""
        self.graph.replay()


def graph_sampler(closures: Sequence[Action], before: Action, look: Look, *, several: bool) -> Sampler:
    """Time of replaying `closures`, a call each; no launch overhead. Captures at once.

    A window holds every closure once, or with `several` as many calls as last `SHORTEST_REPLAY_S` on the GPU, whatever
    the CPU takes to launch them.
    """
    graph, repeats = capture(closures), 1

    def replays(count: int, look: Look) -> list[float]:
        """The time of each, in ms."""
        windows = []
        for _ in range(count):
            before()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            windows.append((start, end))
        look(graph.outputs)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in windows]

    if several:
        wanted = math.ceil(SHORTEST_REPLAY_S / max(min(replays(3, lambda results: None)) / 1e3, 1e-9))
        repeats = max(1, min(wanted, MAX_REPLAYED_CALLS // len(closures)))
    if repeats > 1:
        del graph  # before there is a second one: it holds memory
        graph = capture(closures, repeats)
    return lambda count: [ms / (repeats * len(closures)) for ms in replays(count, look)]


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


def cache_flush(device: str, cache: str) -> Callable[[], Any] | None:
    """Overwrites twice the L2 cache, whose persisting lines are ordinary from here on; None where caches stay warm.

    By a memset, and then a byte of every page by an ordinary kernel: after the memset alone, what NVBench launches
    before a call makes some kernels of 10 to 40 us half a microsecond longer (docs/comparing.md).
    """
    if device != "cuda":
        return None
    reset_persisting_lines()
    if cache == "warm":
        return None
    buffer = torch.empty(2 * l2_bytes(), dtype=torch.uint8, device="cuda")
    of_pages = buffer[::PAGE_BYTES]

    def flush() -> None:
        buffer.zero_()
        of_pages.zero_()

    return flush


def clean_lines() -> Callable[[], Any]:
    """Reads twice the L2 cache, so that none of its lines has still to be written back when a window begins."""
    return torch.zeros(2 * l2_bytes() // 8, dtype=torch.int64, device="cuda").max


def reset_persisting_lines() -> None:
    """Make all persisting lines of the current GPU's L2 cache ordinary ones.

    A kernel may mark what it reads as persisting, in a set-aside part of the cache. Such lines outlive its process and
    are not overwritten by a flush, so that later kernels have less of the cache. Raises RuntimeError if the driver
    refuses.
    """
    torch.cuda.current_stream().synchronize()  # PyTorch's context is this thread's from here on
    if (result := ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()) not in (0, NOT_SUPPORTED):
        raise RuntimeError(f"the CUDA driver does not reset the L2 cache's persisting lines: error {result}")
