"""Triton kernels of plans, compiled for a GPU that is not there.

One capability a process: a JIT function keeps the target of its first call. Imports Triton, so not under its
interpreter (TRITON_INTERPRET), whose flag is read where a kernel is defined.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mta_kernels.plan import KernelCall
from mtabench.static.limits import WARP, Limits


@contextlib.contextmanager
def compiles_for(limits: Limits) -> Iterator[None]:
    """Within it Triton compiles for this target, and launches nothing."""
    target = GPUTarget("cuda", limits.number, WARP)
    answers = {"get_current_target": lambda: target, "get_current_device": lambda: 0}
    driver.set_active(SimpleNamespace(**answers, get_current_stream=lambda device=0: 0))
    try:
        yield
    finally:
        driver._active = None  # reset_active() would look for a real GPU


def compiled(call: KernelCall) -> Any:
    """Triton's CompiledKernel of a launch, or the exception of its compiler, which is a finding."""
    try:
        return call.source.warmup(*call.arguments, grid=call.grid, **call.constants)
    except Exception as error:  # whatever the compiler raises: other kernels are to come
        return error
