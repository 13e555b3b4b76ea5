"""What the CUDA rungs share: their sources as the compiler takes them, and a kernel of one of them on a device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from mta_kernels import planned
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source, headers_in, machine_code

FOLDER = Path(__file__).parent

Constants = tuple[tuple[str, Any], ...]


def device_unsupported(device: torch.device) -> str | None:
    """Why no CUDA kernel runs on this device, or None."""
    if device.type != "cuda" or (torch.version.cuda is None and not planned.gpu_at(device.index)):
        return f"CUDA kernels need an NVIDIA GPU, not a {device.type} device"
    return None


def source(file: str, architecture: str, constants: Constants) -> Source:
    """A source in this folder, for an architecture such as "sm_90"."""
    return Source(FOLDER / file, architecture, dict(constants), headers_in(FOLDER))


@functools.cache
def kernel(file: str, name: str, constants: Constants, device: int, shared_memory: int = 0) -> Any:
    """The kernel `name` of a source on a device, compiled at the first call: seconds, unless the disk has it."""
    code = machine_code(source(file, driver.architecture(device), constants))
    return driver.load(code, name, shared_memory, device)


def diagonal(queries: int, keys: int, *, causal: bool) -> int:
    """Query i sees the keys up to i + this: the queries are the last of the sequence."""
    return keys - queries if causal else keys
