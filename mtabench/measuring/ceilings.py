"""What a device can do at most, as measured: memory bandwidth by copying and by reading, arithmetic by a product."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mta_kernels.code_cache import write_whole
from mtabench.errors import MtabenchError, UsageError
from mtabench.git import make_folder
from mtabench.measuring.settled import LONGEST_DELAY, longest_wait_s, run_delays_s

if TYPE_CHECKING:
    import torch

CALLS = 10
SECONDS = 0.2  # for each kernel
# A buffer must be much larger than the caches, a product large enough to fill the device.
BUFFER_BYTES = {"cuda": 2**31, "cpu": 2**28}
ROW = 4096  # elements of a row of the buffer, where a kernel reads it as a matrix
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
MATMUL_SIZE_SLOW = 512  # 16-bit products on a CPU without instructions for them
FILE_NAME = "ceilings.json"
MOST_BYTES = 1 << 20  # an entry takes about 200
# What ceilings hold for; an entry is of one dtype besides.
PLACE = ("device", "driver", "torch")
RATES = ("copy_gbytes_s", "matmul_tflops", "read_gbytes_s")
LATER_RATES = ("read_gbytes_s",)  # files from before it was measured do not have it


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes read and written by a copy in GB/s, and arithmetic of a matrix product in TFLOP/s.

    `read_gbytes_s` are bytes that a kernel reads that writes next to nothing; None where that is not known.
    """

    copy_gbytes_s: float
    matmul_tflops: float
    read_gbytes_s: float | None = None


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """The best of a few calls on "cuda" or "cpu" in "fp16", "bf16" or "fp32", in about a second once warm.

    Raises torch.OutOfMemoryError if the device has no room for 2 GiB (a CPU: 256 MiB), and MtabenchError if another
    job had the cores.
    """
    before_s, started = run_delays_s() if device == "cpu" else {}, time.perf_counter()
    found = _measured(device, dtype)
    waited_s = longest_wait_s(before_s, run_delays_s()) if device == "cpu" else None
    share = (waited_s or 0.0) / (time.perf_counter() - started)
    if share > LONGEST_DELAY:
        raise MtabenchError(
            f"what this device can do in {dtype} is not known: threads waited for a core {100 * share:.0f} % of the "
            "time, so another job runs; end it, and measure again"
        )
    return found


def _measured(device: str, dtype: str) -> Ceilings:
    import torch

    from mtabench.problem.inputs import DTYPES, use_full_float32

    use_full_float32()
    source, target = _buffer(device).chunk(2)
    copy_s = _best_seconds(partial(target.copy_, source), device)
    del source, target
    size = MATMUL_SIZE_SLOW if device == "cpu" and dtype != "fp32" else MATMUL_SIZE[device]
    left, right = (torch.randn(size, size, dtype=DTYPES[dtype], device=device) for _ in range(2))
    out = torch.empty_like(left)
    matmul_s = _best_seconds(partial(torch.mm, left, right, out=out), device)
    del left, right, out
    copy_gbytes_s = BUFFER_BYTES[device] / copy_s / 1e9
    return Ceilings(copy_gbytes_s, 2 * size**3 / matmul_s / 1e12, max(copy_gbytes_s, _read_gbytes_s(device)))


def _read_gbytes_s(device: str) -> float:
    """The best of a few reductions: which one is the fastest depends on the device and on PyTorch."""
    buffer = _buffer(device)
    return buffer.nbytes / min(_best_seconds(partial(read, buffer), device) for read in _readers()) / 1e9


def _buffer(device: str) -> torch.Tensor:
    import torch

    return torch.ones(BUFFER_BYTES[device] // 4, dtype=torch.float32, device=device)


def _readers() -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
    """What reads a whole buffer and writes next to nothing."""
    import torch

    return (
        torch.sum,
        torch.amax,
        lambda buffer: torch.mv(buffer.view(-1, ROW), buffer[:ROW]),
        lambda buffer: torch.dot(*buffer.chunk(2)),
    )


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
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def check_ceilings(path: Path) -> None:
    """Raise UsageError if there is a file that is not one of ceilings."""
    _entries(path)


def read_ceilings(path: Path, environment: Mapping[str, Any]) -> dict[str, Ceilings]:
    """By dtype what the file says of this device, driver and torch (as environment.describe names them).

    Nothing if there is no file. Raises UsageError for a file that is not one of ceilings.
    """
    here = [entry for entry in _entries(path) if _place(entry) == _place(environment)]
    return {entry["dtype"]: Ceilings(**{name: entry[name] for name in RATES if name in entry}) for entry in here}


def keep_ceilings(path: Path, environment: Mapping[str, Any], ceilings: Mapping[str, Ceilings]) -> None:
    """Put ceilings by dtype into the file, in the place of what it says of the same device, driver and torch.

    Raises UsageError if the file can't be written, or if it is not one of ceilings.
    """
    kept = [entry for entry in _entries(path) if _place(entry) != _place(environment) or entry["dtype"] not in ceilings]
    here = dict(zip(PLACE, _place(environment), strict=True))
    measured = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    for dtype, found in ceilings.items():
        rates = {name: float(f"{rate:.6g}") for name in RATES if (rate := getattr(found, name)) is not None}
        kept.append(here | {"dtype": dtype} | rates | {"measured_utc": measured})
    try:
        make_folder(path.parent)
        write_whole(path, (json.dumps(kept, indent=1) + "\n").encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another --out") from error


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
        entries = json.loads(text)
        for entry in entries:
            rates = [entry[name] for name in RATES if name not in LATER_RATES or name in entry]
            if not all(isinstance(rate, float) and 0 < rate < float("inf") for rate in rates):
                raise ValueError("a rate is not a positive number")
            (*_place(entry), entry["dtype"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a file of ceilings ({error}); give another, or if it was one remove it, "
            "and `mtabench env --measure` writes it anew"
        ) from error
    return entries


def _place(facts: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(facts[name] or "" for name in PLACE)  # a CPU has no driver
