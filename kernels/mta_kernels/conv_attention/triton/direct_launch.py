"""A launch by Triton that is replayed by Triton's launcher in C, without the Python that Triton runs before it.

The kernel and its parameters are the same: the launcher is given addresses for tensors, and for descriptors the tensor
maps that Triton makes of them. `tests/mta_kernels/test_triton_direct_launch.py` compares all that reaches the driver.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

# Of Triton, with which this was tested: how its launcher in C is called is no public interface.
TESTED_RELEASES = "3.6", "3.7", "3.8", "3.9"
STREAM = 3  # its position among the launcher's arguments


class LaunchReplay:
    """A compiled kernel with its grid and its constants."""

    def __init__(self, compiled: CompiledKernel, programs: int, constants: Sequence[Any]) -> None:
        run = compiled.run
        # Neither kind of scratch, neither hook, and no metadata for hooks.
        scratch, hooks, metadata = (None, None), (None, None, None), compiled.packed_metadata
        options = [compiled.function, run.launch_cooperative_grid, run.launch_pdl]
        self.launcher = launcher = _launcher_in_c(run.launch)
        if hasattr(run, "arg_annotations"):  # from Triton 3.7 on, the kernel's arguments are a tuple
            options += [metadata, *hooks, *scratch, run.arg_annotations, run.kernel_signature]
            before = STREAM + 1 + len(options)
            self.launcher = lambda *arguments: launcher(*arguments[:before], arguments[before:])
        else:
            options += [*scratch, metadata, *hooks]
        self._options = options
        self._programs, self._constants = programs, constants
        self._descriptors = compiled.metadata.tensordesc_meta or ()

    def __call__(self, args: Sequence[Any]) -> None:
        """Launch it on the current stream of the current GPU, with these arguments before the constants."""
        gpu = driver.active
        self.launcher(*self.arguments(gpu.get_current_stream(gpu.get_current_device()), args))

    def arguments(self, stream: int, args: Sequence[Any]) -> list[Any]:
        """What `launcher` takes."""
        found = [self._programs, 1, 1, stream, *self._options]
        descriptors = iter(self._descriptors)
        for x in args:
            if type(x) is int:  # most are, and need no other test
                found.append(x)
            elif isinstance(x, Tensor):
                found.append(x.data_ptr())
            elif is_descriptor(x):
                found += expanded(x, next(descriptors))
            else:
                found.append(x)
        found += self._constants
        return found

    def prepared(self, args: Sequence[Any]) -> Callable[[], None]:
        """Launches it with these arguments, of whose tensors and descriptors it keeps the addresses alone."""
        launcher, arguments = self.launcher, self.arguments(0, args)
        before, after = tuple(arguments[:STREAM]), tuple(arguments[STREAM + 1 :])

        def launch() -> None:
            gpu = driver.active
            launcher(*before, gpu.get_current_stream(gpu.get_current_device()), *after)

        return launch


def launch_replay(compiled: Any, programs: int, constants: Sequence[Any]) -> LaunchReplay | None:
    """A launch of what Triton compiled; None if only Triton can do that."""
    if not isinstance(compiled, CompiledKernel) or not _launcher_is_known():
        return None
    run, metadata = compiled.run, compiled.metadata
    descriptors = [x for x in compiled.src.signature.values() if str(x).startswith("tensordesc")]
    if run.global_scratch_size or run.profile_scratch_size or len(descriptors) != len(metadata.tensordesc_meta or ()):
        return None
    if getattr(run, "gsan_enabled", False):  # a sanitizer, whose state Triton passes to each launch
        return None
    return LaunchReplay(compiled, programs, constants)


def has_hooks() -> bool:
    """Whether a profiler has hooks that Triton calls at each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def is_descriptor(x: Any) -> bool:
    """Whether x describes a tensor to the copy engine."""
    return hasattr(x, "block_shape")


def expanded(descriptor: Any, meta: dict[str, Any]) -> list[Any]:
    """What the launcher takes for a descriptor: a tensor map, shape and strides."""
    return _maker()(descriptor, meta)


@functools.cache
def _maker() -> Callable[[Any, dict[str, Any]], list[Any]]:
    from triton.backends.nvidia.driver import make_tensordesc_arg as make

    if len(inspect.signature(make).parameters) == 2:
        return make
    return lambda descriptor, meta: make(descriptor, meta, None)  # from Triton 3.8 on of the launch, which it ignores


def _launcher_in_c(launch: Callable[..., None]) -> Callable[..., None]:
    """The launcher below what expands descriptors for it, where a kernel has any."""
    return inspect.getclosurevars(launch).nonlocals["launcher"] if inspect.isfunction(launch) else launch


@functools.cache
def _launcher_is_known() -> bool:
    release = ".".join(triton.__version__.split(".")[:2])
    known = release in TESTED_RELEASES and driver.active.get_current_target().backend == "cuda"
    if not known:
        warnings.warn(
            f"mta_kernels does not know how Triton {triton.__version__} launches kernels, only those of "
            f"{TESTED_RELEASES[0]} to {TESTED_RELEASES[-1]}: launches take the host longer",
            RuntimeWarning,
            stacklevel=2,
        )
    return known
