"""NVBench as a second opinion: NVIDIA's own timer measures the same call (https://github.com/NVIDIA/nvbench).

It flushes the L2 cache before each sample and holds the GPU until the call is queued, so that no launch is measured.
Ours is flushed before that, as for the other timers: NVBench's own flush leaves a part of the cache.
Its package is cuda-bench, whose benchmarks are registered and run once a process.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mtabench.environment import GpuSensor
from mtabench.errors import UsageError
from mtabench.measuring.samplers import cache_flush
from mtabench.measuring.timing import Lane, Settings, Timed, synchronize

PACKAGE = "cuda.bench"
NAME = "cell"
AXIS = "Round"
WARM_UP_CALLS = 3

Rounds = list[list[float]]


def check_nvbench() -> None:
    """Raise UsageError if the package is not installed."""
    try:
        found = importlib.util.find_spec(PACKAGE)
    except ModuleNotFoundError:  # there is no package `cuda` at all
        found = None
    if found is None:
        raise UsageError(
            "the package cuda-bench of NVIDIA is not installed; type pip install -e '.[nvbench]' in the checkout"
        )


def measure_beside_nvbench(cell: Timed, device: str, settings: Settings) -> tuple[Rounds, Rounds]:
    """Samples in ms of a forward by `settings.timer` and by NVBench, `settings.min_rounds` each, once a process.

    Our round is measured in halves, before and after NVBench's, on the same stream. Both time the same closure on the
    same memory at the same clock. Both wait for an idle GPU before each sample, so only the timers differ. Raises what
    the call raises.
    """
    halves = replace(
        settings,
        samples_per_round=max(1, settings.samples_per_round // 2),
        min_rounds=2 * settings.min_rounds,
        max_rounds=2 * settings.min_rounds,
    )
    flush, wait = cache_flush(device, settings.cache), synchronize(device)

    def flush_and_wait() -> None:
        if flush is not None:
            flush()
        wait()

    lane = Lane(cell, device, halves, flush_and_wait, GpuSensor() if device == "cuda" else None)
    nvbench = _sampled(cell, flush or (lambda: None), settings, lane.take_round)
    return lane.measurement.rounds, nvbench


def _sampled(cell: Timed, flush: Callable[[], Any], settings: Settings, beside: Callable[[], Any]) -> Rounds:
    """NVBench's samples of the cell on the current GPU, flushed outside the window; `beside` is called around a round.

    Each round is a measurement of NVBench with a warm-up of its own. Raises what the call raises, and RuntimeError if
    NVBench has no samples of a round.
    """
    bench = importlib.import_module(PACKAGE)
    reader = importlib.import_module(f"{PACKAGE}.results").BenchmarkResult
    errors: list[Exception] = []
    result: Any = None

    def call(launch: Any, timer: Any) -> None:
        nonlocal result
        result = None  # its memory is what the next result takes
        flush()
        timer.start()
        result = cell.run(None)
        timer.stop()

    def measure_round(state: Any) -> None:
        try:
            with on_stream_of(state):
                for _ in range(WARM_UP_CALLS):  # memory that a held GPU would wait for is allocated for each stream
                    cell.run(None)
                beside()
                state.exec(call, timer=True)
                beside()
        except Exception as error:
            errors.append(error)
            state.skip(str(error))

    benchmark = bench.register(measure_round)
    benchmark.set_name(NAME)
    benchmark.add_int64_axis(AXIS, list(range(1, settings.min_rounds + 1)))
    benchmark.set_stopping_criterion("sample-count")
    benchmark.set_criterion_param_int64("target-samples", settings.samples_per_round)
    benchmark.set_min_samples(settings.samples_per_round)
    benchmark.set_timeout(settings.time_limit_s)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples.json")
        bench.run_all_benchmarks(["mtabench", "--quiet", "--devices", str(current_device()), "--jsonbin", str(path)])
        if errors:
            raise errors[0]
        states = list(reader.from_json(path)[NAME])
    for state in states:
        if not state.samples:
            raise RuntimeError(f"NVBench has no samples of a round: {state.skip_reason or 'it does not say why'}")
    return [[1e3 * seconds for seconds in state.samples] for state in states]


def on_stream_of(state: Any) -> AbstractContextManager[Any]:
    """PyTorch's work goes to the stream that NVBench times."""
    return torch.cuda.stream(torch.cuda.ExternalStream(state.get_stream().addressof(), device=state.get_device()))


def current_device() -> int:
    """The index of the GPU in use, as CUDA counts those that it sees."""
    return torch.cuda.current_device()
