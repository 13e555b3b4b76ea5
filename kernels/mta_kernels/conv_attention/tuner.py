"""Choose tile sizes and backends by measuring: candidates are run, checked and timed; `tile_sizes` keeps the best.

`tune` is called when a person asks for it, never by a kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mta_kernels.conv_attention import tile_sizes
from mta_kernels.conv_attention.backends import CONV_ATTENTION, tuned_as
from mta_kernels.conv_attention.triton.tunable_kernels import KERNELS, Problem, TunedShape
from mta_kernels.gpu_limits import compiled_capability

__all__ = ["OK", "PASSES", "Trial", "TunedShape", "fastest", "tunable", "tune"]

# What is tuned for each pass. Backends are compared after Triton's tiles have been tuned.
PASSES = {
    "fwd": ("forward", "forward_backend"),
    "bwd": ("probabilities", "value_gradients", "training_backend"),
    "decode": ("decode", "decode_bulk"),
}
OK = "ok"
# Right results differ by their rounding. A fault in a few rows hides in a norm over thousands: each has a bound too.
UNITS_OF_ROUNDING, LEAST_TOLERANCE, ROW_FACTOR = 4, 1e-5, 4
WARM_UP_SECONDS, SECONDS = 0.2, 2.0
MIN_ROUNDS, MAX_ROUNDS = 5, 50


@dataclass(frozen=True)
class Trial:
    """A candidate, its time on the GPU if its result is right, and else why it cannot be chosen."""

    config: Any
    microseconds: float | None
    status: str


Measure = Callable[[Sequence[Callable[[], Any]], bool], list[float]]


def tunable(pass_: str, shape: TunedShape, device: torch.device) -> list[str]:
    """What `tune` can choose for a pass, one of PASSES, on a device: no kernel that never runs, no lone backend."""
    from mta_kernels.conv_attention.triton.decode_plan import bulk_pays

    def is_able(kernel: str) -> bool:
        if kernel == "decode_bulk":
            group, element = shape.heads // shape.kv_heads, shape.dtype.itemsize
            return bulk_pays(shape.head_dim, group, element, compiled_capability(device))
        request = shape.request(kernel == tuned_as(True), device)
        return not kernel.endswith("_backend") or len(CONV_ATTENTION.able(request)) > 1

    return [kernel for kernel in PASSES[pass_] if is_able(kernel)]


def tune(kernel: str, shape: TunedShape, *, path: Path | None = None, measure: Measure | None = None) -> list[Trial]:
    """Try every candidate of `kernel`, one of KERNELS, on the current GPU, and save the fastest whose result is right.

    Right is what agrees with the first candidate, the kernel's own guess, within rounding. `path` is the file to save
    in, the user's if None; nothing is saved if no candidate runs. Trials come in the candidates' order.
    `measure(calls, cold)` gives microseconds a call, as `time_in_turns` does.
    Raises ValueError for an unknown kernel or without a GPU, OSError if the file cannot be written, RuntimeError if
    the inputs do not fit or a candidate breaks the GPU's context.
    """
    if kernel not in KERNELS:
        raise ValueError(f"there is no kernel {kernel!r}; expected one of {', '.join(KERNELS)}")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    name = tile_sizes.device_name(device)
    if not name:
        raise ValueError(f"kernels are tuned on a CUDA GPU, not on a {device.type} device")
    problem = KERNELS[kernel](shape, device)
    statuses = _check(problem, shape.dtype, device)
    right = [config for config, status in zip(problem.candidates, statuses, strict=True) if status == OK]
    times = iter(
        (measure or time_in_turns)([partial(problem.run, config) for config in right], kernel.startswith("decode"))
    )
    trials = [
        Trial(config, next(times) if status == OK else None, status)
        for config, status in zip(problem.candidates, statuses, strict=True)
    ]
    best = fastest(trials)
    if best is not None:
        measured = {
            "batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads, "seq_len": shape.seq_len,
            "microseconds": _rounded(best), "heuristic_microseconds": _rounded(trials[0]),
            "triton": tile_sizes.triton_version(),
        }  # fmt: skip
        tile_sizes.save([tile_sizes.Entry(kernel, shape.key(kernel), asdict(best.config), measured)], name, path)
    return trials


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """The right one that took the least time; None if none is right."""
    timed = [trial for trial in trials if trial.microseconds is not None]
    return min(timed, key=lambda trial: trial.microseconds or 0.0, default=None)


def time_in_turns(calls: Sequence[Callable[[], Any]], cold: bool) -> list[float]:
    """Median microseconds on the GPU of each call, with no launches counted: replays of CUDA graphs, in turns.

    Before each, L2 is flushed if `cold`; else it holds what the call itself left there.
    """
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            call()
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.zeros(2 * l2_bytes if cold else 0, dtype=torch.uint8, device="cuda").zero_
    started = time.perf_counter()
    while graphs and time.perf_counter() - started < WARM_UP_SECONDS:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
    samples: list[list[float]] = [[] for _ in graphs]
    started = time.perf_counter()
    for number in range(MAX_ROUNDS):
        windows = []
        for index in range(len(graphs)) if number % 2 == 0 else reversed(range(len(graphs))):
            # Also keeps the GPU busy while the window is launched.
            (flush if cold else graphs[index].replay)()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[index].replay()
            end.record()
            windows.append((index, start, end))
        torch.cuda.synchronize()
        for index, start, end in windows:
            samples[index].append(start.elapsed_time(end) * 1e3)
        if number + 1 >= MIN_ROUNDS and time.perf_counter() - started > SECONDS:
            break
    return [median(times) for times in samples]


def _check(problem: Problem, dtype: torch.dtype, device: torch.device) -> list[str]:
    """OK or what is wrong with each candidate: those that run are held to the first that gives numbers."""
    statuses = []
    reference: list[Tensor] = []
    tolerance = max(UNITS_OF_ROUNDING * torch.finfo(dtype).eps, LEAST_TOLERANCE)
    for config in problem.candidates:
        try:
            result = problem.run(config)
            _synchronize(device)
        except Exception as error:
            _synchronize(device)  # raises if the GPU's context is broken: then nothing else would run
            statuses.append(f"failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            continue
        is_right = _agree(result, reference or result, tolerance)
        statuses.append(OK if is_right else "wrong: differs from the first" if reference else "wrong: not numbers")
        if is_right and not reference:
            reference = [x.clone() for x in result]
        for x in result:  # so that a candidate that writes nothing is not right by what an earlier one left in memory
            x.fill_(problem.blank)
    return statuses


def _agree(result: Sequence[Tensor], reference: Sequence[Tensor], tolerance: float) -> bool:
    """Whether both are the same but for rounding, as a whole and row by row; NaN agrees with nothing."""
    for got, wanted in zip(result, reference, strict=True):
        errors = torch.linalg.vector_norm(got - wanted, dim=-1, dtype=torch.float32)
        norms = torch.linalg.vector_norm(wanted, dim=-1, dtype=torch.float32)
        bound = tolerance * norms.clamp_min(norms.square().mean().sqrt())
        if not (errors.norm() <= tolerance * norms.norm() and (errors <= ROW_FACTOR * bound).all()):
            return False
    return True


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rounded(trial: Trial) -> float | None:
    return None if trial.microseconds is None else round(trial.microseconds, 2)
