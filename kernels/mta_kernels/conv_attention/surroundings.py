"""PyTorch's current device and autocast, set around a call as its launches need them."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.conv_attention.arguments import under_autocast


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Make the GPU of `x` the current one, on which Triton launches."""
    if not x.is_cuda or planned.gpu_at(x.device.index):
        return contextlib.nullcontext()
    if x.device.index == torch._C._cuda_getDevice():  # a quarter of the time of entering it again
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Switch autocast off, which would change the kernels' own products."""
    return torch.autocast(x.device.type, enabled=False) if under_autocast(x) else contextlib.nullcontext()
