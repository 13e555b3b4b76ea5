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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtabench.errors import UsageError
from mtabench.measuring.samplers import Action, Look, Run

PACKAGE = "cuda.bench"
NAME = "cell"
AXIS = "Round"
WARM_UP_CALLS = 3


@dataclass(frozen=True, slots=True)
class NvbenchSamples:
    """Samples in ms by round, and the SM clock that NVBench saw in them, None if it kept none."""

    rounds: list[list[float]]
    sm_clock_mhz: float | None


def check_nvbench() -> None:
    """Raise UsageError if the package is not installed."""
    try:
        found = importlib.util.find_spec(PACKAGE)
    except ModuleNotFoundError:  # there is no package `cuda` at all
        found = None
    if found is None:
        raise UsageError(
            "--timer nvbench needs NVIDIA's package cuda-bench, which is not installed; "
            "pip install -e '.[nvbench]' in the checkout, or take --timer events"
        )


def sample_with_nvbench(
    run: Run, before: Action, look: Look, rounds: int, samples: int, timeout_s: float, beside: Action,
    within: Callable[[], AbstractContextManager[Any]],
) -> NvbenchSamples:  # fmt: skip
    """Time `run(before())` on the current GPU, `before()` outside the window; a process can do this once.

    Each round is a measurement of NVBench with a warm-up of its own, of so many samples unless it takes longer than
    `timeout_s`. `beside` is called before and after it, on the same stream, where memory comes from the same places.
    Samples are taken `within` a context. Raises what the call raises, and RuntimeError if NVBench has no samples of a
    round.
    """
    bench = importlib.import_module(PACKAGE)
    reader = importlib.import_module(f"{PACKAGE}.results").BenchmarkResult
    errors: list[Exception] = []
    result: Any = None

    def call(launch: Any, timer: Any) -> None:
        nonlocal result
        result = None  # its memory is what the next result takes
        given = before()
        timer.start()
        result = run(given)
        timer.stop()

    def measure_round(state: Any) -> None:
        nonlocal result
        try:
            with on_stream_of(state):
                with within():
                    for _ in range(WARM_UP_CALLS):  # memory that a held GPU would wait for is allocated for each stream
                        run(before())
                beside()
                with within():
                    state.exec(call, timer=True)
                    look([result])
                    result = None
                beside()
        except Exception as error:
            errors.append(error)
            state.skip(str(error))

    benchmark = bench.register(measure_round)
    benchmark.set_name(NAME)
    benchmark.add_int64_axis(AXIS, list(range(1, rounds + 1)))
    benchmark.set_stopping_criterion("sample-count")
    benchmark.set_criterion_param_int64("target-samples", samples)
    benchmark.set_min_samples(samples)
    benchmark.set_timeout(timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples.json")
        bench.run_all_benchmarks(["mtabench", "--quiet", "--devices", str(current_device()), "--jsonbin", str(path)])
        if errors:
            raise errors[0]
        states = list(reader.from_json(path)[NAME])
    for state in states:
        if not state.samples:
            raise RuntimeError(f"NVBench has no samples of a round: {state.skip_reason or 'it does not say why'}")
    clocks = [hertz for state in states for hertz in state.frequencies or ()]
    return NvbenchSamples(
        [[1e3 * seconds for seconds in state.samples] for state in states],
        float(np.median(clocks)) / 1e6 if clocks else None,
    )


def on_stream_of(state: Any) -> AbstractContextManager[Any]:
    """PyTorch's work goes to the stream that NVBench times."""
    return torch.cuda.stream(torch.cuda.ExternalStream(state.get_stream().addressof(), device=state.get_device()))


def current_device() -> int:
    """The index of the GPU in use, as CUDA counts those that it sees."""
    return torch.cuda.current_device()
