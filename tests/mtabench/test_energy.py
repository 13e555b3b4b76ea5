"""Energy of a call by a counter that moves in steps, and the names that a profiler sees; with stand-ins for the GPU."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from command_line import make_runner

from mta_kernels.operation import Operation
from mtabench import environment
from mtabench.measuring import timing
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.timing import Measurement, Timed
from mtabench.problem.case import Case
from mtabench.results.rows import RunFacts, timed_row
from mtabench.sweeps import sweep

STEP_S = 0.1


class Gpu:
    """A clock and a counter: a call takes time and power, the counter shows what was taken until its last step."""

    def __init__(self, monkeypatch, idle_watts=100.0):
        self.now, self.joules, self.idle_watts = 0.0, 0.0, idle_watts
        self.shown, self.calls = 0.0, 0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def work(self, seconds, watts):
        def call():
            self.calls += 1
            end = self.now + seconds
            while self.now < end:
                step_end = min(end, (int(self.now / STEP_S + 1e-9) + 1) * STEP_S)
                self.joules += (step_end - self.now) * watts
                self.now = step_end
                if abs(self.now / STEP_S - round(self.now / STEP_S)) < 1e-9:
                    self.shown = self.joules

        return call

    def read(self):
        return self.shown

    def wait(self):
        pass


@pytest.mark.parametrize("seconds", [20e-6, 0.003, 0.07, 2.5])
def test_the_energy_of_a_call_is_found_however_long_it_is(monkeypatch, seconds):
    gpu = Gpu(monkeypatch)
    found = timing.joules(gpu.work(seconds, 500.0), gpu.read, gpu.wait)
    assert found == pytest.approx(500.0 * seconds, rel=0.05)
    assert gpu.now < max(3.0, 3 * seconds)


def test_a_counter_that_is_not_there_or_does_not_move_gives_nothing(monkeypatch):
    gpu = Gpu(monkeypatch)
    assert timing.joules(gpu.work(0.01, 500.0), lambda: None, gpu.wait) is None
    assert gpu.calls == 0
    assert timing.joules(gpu.work(0.01, 500.0), lambda: 7.0, gpu.wait) is None
    assert gpu.now < 5


@pytest.fixture
def sensor(monkeypatch):
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    return SimpleNamespace(gpu=gpu, energy_j=gpu.read)


def test_a_backward_is_counted_without_the_forward_before_it(sensor):
    forward, backward = sensor.gpu.work(0.02, 300.0), sensor.gpu.work(0.05, 600.0)
    found = timing._energy(Timed(run=lambda state: backward(), setup=forward), sensor)
    assert found == pytest.approx(30.0, rel=0.1)


def test_a_decode_step_is_a_part_of_a_replay(sensor, monkeypatch):
    replay = sensor.gpu.work(0.004, 400.0)
    monkeypatch.setattr(timing, "capture", lambda closures: SimpleNamespace(replay=replay))
    cell = Timed(run=lambda state: None, rotations=lambda: [lambda: None] * 8)
    assert timing._energy(cell, sensor) == pytest.approx(0.2, rel=0.05)


def test_nvml_counts_millijoules_where_it_counts_at_all(monkeypatch):
    reasons = [0x00]
    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons[-1],
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 12_500,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1"))
    assert environment.GpuSensor().energy_j() == 12.5

    def unsupported(handle):
        raise RuntimeError("Not Supported")

    nvml.nvmlDeviceGetTotalEnergyConsumption = unsupported
    found = environment.GpuSensor()
    assert found.energy_j() is None
    for reason, throttled in ((0x00, False), (0x04, False), (0x08, True), (0x40, True)):  # a power cap is none, heat is
        reasons.append(reason)
        assert found.read() == (1980.0, throttled)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert environment.GpuSensor().energy_j() is None


@pytest.mark.parametrize(("pass_", "tokens"), [("fwd", 4 * 128), ("bwd", 4 * 128), ("decode", 4)])
def test_tokens_per_joule_are_those_of_a_call(pass_, tokens):
    case = Case(pass_, "eager", Operation.of((3, 3), 16), "bf16", 4, 2, 2, 128, 16, None, "cuda")
    measurement = Measurement("events", "cold", [[1.0, 1.0]] * 2)
    facts = RunFacts("run", "2026-01-02T03:04:05Z", {})
    row = timed_row(case, facts, measurement, None, None)
    assert (row["energy_j"], row["tokens_per_joule"]) == (None, None)
    measurement.energy_j = 0.5
    assert timed_row(case, facts, measurement, None, None)["tokens_per_joule"] == 2 * tokens


def test_ranges_name_every_cell_and_phase(tmp_path, monkeypatch, capsys):
    """As a GPU would have them: the ranges of the CPU are recorded instead."""
    names = []

    @contextmanager
    def recorded(name):
        names.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", recorded)
    for module in (sweep, timing):
        monkeypatch.setattr(module, "phase", lambda device, name, phase=timing.phase: phase("cuda", name))
    monkeypatch.setattr(sweep, "measure_ceilings", lambda device, dtype: Ceilings(10.0, 0.1, 12.0))
    run = make_runner(monkeypatch, capsys, tmp_path)
    small = ("--device", "cpu", "--head-dim", "16", "--heads", "2", "--conv", "3x3", "--rounds", "2", "--seq", "16")
    assert run("fwd", *small, "--impl", "eager,sdpa-math", "--no-plot")[0] == 0
    eager, plain = "fp32 1 x 2 heads of 16, seq 16, conv 3x3", "fp32 1 x 2 heads of 16, seq 16"
    assert names[:3] == [f"{eager}, eager: verify", f"{plain}, sdpa-math: verify", f"{eager}: time"]
    assert names[3:5] == ["eager: warm up", "sdpa-math: warm up"]
    assert sorted(names[5:-2]) == ["eager: measure"] * 2 + ["sdpa-math: measure"] * 2
    assert names[-2:] == ["eager: verify", "sdpa-math: verify"]
