"""Kernels in CUDA C++ by their constants: compiled and loaded once a device, launched as their descriptions define."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source, machine_code


class KernelDescription(Protocol):
    """The constants of a kernel and its launch configuration; hashable."""

    @property
    def kernel_name(self) -> str:
        """The kernel in its source."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a block, in bytes."""

    def source(self, architecture: str) -> Source:
        """The source for a GPU such as "sm_90"."""


@dataclass(frozen=True)
class SecondKernel:
    """Another kernel of a source."""

    first: KernelDescription
    kernel_name: str
    threads: int
    shared_memory: int = 0

    def source(self, architecture: str) -> Source:
        """The source of the first kernel."""
        return self.first.source(architecture)


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel on a device, and what all of its launches have in common."""

    function: Any  # the driver's
    threads: int
    shared_memory: int
    device: int

    def prepared(self, blocks: tuple[int, int], *arguments: Any, follows: bool = False) -> driver.Launch:
        """A launch of so many blocks, prepared for the driver."""
        shape = blocks, self.threads, self.shared_memory, self.device
        return driver.Launch(self.function, *shape, *arguments, follows=follows)

    def launch(self, blocks: tuple[int, int], *arguments: Any, follows: bool = False) -> None:
        """Launch so many blocks on PyTorch's current stream."""
        shape = blocks, self.threads, self.shared_memory, self.device
        driver.launch(self.function, *shape, *arguments, follows=follows)


@functools.cache
def kernel(description: KernelDescription, device: int) -> Kernel:
    """The kernel on a device, compiled at the first call: seconds, unless the disk has it."""
    code = machine_code(description.source(driver.architecture(device)))
    name, shared_memory = description.kernel_name, description.shared_memory
    return Kernel(driver.load(code, name, shared_memory, device), description.threads, shared_memory, device)
