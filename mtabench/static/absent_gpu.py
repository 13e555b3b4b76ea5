"""Triton kernels compiled for a GPU that is not there, through the host code that would launch them.

One capability a process: a JIT function keeps the target of its first call. Imports Triton, so not under its
interpreter (TRITON_INTERPRET), whose flag is read where a kernel is defined.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mta_kernels import gpu_limits
from mta_kernels.conv_attention import tile_sizes
from mta_kernels.conv_attention.triton import launch as launching
from mtabench.static.limits import WARP, Limits

# Called with a kernel's function and what came of compiling it: Triton's CompiledKernel, or the exception.
Compiled = Callable[[JITFunction, Any], None]


@contextlib.contextmanager
def launches_compile(limits: Limits, wanted: Callable[[str], bool], compiled: Compiled) -> Iterator[None]:
    """Within it, `kernel[grid](...)` launches nothing: it compiles, if the kernel's name is `wanted`.

    Host code sees the GPU that stands for the target: its capability, shared memory, SMs and shipped tile sizes.
    """

    def launch(kernel: JITFunction, grid: Any) -> Callable[..., Any]:
        def compile_it(*args: Any, **options: Any) -> Any:
            # Left out by the host code where tensors are not on a GPU; here they would be.
            for name in ("DEPENDENT_LAUNCH", "launch_pdl"):
                if name in options:
                    options[name] = limits.capability[0] >= 9
            if wanted(kernel.__name__):
                result: Any
                try:
                    result = kernel.warmup(*args, grid=grid, **options)
                except Exception as error:  # whatever the compiler raises is a finding, and other kernels are to come
                    result = error
                compiled(kernel, result)
            return defaultdict(lambda: lambda *args: None)  # what is launched once more, does nothing

        return compile_it

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (JITFunction, "__getitem__", launch),
        (launching, "_launches", {}),  # launches of another shape say nothing of what this one compiles
        (gpu_limits, "INTERPRETED_CAPABILITY", limits.capability),
        (gpu_limits, "INTERPRETED_SHARED_MEMORY", limits.shared_per_block),
        (gpu_limits, "INTERPRETED_SM_COUNT", limits.sms),
        (tile_sizes, "device_name", lambda device: limits.gpu),
    )
    target = GPUTarget("cuda", limits.number, WARP)
    as_asked = {"get_current_target": lambda: target, "get_current_device": lambda: 0}
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        driver.set_active(SimpleNamespace(**as_asked, get_current_stream=lambda device=0: 0))
        try:
            yield
        finally:
            driver._active = None  # reset_active() would look for a real GPU


def tensor(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that takes no memory and begins at a multiple of 16 bytes."""
    return torch.empty(sizes, dtype=dtype, device="meta")
