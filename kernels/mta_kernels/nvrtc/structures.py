"""C++ structures in ctypes: fields of one type in a line, and structures shared by sources of several folders."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

# The names of the 16-bit dtypes in common.cuh, and the names with float32's.
ELEMENTS = {torch.float16: "Half", torch.bfloat16: "Bfloat16"}
ALL_ELEMENTS = {**ELEMENTS, torch.float32: "float"}


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type, for `_fields_`: their names in their order, with spaces between."""
    return tuple((name, kind) for name in names.split())


class Rows(ctypes.Structure):
    """`struct Rows` of exact.cuh, tiles.cuh, cuda_flash.cu and decode_cuda/layout.cuh: `[B, heads, rows, D]`."""

    _fields_ = (("start", c_void_p), *fields(c_int64, "stride_batch stride_head stride_row"))

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """`x`, whose rows are contiguous, with its strides in elements."""
        return cls(x.data_ptr(), *x.stride()[:3])

    @classmethod
    def in_bytes(cls, x: Tensor) -> Rows:
        """The same with its strides in bytes, for 16-bit elements."""
        return cls(x.data_ptr(), *(2 * stride for stride in x.stride()[:3]))


def in_chunks(x: Tensor) -> Tensor:
    """`x [B, heads, rows, D]`, copied if its rows cannot be loaded 16 bytes at a time."""
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    whole = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in strides)
    return x if x.stride(3) == 1 and whole else x.clone(memory_format=torch.contiguous_format)


class Weight(ctypes.Structure):
    """`struct Weight` of exact.cuh and of cuda_decode/layout.cuh."""

    _fields_ = (
        ("start", c_void_p), *fields(c_int64, "stride_head stride_query stride_key"), ("is_float", c_int),
    )  # fmt: skip

    @classmethod
    def of(cls, weight: Tensor | None) -> Weight:
        """The weight `[Hq, cq, ck]`, or none."""
        return cls() if weight is None else cls(weight.data_ptr(), *weight.stride(), weight.dtype == torch.float32)
