"""What a device can do at most, as measured: memory bandwidth by a copy, arithmetic by a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from mtabench.sweeps.inputs import DTYPES, use_full_float32

CALLS = 10
SECONDS = 0.2  # for each of the two
# A copy must be much larger than the caches, a product large enough to fill the device.
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
MATMUL_SIZE_SLOW = 512  # 16-bit products on a CPU without instructions for them


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes read and written by a copy in GB/s, and arithmetic of a matrix product in TFLOP/s."""

    copy_gbytes_s: float
    matmul_tflops: float


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """The best of a few calls on "cuda" or "cpu" in "fp16", "bf16" or "fp32", in under a second once warm.

    Raises torch.OutOfMemoryError if the device has no room for 2 GiB (a CPU: 256 MiB).
    """
    use_full_float32()
    source = torch.ones(COPY_BYTES[device] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = _best_seconds(partial(target.copy_, source), device)
    del source, target
    size = MATMUL_SIZE_SLOW if device == "cpu" and dtype != "fp32" else MATMUL_SIZE[device]
    left, right = (torch.randn(size, size, dtype=DTYPES[dtype], device=device) for _ in range(2))
    out = torch.empty_like(left)
    matmul_s = _best_seconds(partial(torch.mm, left, right, out=out), device)
    return Ceilings(2 * COPY_BYTES[device] / copy_s / 1e9, 2 * size**3 / matmul_s / 1e12)


def _best_seconds(call: Callable[[], object], device: str) -> float:
    """The fastest call: a ceiling is what the device can do, not what it does on average."""
    call()
    best, started = float("inf"), time.perf_counter()
    for _ in range(CALLS):
        best = min(best, _seconds(call, device))
        if time.perf_counter() - started > SECONDS:
            break
    return best


def _seconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
