"""The CUDA driver as these kernels need it: load machine code, describe tensors to the copy engine, launch.

Through `cuda.bindings`, on the current device and context of PyTorch.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

MAX_TENSOR_MAPS = 1024
_tensor_maps: dict[tuple, Any] = {}


def load(code: bytes, name: str, shared_memory: int, device: int) -> Any:
    """The kernel `name` of this machine code on a device, allowed so many bytes of shared memory a block."""
    from cuda.bindings import driver

    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    with torch.cuda.device(device):
        module = _checked(driver.cuModuleLoadData(code))
        kernel = _checked(driver.cuModuleGetFunction(module, name.encode()))
        _checked(driver.cuFuncSetAttribute(kernel, limit, shared_memory))
    return kernel


def launch(kernel: Any, blocks: tuple[int, int], threads: int, shared_memory: int, device: int, *args: Any) -> None:
    """Launch on PyTorch's current stream of a device; arguments are structures, passed by value."""
    from cuda.bindings import driver

    addresses = [x.getPtr() if hasattr(x, "getPtr") else ctypes.addressof(x) for x in args]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    stream = torch._C._cuda_getCurrentRawStream(device)
    launched = driver.cuLaunchKernel(
        kernel, *blocks, 1, threads, 1, 1, shared_memory, stream, ctypes.addressof(pointers), 0
    )
    _checked(launched)


def outer_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of the first three dimensions in numbers; where there is one index, whose stride can be anything, D."""
    batch, head, row = (x.stride(i) if x.shape[i] > 1 else x.shape[3] for i in range(3))
    return batch, head, row


def describable(x: Tensor) -> Tensor:
    """x, copied if the copy engine could not describe it: see `tensor_map`."""
    aligned = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in outer_strides(x))
    if x.stride(3) == 1 and aligned and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def tensor_map(x: Tensor) -> Any:
    """The copy engine's description of `x [B, H, N, D]`, 16-bit, in boxes of 64 rows of 64 numbers, 128-byte swizzle.

    The last dimension must be contiguous, and the start and the other strides multiples of 16 bytes. Remembered.
    """
    key = (x.data_ptr(), x.dtype, x.shape, x.stride())
    found = _tensor_maps.get(key)
    if found is None:
        if len(_tensor_maps) >= MAX_TENSOR_MAPS:
            _tensor_maps.clear()
        found = _tensor_maps[key] = _encode(x)
    return found


def _encode(x: Tensor) -> Any:
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    half, bfloat16 = kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    batch, heads, rows, columns = x.shape
    return _checked(
        driver.cuTensorMapEncodeTiled(
            half if x.dtype == torch.float16 else bfloat16,
            4,
            x.data_ptr(),
            [driver.cuuint64_t(n) for n in (columns, rows, heads, batch)],
            [driver.cuuint64_t(n * x.element_size()) for n in reversed(outer_strides(x))],
            [driver.cuuint32_t(n) for n in (64, 64, 1, 1)],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _checked(results: tuple) -> Any:
    """The value that a driver call gave; raises RuntimeError if it failed."""
    if int(results[0]) != 0:
        raise RuntimeError(f"the CUDA driver refused: {results[0].name}")
    return results[1] if len(results) > 1 else None
