"""Kernels for tests of `mtabench inspect`, modest and greedy; the process that compiles imports this, no test does."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from mta_kernels.nvrtc.compiler import Source
from mta_kernels.plan import KernelCall
from mtabench.static.compiling import SkippedError
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape

tensor = partial(torch.empty, device="meta")


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, depth, BLOCK_ROWS: tl.constexpr, BLOCK_DEPTH: tl.constexpr):
    """A product of two tiles: sums in registers, operands in shared memory."""
    row = tl.arange(0, BLOCK_ROWS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_ROWS], tl.float32)
    for start in range(0, depth, BLOCK_DEPTH):
        column = start + tl.arange(0, BLOCK_DEPTH)
        a = tl.load(a_ptr + row[:, None] * depth + column[None, :])
        b = tl.load(b_ptr + row[:, None] * depth + column[None, :])
        total = tl.dot(a, b.T, total)
    tl.store(out_ptr + row[:, None] * BLOCK_ROWS + row[None, :], total)


@triton.jit
def _copy_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, tl.load(x_ptr + index))


@triton.jit
def _wrong_kernel(x_ptr):
    tl.store(x_ptr, tl.no_such_function(x_ptr))  # type: ignore[attr-defined]


def modest(shape: Shape, limits: Limits) -> Iterator[KernelCall]:
    """Two products that fit, and a copy."""
    yield product(block=64, warps=4, stages=2)
    yield product(block=32, warps=4, stages=2)
    yield copy(1024)


def greedy(shape: Shape, limits: Limits) -> Iterator[KernelCall]:
    """Products with the sums of 128 x 128 in one warp, 512 a thread, and with 8 stages of half a megabyte; the copy."""
    yield product(block=128, warps=1, stages=2)
    yield product(block=64, block_depth=256, warps=4, stages=8)
    yield copy(1024)


def wrong(shape: Shape, limits: Limits) -> Iterator[KernelCall]:
    """A kernel that does not compile, and host code that has no tiles for this shape."""
    yield triton_call(_wrong_kernel, tensor(16, dtype=torch.float32))
    raise ValueError("the smallest tiles need more")


def unavailable(shape: Shape, limits: Limits) -> Iterator[KernelCall]:
    """A source that this machine cannot compile."""
    raise SkippedError("its compiler is not installed; install it")


def dying(shape: Shape, limits: Limits) -> Iterator[KernelCall]:
    """A compiler that crashes."""
    os.abort()


def cuda(shape: Shape, limits: Limits) -> Iterator[KernelCall]:
    """Two kernels of a CUDA source: one with a local array, one with static shared memory."""
    path, headers = Path(__file__).with_name("planted_kernels.cu"), {"generated.cuh": "#define OFFSET 3\n"}
    source = Source(path, limits.target, {"SIZE": 64}, headers)
    for name, threads, shared_memory in (("lookup", 256, 0), ("reversed", 128, limits.shared_per_block)):
        yield KernelCall(name, "cuda", source, source.constants, (1,), threads, shared_memory, (), 0)


def product(block: int, warps: int, stages: int, block_depth: int = 64) -> KernelCall:
    a, b = (tensor(block, 1024, dtype=torch.bfloat16) for _ in range(2))
    out = tensor(block, block, dtype=torch.float32)
    sizes = {"BLOCK_ROWS": block, "BLOCK_DEPTH": block_depth, "num_warps": warps, "num_stages": stages}
    return triton_call(_product_kernel, a, b, out, 1024, **sizes)


def copy(block: int) -> KernelCall:
    return triton_call(_copy_kernel, *(tensor(block, dtype=torch.float32) for _ in range(2)), BLOCK=block)


def triton_call(kernel: Any, *args: Any, **constants: Any) -> KernelCall:
    return KernelCall(kernel.__name__, "triton", kernel, constants, (1,), 128, None, args, 0)
