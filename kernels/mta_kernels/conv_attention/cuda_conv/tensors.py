"""Tensors as the kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor


def loadable(x: Tensor) -> Tensor:
    """`x [B, heads, N, D]`, copied if its rows cannot be loaded 16 bytes at a time."""
    whole = all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    if x.stride(3) == 1 and whole and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def taps_of(weight: Tensor) -> Tensor:
    """The weight as float32 without gaps."""
    return weight.detach().float().contiguous()
