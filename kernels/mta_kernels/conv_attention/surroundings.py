"""What PyTorch has set around a call, and what a launch needs instead."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import under_autocast


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current GPU: make it that of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """The kernels' own products are not for autocast to change."""
    return torch.autocast(x.device.type, enabled=False) if under_autocast(x) else contextlib.nullcontext()
