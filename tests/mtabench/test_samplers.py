"""Samples of calls on a GPU that is stood in for: windows, graphs, and the caches before them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from mtabench.measuring import samplers

LAUNCH_S, FLUSH_S, EDGES_S = 2e-4, 3e-5, 5e-6


class FakeGpu:
    """One stream. What is launched at the CPU's time `now` runs when all before it is over."""

    def __init__(self, clock_hz: float) -> None:
        self.clock_hz = clock_hz
        self.now = self.free = 0.0
        self.held_s = self.busy_s = 0.0

    def launch(self, seconds: float, launch_s: float = LAUNCH_S) -> None:
        self.now += launch_s
        self.free = max(self.free, self.now) + seconds
        self.busy_s += seconds

    def hold(self, cycles: int) -> None:
        self.held_s += cycles / self.clock_hz
        self.launch(cycles / self.clock_hz, launch_s=0.0)

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def event(self, enable_timing: bool) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = max(self.gpu.now, self.gpu.free)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture(params=[3e8, 1.98e9, 2.9e9], ids=["idle clock", "H200", "fast clock"])
def gpu(request, monkeypatch):
    gpu = FakeGpu(request.param)
    monkeypatch.setattr(samplers.torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(samplers.torch.cuda, "_sleep", gpu.hold)
    monkeypatch.setattr(samplers.torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(samplers, "perf_counter", lambda: gpu.now)
    return gpu


@pytest.mark.parametrize("launches", [1, 7])
@pytest.mark.parametrize("kernel_s", [1e-5, 1e-3])
@pytest.mark.parametrize("cold", [True, False])
def test_a_late_launch_is_not_measured(gpu, launches, kernel_s, cold):
    def run(state):
        for _ in range(launches):
            gpu.launch(kernel_s)

    before = (lambda: gpu.launch(FLUSH_S)) if cold else (lambda: None)
    sample = samplers.events_sampler(run, before, len, launches * kernel_s, several=not cold)
    assert sample(5) == pytest.approx([1e3 * launches * kernel_s] * 5)


def test_a_long_call_is_not_called_once_more_for_that(gpu):
    calls = []
    samplers.events_sampler(calls.append, lambda: None, len, 1.0, several=True)
    assert not calls


class FakeGraph:
    """What closures launch, in one launch; it takes the GPU a moment to begin and to end."""

    def __init__(self, gpu: FakeGpu, closures, repeats: int) -> None:
        self.gpu, self.calls, self.outputs = gpu, repeats * len(closures), [repeats]
        before = gpu.busy_s
        for closure in closures:
            closure()
        self.seconds = EDGES_S + repeats * (gpu.busy_s - before)

    def replay(self) -> None:
        self.gpu.launch(self.seconds, launch_s=0.0)


@pytest.fixture
def captured(gpu, monkeypatch):
    """Calls of each graph that was captured; there is one graph at a time."""
    calls, graphs = [], []

    def capture(closures, repeats=1):
        assert not any(graph() for graph in graphs)
        graph = FakeGraph(gpu, closures, repeats)
        calls.append(graph.calls)
        graphs.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(samplers, "capture", capture)
    return calls


@pytest.mark.parametrize(
    ("kernel_s", "rotations", "calls"),
    [
        (3e-4, 1, [1, 14]),
        (3e-4, 2, [2, 14]),
        (1.3e-3, 2, [2, 4]),
        (6e-3, 1, [1]),
        (6e-3, 2, [2]),
        (1e-6, 1, [1, 512]),
        (1e-6, 300, [300]),
    ],
)
def test_a_graph_holds_calls_for_the_time_they_take_on_the_gpu(gpu, captured, kernel_s, rotations, calls):
    """Not for that in which the CPU launches them, which here is longer for most."""
    sample = samplers.graph_sampler([lambda: gpu.launch(kernel_s)] * rotations, lambda: None, len, several=True)
    assert captured == calls
    assert sample(4) == pytest.approx([1e3 * (kernel_s + EDGES_S / calls[-1])] * 4)
    if calls[-1] < 300:
        assert EDGES_S / (calls[-1] * kernel_s) < 0.002


def test_a_graph_of_cold_calls_holds_each_once(gpu, captured):
    cold = lambda: gpu.launch(FLUSH_S)  # noqa: E731
    sample = samplers.graph_sampler([lambda: gpu.launch(1e-3)] * 2, cold, len, several=False)
    assert captured == [2]
    assert sample(3) == pytest.approx([1e3 * (1e-3 + EDGES_S / 2)] * 3)


@pytest.mark.parametrize("several", [True, False])
def test_one_result_is_kept_at_a_time_and_looked_at_before_anybody_waits(gpu, captured, several):
    """Of a call as of the next one: its memory is what the next takes. None is kept behind the last window."""

    class Result:
        pass

    given, seen = [], []

    def run(_):
        assert not any(result() for result in given[:-1])
        gpu.launch(1e-3)
        given.append(weakref.ref(result := Result()))
        return result

    def look(results):
        seen.append((results == [given[-1]()], gpu.now < gpu.free))

    sample = samplers.events_sampler(run, lambda: None, look, 1e-3, several=several)
    assert not any(result() for result in given)
    sample(4)
    assert seen == [(True, True)]
    assert not any(result() for result in given)
    graph = samplers.graph_sampler([lambda: gpu.launch(1e-3)], lambda: None, seen.append, several=several)
    assert len(seen) == 1
    graph(2)
    assert seen[1:] == [[4 if several else 1]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that is not there: what was done to it, in `done`; its driver returns `result`."""
    fake = SimpleNamespace(done=[], result=0)

    def reset() -> int:
        fake.done.append("reset")
        return fake.result

    def empty(size: int, **options: object) -> torch.Tensor:
        fake.done.append("buffer")
        return torch.ones(size, dtype=torch.uint8)

    stream = SimpleNamespace(synchronize=lambda: fake.done.append("context"))
    monkeypatch.setattr(samplers.ctypes, "CDLL", lambda name: SimpleNamespace(cuCtxResetPersistingL2Cache=reset))
    monkeypatch.setattr(samplers, "l2_bytes", lambda: 5 * samplers.PAGE_BYTES)
    monkeypatch.setattr(samplers.torch, "empty", empty)
    monkeypatch.setattr(samplers.torch.cuda, "current_stream", lambda: stream)
    return fake


def test_persisting_lines_are_reset_in_a_context_before_the_first_flush(calls: SimpleNamespace) -> None:
    flush = samplers.cache_flush("cuda", "cold")
    assert flush is not None
    assert calls.done == ["context", "reset", "buffer"]
    flush()


def test_a_driver_that_refuses_is_not_passed_over(calls: SimpleNamespace) -> None:
    calls.result = 201
    with pytest.raises(RuntimeError, match="does not reset the L2 cache's persisting lines: error 201"):
        samplers.cache_flush("cuda", "cold")
