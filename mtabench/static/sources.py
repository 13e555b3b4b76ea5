"""What an implementation has compiled: a function that calls the host code of some kernels.

It gets the shape and the limits of the target. Triton's kernels compile as the host code launches them. A
CUDA source is compiled by the function itself, which yields its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape


@dataclass(frozen=True, slots=True)
class CudaCode:
    """A compiled CUDA source: its cubin, what `ptxas -v` said of it, and its compiler, such as ("nvcc", "13.0.88")."""

    cubin: bytes
    log: str
    compiler: tuple[str, str]


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel of a CUDA source, by its name there, and the warps and bytes of dynamic shared memory of a block.

    `label` is what it is called in tables: other sources may have a kernel of its name.
    """

    name: str
    code: CudaCode
    warps: int
    dynamic_shared: int
    label: str = ""


class SkippedError(Exception):
    """A source that cannot be compiled on this machine; the text says why, and what to install."""


HostCode = Callable[[Shape, Limits], Iterable[CudaKernel] | None]


@dataclass(frozen=True, slots=True)
class Source:
    """Host code by the name that tables give it.

    It is called in a process of its own: `host_code` must be a function that pickle finds.
    """

    name: str
    host_code: HostCode


def need_compiler() -> None:
    """Raise SkippedError where CUDA sources cannot be compiled."""
    from mta_kernels.nvrtc import compiler

    if reason := compiler.missing_package():
        raise SkippedError(reason)


def compiled(source: Any) -> CudaCode:
    """A `mta_kernels.nvrtc.compiler.Source` by the compiler that a call takes."""
    from mta_kernels.nvrtc import compiler

    return CudaCode(*compiler.compile_source(source), ("nvrtc", compiler.version()))
