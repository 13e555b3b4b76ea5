"""GPUs that calls are only planned for, and the recorder that notes such a call's kernels instead of launching them.

A planned GPU has an index from `FIRST` on, where no machine has one. `plan.plan` gives out such GPUs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

FIRST = 100  # indices are below 128
KIB = 1024


@dataclass(frozen=True)
class PlannedGpu:
    """A GPU by what decides which kernels run on it.

    `shared_memory` counts the bytes of a block, `shared_memory_of_sm` of an SM, `memory` all bytes of the GPU.
    `clusters` counts the SMs of each graphics processing cluster; a thread block cluster runs within one of these.
    Without `has_nvrtc` no kernel in CUDA C++ can be compiled.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    shared_memory_of_sm: int
    sm_count: int
    memory: int
    clusters: tuple[int, ...] = ()
    has_nvrtc: bool = True


# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". An H200 runs at most
# thirty clusters of four blocks, one block an SM; these cluster sizes give the same number. With three blocks an SM the
# driver reports up to 4 % fewer clusters than these sizes give.
H200 = PlannedGpu(
    "NVIDIA H200", (9, 0), 227 * KIB, 228 * KIB, 132, 141 * 10**9, (18, 18, 18, 18, 16, 16, 14, 14)
)  # fmt: skip
A100 = PlannedGpu("NVIDIA A100-SXM4-80GB", (8, 0), 163 * KIB, 164 * KIB, 108, 80 * 10**9)

_gpus: list[PlannedGpu] = []
_of_thread = threading.local()


def index_of(gpu: PlannedGpu) -> int:
    """The index of a planned GPU, the same for equal ones."""
    if gpu not in _gpus:
        _gpus.append(gpu)
    return FIRST + _gpus.index(gpu)


def gpu_at(index: int | None) -> PlannedGpu | None:
    """The planned GPU of an index, or None where the index is of a GPU of this machine, or of no GPU."""
    return _gpus[index - FIRST] if index is not None and FIRST <= index < FIRST + len(_gpus) else None


def recorder() -> Any:
    """The `plan.Recorder` that receives this thread's launches; None where kernels run."""
    return getattr(_of_thread, "recorder", None)


def record_with(found: Any) -> None:
    """Give this thread's launches to `found` from now on; None ends this."""
    _of_thread.recorder = found


@dataclass(frozen=True, eq=False)
class PlannedKernel:
    """A kernel in CUDA C++ that is not compiled: its source, and its name there."""

    source: Any
    name: str
    value = property(id)  # stands for the driver's handle


def clusters_at_once(gpu: PlannedGpu, cluster: int, threads: int, shared_memory: int, of_sm: int = 32) -> int:
    """Clusters of so many blocks that the GPU runs at the same time, `of_sm` blocks a multiprocessor by registers."""
    blocks = max(1, min(of_sm, 2048 // threads, gpu.shared_memory_of_sm // (shared_memory + KIB)))
    return sum(sms * blocks // cluster for sms in gpu.clusters or (gpu.sm_count,))


def launch_triton(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, or a note of it where calls are planned."""
    if (found := recorder()) is not None:
        found.triton(kernel, grid, args, options)
    else:
        kernel[grid](*args, **options)
