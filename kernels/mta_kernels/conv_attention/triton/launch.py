"""Launches that skip Triton's own inspection of every argument if the same call was seen before."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mta_kernels import planned
from mta_kernels.call_memory import keep
from mta_kernels.conv_attention.triton.direct_launch import LaunchReplay, has_hooks, launch_replay
from mta_kernels.gpu_limits import compiled_capability

MAX_LAUNCHES = MAX_SIGNATURES = 4096
_signatures: dict[Hashable, int] = {}
_numbers, _numbering = itertools.count(), threading.Lock()
_launches: dict[tuple[Hashable, ...], _Launched] = {}


def launch(kernel: Any, programs: int, signature: Hashable, *args: Any, **options: Any) -> LaunchReplay | None:
    """`kernel[(programs,)](*args, **options)`, where options are constants in the kernel's order, then launch options.

    Calls of one kernel with equal signature, whole numbers and options must agree in the dtypes of their tensors and
    in which of these begin at multiples of 16 bytes: see `call_signature`. Returns the replay of the launch, if it
    has one.
    """
    if (recorder := planned.recorder()) is not None:
        recorder.triton(kernel, (programs,), args, options)
        return None
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        kernel[(programs,)](*args, **options)
        return None
    constants = tuple(options.values())
    key = (id(kernel), signature, programs, constants, *[x for x in args if type(x) is int])
    found = _launches.get(key)
    if found is None:
        compiled = kernel[(programs,)](*args, **options)
        found = _Launched(compiled, programs, constants[: len(kernel.params) - len(args)])
        keep(_launches, key, found, MAX_LAUNCHES)
    elif found.replay is None or has_hooks():
        found.by_triton(*args, *found.constants)
    else:
        found.replay(args)
    return found.replay


class _Launched:
    """What Triton compiled for a call, to be launched once more."""

    def __init__(self, compiled: Any, programs: int, constants: tuple) -> None:
        self.by_triton, self.constants = compiled[(programs, 1, 1)], constants
        self.replay = launch_replay(compiled, programs, constants)


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up: as `triton.cdiv`, which takes microseconds on the host."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not smaller: as `triton.next_power_of_2`, which takes microseconds on the host."""
    return 1 << (number - 1).bit_length() if number > 0 else number


def call_signature(*tensors: Tensor | None, options: Hashable = ()) -> int:
    """A number for what Triton specializes on: equal for equal devices, dtypes, shapes, strides and options.

    Addresses matter only by whether they are multiples of 16. A signature that was forgotten gets a new number when it
    comes back: no number stands for two.
    """
    seen = (
        options,
        *(None if x is None else (x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0) for x in tensors),
    )
    number = _signatures.get(seen)
    if number is None:
        with _numbering:
            number = keep(_signatures, seen, next(_numbers), MAX_SIGNATURES)
    return number


def dependent_launches(x: Tensor) -> bool:
    """Whether a kernel on x may start while the previous one finishes, and wait for it inside: from Hopper on.

    Every kernel of a chain waits, so all launches before the chain are done, too.
    """
    return x.is_cuda and compiled_capability(x.device)[0] >= 9


def operand(x: Tensor, block: list[int], host_descriptors: bool) -> Tensor | TensorDescriptor:
    """x as a kernel takes it: a descriptor for the copy engine, or the tensor where a GPU has none."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block) if host_descriptors else x


@triton.jit
def describe_rows(
    x_ptr, stride_h, stride_n, rows, columns,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """A descriptor of `x [heads, rows, columns]` whose rows start at multiples of ALIGNMENT elements."""
    return tl.make_tensor_descriptor(
        x_ptr, shape=[tl.num_programs(0), rows, columns],
        strides=[tl.multiple_of(stride_h, ALIGNMENT), tl.multiple_of(stride_n, ALIGNMENT), 1],
        block_shape=[1, BLOCK_ROWS, BLOCK_COLUMNS],
    )  # fmt: skip


@triton.jit
def describe_heads(
    x_ptr, stride_b, stride_h, stride_n, heads, rows, columns,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """A descriptor of `x [B, heads, rows, columns]` whose rows start at multiples of ALIGNMENT elements."""
    return tl.make_tensor_descriptor(
        x_ptr, shape=[tl.num_programs(0), heads, rows, columns],
        strides=[tl.multiple_of(stride_b, ALIGNMENT), tl.multiple_of(stride_h, ALIGNMENT),
                 tl.multiple_of(stride_n, ALIGNMENT), 1],
        block_shape=[1, 1, BLOCK_ROWS, BLOCK_COLUMNS],
    )  # fmt: skip
