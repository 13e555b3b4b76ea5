"""The CUDA driver as our kernels need it: load machine code and launch it.

Through `cuda.bindings`, on the current device and context of PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch


def load(code: bytes, name: str, shared_memory: int, device: int) -> Any:
    """The kernel `name` of this machine code on a device, allowed so many bytes of shared memory a block."""
    from cuda.bindings import driver

    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    with torch.cuda.device(device):
        _enter_context(device)
        module = checked(driver.cuModuleLoadData(code))
        kernel = checked(driver.cuModuleGetFunction(module, name.encode()))
        checked(driver.cuFuncSetAttribute(kernel, limit, shared_memory))
    return kernel


@functools.cache
def cuda_release() -> int:
    """The newest CUDA release that the driver knows, such as 13."""
    from cuda.bindings import driver

    return checked(driver.cuDriverGetVersion()) // 1000


def architecture(device: int) -> str:
    """A GPU's own, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def launch(kernel: Any, blocks: tuple[int, ...], threads: int, shared_memory: int, device: int, *args: Any) -> None:
    """Launch on PyTorch's current stream of a device.

    `blocks` are one to three numbers; arguments are ctypes structures or numbers, passed by value.
    """
    from cuda.bindings import driver

    addresses = [x.getPtr() if hasattr(x, "getPtr") else ctypes.addressof(x) for x in args]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    stream = torch._C._cuda_getCurrentRawStream(device)
    _enter_context(device)
    launched = driver.cuLaunchKernel(
        kernel, *blocks, *(1,) * (3 - len(blocks)), threads, 1, 1, shared_memory, stream, ctypes.addressof(pointers), 0
    )
    checked(launched)


def _enter_context(device: int) -> None:
    """Make PyTorch's context of a device this thread's if it has none, as autograd's threads begin."""
    from cuda.bindings import driver

    if not int(checked(driver.cuCtxGetCurrent())):
        checked(driver.cuCtxSetCurrent(_primary_context(device)))


@functools.cache
def _primary_context(device: int) -> Any:
    """The one context of a device that the CUDA runtime, and so PyTorch, uses."""
    from cuda.bindings import driver

    return checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device))))


def checked(results: tuple) -> Any:
    """The value that a driver call gave; raises RuntimeError if it failed."""
    if int(results[0]) != 0:
        raise RuntimeError(f"the CUDA driver refused: {results[0].name}")
    return results[1] if len(results) > 1 else None
