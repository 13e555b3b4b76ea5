"""The CUDA driver API that our kernels need: load machine code and launch it.

Rare calls go through `cuda.bindings`, every launch through ctypes, in PyTorch's context of a device.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from mta_kernels import planned
from mta_kernels.gpu_limits import cuda_capability
from mta_kernels.nvrtc.structures import fields

DEPENDENT_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def load(code: Any, name: str, shared_memory: int, device: int) -> Any:
    """The kernel `name` of this machine code on a device, allowed so many bytes of shared memory a block."""
    if planned.gpu_at(device):
        return planned.PlannedKernel(code, name)
    from cuda.bindings import driver

    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    with torch.cuda.device(device):
        if not int(checked(driver.cuCtxGetCurrent())):
            _enter_context(device)
        module = checked(driver.cuModuleLoadData(code))
        kernel = checked(driver.cuModuleGetFunction(module, name.encode()))
        checked(driver.cuFuncSetAttribute(kernel, limit, shared_memory))
    return ctypes.c_void_p(int(kernel))


def clusters_at_once(kernel: Any, cluster: int, threads: int, shared_memory: int, device: int) -> int:
    """Clusters of so many blocks that a device runs at the same time, one at least."""
    if gpu := planned.gpu_at(device):
        return planned.clusters_at_once(gpu, cluster, threads, shared_memory)
    from cuda.bindings import driver

    shape = driver.CUlaunchAttribute()
    shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared_memory, [shape], 1
    with torch.cuda.device(device):
        return max(1, checked(driver.cuOccupancyMaxActiveClusters(driver.CUfunction(kernel.value), config)))


@functools.cache
def cuda_release() -> int:
    """The newest CUDA release that the driver knows, such as 13."""
    from cuda.bindings import driver

    return checked(driver.cuDriverGetVersion()) // 1000


def architecture(device: int) -> str:
    """The architecture of a GPU, such as "sm_90"."""
    major, minor = cuda_capability(device)
    return f"sm_{major}{minor}"


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of cuda.h."""

    _fields_ = (
        *fields(ctypes.c_uint * 3, "blocks threads"), ("shared_memory", ctypes.c_uint),
        *fields(ctypes.c_void_p, "stream attributes"), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of cuda.h, with a number as its value."""

    _fields_ = (*fields(ctypes.c_int, "id padding value"), ("rest", ctypes.c_char * 60))


class Launch:
    """A launch prepared for the driver; arguments are ctypes structures or numbers, `blocks` one to three numbers.

    One that `follows` may start while the kernel before it finishes, and waits for that kernel itself (Hopper and
    later). The driver reads the arguments at each launch: their contents may change in between.
    """

    def __init__(
        self, kernel: Any, blocks: tuple[int, ...], threads: int, shared_memory: int, device: int, *arguments: Any,
        follows: bool = False,
    ) -> None:  # fmt: skip
        self.device, self._arguments = device, arguments  # kept alive
        self.config = LaunchConfig((*blocks, 1, 1)[:3], (threads, 1, 1), shared_memory)
        if follows:
            self._attribute = LaunchAttribute(DEPENDENT_LAUNCH, 0, 1)
            self.config.attributes, self.config.attribute_count = ctypes.addressof(self._attribute), 1
        self._pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        if isinstance(kernel, planned.PlannedKernel):
            self.call = lambda: planned.recorder().cuda(kernel, self.config, self._arguments)
            return
        # Types that ctypes passes on unconverted: a conversion costs as much as the call. cuda.bindings costs more.
        self.call = functools.partial(
            _libcuda().cuLaunchKernelEx, ctypes.byref(self.config), kernel, self._pointers, None
        )

    def give(self, *arguments: Any) -> None:
        """Replace the arguments from now on."""
        self._arguments = arguments
        self._pointers[:] = [*map(ctypes.addressof, arguments)]


class LaunchSequence:
    """Launches on one device, which can be repeated: one after another on PyTorch's current stream there.

    One thread at a time.
    """

    def __init__(self, *launches: Launch) -> None:
        self._launches = launches  # keep their arguments alive
        self._device, self._stream = launches[0].device, 0  # as a new config has them
        self._configs = [x.config for x in launches]
        self._calls = tuple(x.call for x in launches)
        if planned.gpu_at(self._device):
            self.__class__ = PlannedSequence

    def __call__(self) -> None:
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self()
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if stream != self._stream:
            for config in self._configs:
                config.stream = stream
            self._stream = stream
        for call in self._calls:
            if result := call():
                self._retry(call, result)
        return None

    def _retry(self, call: Callable[[], int], result: int) -> None:
        """Repeat a call that failed only for want of a context; else raise RuntimeError."""
        if result == INVALID_CONTEXT:  # as in autograd's new threads; a check at each launch would cost as much as one
            _enter_context(self._device)
            result = call()
        if result:
            from cuda.bindings import driver

            checked((driver.CUresult(result),))


class PlannedSequence(LaunchSequence):
    """Launches on a planned GPU: the recorder notes them."""

    def __call__(self) -> None:
        for call in self._calls:
            call()


def launch(
    kernel: Any, blocks: tuple[int, ...], threads: int, shared_memory: int, device: int, *args: Any,
    follows: bool = False,
) -> None:  # fmt: skip
    """Launch once, by an idle `LaunchSequence` that differs in its arguments alone, else by a new one."""
    idle = _idle_launches(kernel.value, blocks, threads, shared_memory, device, len(args), follows)
    try:
        found, sequence = idle.pop()  # so that no other thread has it
    except IndexError:
        found = Launch(kernel, blocks, threads, shared_memory, device, *args, follows=follows)
        sequence = LaunchSequence(found)
    else:
        found.give(*args)
    sequence()
    idle.append((found, sequence))  # the driver has read its arguments


@functools.lru_cache(1024)
def _idle_launches(*alike: Any) -> list[tuple[Launch, LaunchSequence]]:
    """Idle launches that differ in their arguments alone."""
    return []


def in_context(device: int, call: Callable[[], tuple]) -> tuple:
    """The results of a `cuda.bindings` call, repeated in PyTorch's context of a device if it lacked a context."""
    results = call()
    if int(results[0]) == INVALID_CONTEXT:  # as autograd's threads begin
        _enter_context(device)
        results = call()
    return results


@functools.cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _enter_context(device: int) -> None:
    """Make PyTorch's context of a device current in this thread."""
    from cuda.bindings import driver

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
