"""The peak of one call on this machine's GPU, as PyTorch's allocator traces it."""

from __future__ import annotations

import torch

from mtabench.environment import available_memory_bytes
from mtabench.measuring.timing import timed
from mtabench.prediction.memory import measuring_bytes
from mtabench.problem.axes import short
from mtabench.problem.case import Case
from mtabench.problem.inputs import make_inputs
from mtabench.registry import implementation_of
from mtabench.sweeps.estimate import call_seconds, shown
from mtabench.sweeps.readiness import unsupported_reason
from mtabench.sweeps.sweep import free_memory

MOST_SECONDS = 20.0  # of one call, as estimated


def traced_peak(case: Case) -> tuple[int | None, str]:
    """Bytes that one call takes beyond its inputs at most, as a sweep measures them; or None, and why there are none.

    A first call compiles and is not traced.
    """
    reason = _reason_against(case)
    if reason:
        return None, reason
    try:
        return _peak(case), ""
    except torch.OutOfMemoryError:
        return None, f"out of memory at {short(case.seq)}"
    except Exception as error:
        return None, (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        free_memory(case.device)


def _reason_against(case: Case) -> str:
    """Why a cell is not run, or an empty text."""
    if case.device != "cuda":
        return "memory of the CPU is not traced"
    if reason := unsupported_reason(case):
        return reason
    free, needed = available_memory_bytes("cuda"), measuring_bytes(case)
    if free is not None and needed > free:
        return f"{short(case.seq)} is not run: it needs {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
    seconds = call_seconds(case)
    if seconds > MOST_SECONDS:
        return f"{short(case.seq)} is not run: one call may take {shown(seconds)}"
    return ""


def _peak(case: Case) -> int:
    inputs = make_inputs(case)
    cell = timed(case, implementation_of(case).build, inputs)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        state = cell.setup() if cell.setup else None
        cell.run(state)
        torch.cuda.synchronize()
        del state
    return torch.cuda.max_memory_allocated() - before
