"""The events timer on a GPU of a few lines, whose CPU is slow to launch."""

from __future__ import annotations

import pytest

from mtabench.measuring import samplers

LAUNCH_S, FLUSH_S = 2e-4, 3e-5


class FakeGpu:
    """One stream. What is launched at the CPU's time `now` runs when all before it is over."""

    def __init__(self, clock_hz: float) -> None:
        self.clock_hz = clock_hz
        self.now = self.free = 0.0
        self.held_s = 0.0

    def launch(self, seconds: float, launch_s: float = LAUNCH_S) -> None:
        self.now += launch_s
        self.free = max(self.free, self.now) + seconds

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
    monkeypatch.setattr(samplers.time, "perf_counter", lambda: gpu.now)
    return gpu


@pytest.mark.parametrize("launches", [1, 7])
@pytest.mark.parametrize("kernel_s", [1e-5, 1e-3])
@pytest.mark.parametrize("cold", [True, False])
def test_a_late_launch_is_not_measured(gpu, launches, kernel_s, cold):
    def run(state):
        for _ in range(launches):
            gpu.launch(kernel_s)

    flush = (lambda: gpu.launch(FLUSH_S)) if cold else None
    sample = samplers.events_sampler(run, None, flush, launches * kernel_s)
    assert sample(5) == pytest.approx([1e3 * launches * kernel_s] * 5)


def test_without_waiting_it_would_be(gpu, monkeypatch):
    monkeypatch.setattr(samplers, "LONGEST_HELD_S", -1.0)
    sample = samplers.events_sampler(lambda _: gpu.launch(1e-5), None, lambda: gpu.launch(FLUSH_S), 1e-5)
    assert max(sample(5)) > 10 * 1e-2


def test_a_long_call_is_not_called_once_more_for_that(gpu):
    calls = []
    samplers.events_sampler(calls.append, None, None, 1.0)
    assert not calls
