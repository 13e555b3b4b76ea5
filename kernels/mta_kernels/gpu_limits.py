"""The limits of a GPU by which kernels choose tiles; on a CPU, the limits that Triton's interpreter stands in for."""

from __future__ import annotations

import functools
import os
import re
from typing import Any, NamedTuple

import torch

from mta_kernels import planned
from mta_kernels.torch_compile import cached_constant

# On a CPU: the limits of a Hopper GPU.
INTERPRETED_CAPABILITY = (9, 0)
INTERPRETED_SHARED_MEMORY = 227 * 1024
INTERPRETED_SM_COUNT = 132
LARGE_MEMORY = 64 * 2**30  # bytes of a GPU on which buffers may be larger than elsewhere


class Gpu(NamedTuple):
    """What decides which kernels can run on a GPU, present or planned."""

    capability: tuple[int, int]
    shared_memory: int  # bytes that a block can have


def gpu_of(device: torch.device) -> Gpu:
    """The limits of the GPU `device`, or of the GPU that the interpreter stands in for."""
    return Gpu(capability(device), shared_memory_limit(device))


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of `device`, (9, 0) for Hopper."""
    return _limits(device)[0] if device.type == "cuda" else INTERPRETED_CAPABILITY


def compiled_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability that Triton compiles for on `device`: its own, or TRITON_OVERRIDE_ARCH, such as "sm80".

    Kernels compiled for an older GPU run, too, without the copy engine and with its slower products.
    """
    override = re.fullmatch(r"sm(\d+)(\d)", os.environ.get("TRITON_OVERRIDE_ARCH", ""))
    return (int(override[1]), int(override[2])) if override else capability(device)


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on `device`."""
    return _limits(device)[1] if device.type == "cuda" else INTERPRETED_SHARED_MEMORY


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of `device`."""
    return _limits(device)[2] if device.type == "cuda" else INTERPRETED_SM_COUNT


def has_large_memory(device: torch.device) -> bool:
    """Whether `device` has LARGE_MEMORY. Free memory does not matter, so that equal calls give the same bits."""
    return device.type == "cuda" and _limits(device)[3] >= LARGE_MEMORY


def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel can begin on `device` while the one before it ends: programmatic dependent launch."""
    return device.type == "cuda" and capability(device)[0] >= 9


def tile_limits(x: torch.Tensor) -> dict[str, Any]:
    """The limits that a tile of elements like those `x` has must fit, by the names that choices of tiles take."""
    limits = {"compute_capability": compiled_capability(x.device), "shared_memory": shared_memory_limit(x.device)}
    return {"element_size": x.element_size(), **limits}


def cuda_capability(device: torch.device | int) -> tuple[int, int]:
    """Compute capability of a CUDA device; raises what PyTorch raises where there is none."""
    gpu = planned.gpu_at(device if isinstance(device, int) else device.index)
    return gpu.capability if gpu else torch.cuda.get_device_capability(device)


@functools.cache
def device_name(device: torch.device) -> str:
    """The model of a GPU; an empty string for other devices."""
    if gpu := planned.gpu_at(device.index):
        return gpu.name
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@cached_constant
def absent(device: torch.device | str) -> str | None:
    """A sentence that this machine has no such GPU, or None."""
    if torch.device(device).type == "cuda":
        try:
            cuda_capability(torch.device(device))
        except (AssertionError, RuntimeError):  # a PyTorch without CUDA, no driver, or no GPU of that number
            return f"PyTorch finds no {device} device on this machine"
    return None


@functools.cache
def _limits(device: torch.device) -> tuple[tuple[int, int], int, int, int]:
    if gpu := planned.gpu_at(device.index):
        return gpu.capability, gpu.shared_memory, gpu.sm_count, gpu.memory
    found = torch.cuda.get_device_properties(device)
    shared_memory = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return (found.major, found.minor), shared_memory, found.multi_processor_count, found.total_memory
