"""What PyTorch has set around a call, and what a launch needs instead."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.conv_attention.arguments import under_autocast


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current GPU: make it that of `x`."""
    if not x.is_cuda or planned.gpu_at(x.device.index):
        return contextlib.nullcontext()
    if x.device.index == torch._C._cuda_getDevice():  # a quarter of the time of entering it again
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """The kernels' own products are not for autocast to change."""
    return torch.autocast(x.device.type, enabled=False) if under_autocast(x) else contextlib.nullcontext()
