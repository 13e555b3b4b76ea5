"""Tensors as the kernels take them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class Rows(ctypes.Structure):
    """`struct Rows` of tiles.cuh: `[B, heads, N, D]` by its strides in numbers."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("stride_batch", ctypes.c_int64),
        ("stride_head", ctypes.c_int64),
        ("stride_row", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """`x`, which must be `loadable`."""
        return cls(x.data_ptr(), *x.stride()[:3])


def loadable(x: Tensor) -> Tensor:
    """`x [B, heads, N, D]`, copied if its rows cannot be loaded 16 bytes at a time."""
    whole = all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    if x.stride(3) == 1 and whole and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def taps_of(weight: Tensor) -> Tensor:
    """The weight as float32 without gaps."""
    return weight.detach().float().contiguous()
