"""The timer nvbench, with a stand-in for its package: rounds, setups, failures, and what it cannot do."""

import contextlib
import inspect
import itertools
import sys
import time
import types
from dataclasses import replace

import fake_nvbench
import pytest

from mtabench.errors import UsageError
from mtabench.measuring import nvbench_timer, timing
from mtabench.measuring.timing import Measurement, Settings, Timed, measure
from mtabench.sweeps.plan import Options, make_plan

QUICK = Settings(timer="nvbench", min_rounds=2, max_rounds=3, samples_per_round=4, time_limit_s=1.0)


@pytest.fixture
def nvbench(monkeypatch):
    """A fresh registry, and PyTorch without a GPU where it would choose NVBench's stream."""
    registry = fake_nvbench.Registry()
    module = types.ModuleType("cuda.bench")
    module.register, module.run_all_benchmarks = registry.register, registry.run_all_benchmarks
    results = types.ModuleType("cuda.bench.results")
    results.BenchmarkResult = fake_nvbench.BenchmarkResult
    monkeypatch.setitem(sys.modules, "cuda.bench", module)
    monkeypatch.setitem(sys.modules, "cuda.bench.results", results)
    monkeypatch.setattr(nvbench_timer, "on_stream_of", lambda state: contextlib.nullcontext())
    monkeypatch.setattr(nvbench_timer, "current_device", lambda: 3)
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.05)
    return registry


def test_a_known_sleep_is_measured_in_rounds(nvbench):
    found = measure({"cell": Timed(run=lambda _: time.sleep(0.002))}, "cpu", QUICK)["cell"]
    assert isinstance(found, Measurement), found
    assert [len(samples) for samples in found.rounds] == [4, 4, 4]
    assert all(2 <= ms < 20 for samples in found.rounds for ms in samples)
    assert (found.timer, found.cache) == ("nvbench", "cold")
    assert found.sm_clock_mhz == pytest.approx(1500)
    assert nvbench.arguments[:4] == ["mtabench", "--quiet", "--devices", "3"]
    assert nvbench.benchmarks[0].settings["set_stopping_criterion",] == "sample-count"


def test_a_setup_is_outside_the_window_and_its_value_is_given_to_run(nvbench):
    given = []

    def setup():
        time.sleep(0.02)
        return "graph"

    found = measure({"cell": Timed(run=given.append, setup=setup)}, "cpu", replace(QUICK, max_rounds=2))["cell"]
    assert max(ms for samples in found.rounds for ms in samples) < 10
    assert set(given) == {"graph"}


def test_the_cache_is_emptied_before_the_window_as_for_the_other_timers(nvbench, monkeypatch):
    order = []
    monkeypatch.setattr(timing, "cache_flush", lambda *_: lambda: (time.sleep(0.02), order.append("flush")))
    found = measure({"cell": Timed(run=lambda _: order.append("run"))}, "cpu", QUICK)["cell"]
    assert max(ms for samples in found.rounds for ms in samples) < 10
    sampled = 3 * (4 + 1)
    assert order[-2 * sampled :].count("flush") >= sampled - 3
    assert "run,run" not in ",".join(order[-8:])


def test_as_many_rounds_and_samples_as_fit_into_the_time_limit(nvbench):
    slow = Timed(run=lambda _: time.sleep(0.1))
    found = measure({"cell": slow}, "cpu", replace(QUICK, max_rounds=20, time_limit_s=0.5))["cell"]
    assert [len(samples) for samples in found.rounds] == [2, 2]


def test_what_a_call_raises_is_the_cells_failure(nvbench):
    def run(_):
        if nvbench.was_run:
            raise RuntimeError("planted")

    found = measure({"cell": Timed(run=run)}, "cpu", QUICK)["cell"]
    assert isinstance(found, RuntimeError)
    assert str(found) == "planted"


def test_a_second_measurement_in_a_process_is_refused_by_nvbench(nvbench):
    """That is why each cell has a process of its own."""
    cell = {"cell": Timed(run=lambda _: None)}
    assert isinstance(measure(cell, "cpu", QUICK)["cell"], Measurement)
    assert "after benchmark was run" in str(measure(cell, "cpu", QUICK)["cell"])


def test_no_samples_are_an_error(nvbench, monkeypatch):
    monkeypatch.setattr(fake_nvbench.State, "exec", lambda state, *_, **__: state.skip("too fast"))
    found = measure({"cell": Timed(run=lambda _: None)}, "cpu", QUICK)["cell"]
    assert "no samples of a round: too fast" in str(found)


def test_another_timer_takes_turns_with_it_round_by_round(nvbench):
    calls = []

    def run(_):
        calls.append("nvbench" if any(frame.function == "exec" for frame in inspect.stack()) else "cpu")
        time.sleep(0.002)

    settings = replace(QUICK, timer="cpu", min_rounds=3, time_limit_s=60.0)
    ours, beside = timing.measure_beside_nvbench(Timed(run=run), "cpu", settings)
    assert (ours.timer, beside.timer) == ("cpu", "nvbench")
    assert [len(samples) for samples in ours.rounds] == [2] * 6
    assert [len(samples) for samples in beside.rounds] == [4, 4, 4]
    turns = [(timer, len(list(group))) for timer, group in itertools.groupby(calls)]
    between = nvbench_timer.WARM_UP_CALLS + 2 * 2
    assert turns[-6:] == [
        ("nvbench", 5),
        ("cpu", between),
        ("nvbench", 5),
        ("cpu", between),
        ("nvbench", 5),
        ("cpu", 2),
    ]


def test_what_a_call_raises_beside_another_timer_is_raised(nvbench):
    def run(_):
        if nvbench.was_run:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        timing.measure_beside_nvbench(Timed(run=run), "cpu", replace(QUICK, timer="cpu"))


def test_a_sweep_with_nvbench_has_a_process_for_each_cell(nvbench, monkeypatch):
    monkeypatch.setattr(nvbench_timer, "check_nvbench", lambda: None)
    plan = make_plan(Options("fwd", timer="nvbench", cell_timeout=60), device="cuda")
    assert plan.options.isolate


@pytest.mark.parametrize(
    ("options", "device", "sentence"),
    [
        ({}, "cpu", "--timer nvbench measures on a GPU, and this sweep runs on the CPU"),
        ({"cache": "warm"}, "cuda", "--cache warm cannot be had with --timer nvbench"),
        ({}, "cuda", "needs NVIDIA's package cuda-bench, which is not installed"),
    ],
)
def test_what_nvbench_cannot_do_is_said(options, device, sentence, monkeypatch):
    monkeypatch.setattr(nvbench_timer, "PACKAGE", "no_such_package.bench")
    with pytest.raises(UsageError, match=sentence):
        make_plan(Options("fwd", timer="nvbench", **options), device=device)
