"""Tensor maps: descriptions of tensors for Hopper's copy engine."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.call_memory import keep
from mta_kernels.nvrtc.driver import checked, in_context


class TensorMap(ctypes.Structure):
    """`CUtensorMap` of cuda.h."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


MAX_TENSOR_MAPS = 1024
_tensor_maps: dict[tuple, TensorMap] = {}


def outer_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of the first three dimensions in numbers; where there is one index, whose stride can be anything, D."""
    batch, head, row = (x.stride(i) if x.shape[i] > 1 else x.shape[3] for i in range(3))
    return batch, head, row


def has_describable_strides(x: Tensor) -> bool:
    """Whether the copy engine can describe x wherever it begins at a multiple of 16 bytes."""
    return x.stride(3) == 1 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in outer_strides(x))


def describable(x: Tensor) -> Tensor:
    """x, copied if the copy engine could not describe it: see `tensor_map`."""
    if has_describable_strides(x) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def tensor_map(x: Tensor, box: tuple[int, int, int, int] = (1, 1, 64, 64)) -> TensorMap:
    """The copy engine's description of `x [B, H, N, D]`, 16-bit, in boxes of this shape, rows of 64 or 32 numbers.

    The swizzle is as wide as a row of a box, 128 or 64 bytes. The last dimension must be contiguous, and the start and
    the other strides multiples of 16 bytes. Remembered.
    """
    key = (x.data_ptr(), x.dtype, x.shape, x.stride(), box)
    found = _tensor_maps.get(key)
    if found is None:
        strides, extents = reversed(outer_strides(x)), reversed(x.shape)
        found = keep(_tensor_maps, key, encode(x, [*extents], [*strides], [*reversed(box)]), MAX_TENSOR_MAPS)
    return found


def encode(x: Tensor, extents: list[int], strides: list[int], box: list[int], promotion: int = 256) -> TensorMap:
    """The tensor map of numbers of x, 16-bit, in up to five dimensions, the innermost first.

    `strides` are in numbers. They leave out the innermost dimension, whose stride is 1. The swizzle is as wide as a row
    of a box. L2 fetches `promotion` bytes at a time from memory.
    """
    if planned.gpu_at(x.device.index):
        return TensorMap((ctypes.c_uint64 * 16)(x.data_ptr()))
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    half, bfloat16 = kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    swizzles = driver.CUtensorMapSwizzle
    swizzle = {64: swizzles.CU_TENSOR_MAP_SWIZZLE_128B, 32: swizzles.CU_TENSOR_MAP_SWIZZLE_64B}[box[0]]

    def encode() -> tuple:
        return driver.cuTensorMapEncodeTiled(
            half if x.dtype == torch.float16 else bfloat16,
            len(extents),
            x.data_ptr(),
            [driver.cuuint64_t(n) for n in extents],
            [driver.cuuint64_t(n * x.element_size()) for n in strides],
            [driver.cuuint32_t(n) for n in box],
            [driver.cuuint32_t(1)] * len(extents),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{promotion}B"),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    found = checked(in_context(x.device.index, encode))
    return TensorMap.from_buffer_copy(ctypes.string_at(found.getPtr(), ctypes.sizeof(TensorMap)))
