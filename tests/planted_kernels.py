"""Kernels for tests of `mtabench inspect`, modest and greedy; the process that compiles imports this, no test does."""

import os
from collections.abc import Iterator
from pathlib import Path

import nvcc
import torch
import triton
import triton.language as tl

from mta_kernels.conv_attention.triton.launch import launch
from mtabench.static.absent_gpu import tensor
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape
from mtabench.static.sources import CudaKernel, SkippedError


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


def modest(shape: Shape, limits: Limits) -> None:
    """Two products that fit, and a copy."""
    _product(block=64, warps=4, stages=2)
    _product(block=32, warps=4, stages=2)
    _copy(1024)


def greedy(shape: Shape, limits: Limits) -> None:
    """Products with the sums of 128 x 128 in one warp, 512 a thread, and with 8 stages of half a megabyte; the copy."""
    _product(block=128, warps=1, stages=2)
    _product(block=64, block_depth=256, warps=4, stages=8)
    _copy(1024)


def wrong(shape: Shape, limits: Limits) -> None:
    """A kernel that does not compile, and host code that has no tiles for this shape."""
    _wrong_kernel[(1,)](tensor(16, dtype=torch.float32))
    raise ValueError("the smallest tiles need more")


def unavailable(shape: Shape, limits: Limits) -> None:
    """A source that this machine cannot compile."""
    raise SkippedError("its compiler is not installed; install it")


def dying(shape: Shape, limits: Limits) -> None:
    """A compiler that crashes."""
    os.abort()


def cuda(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """Two kernels of a CUDA source: one with a local array, one with static shared memory."""
    source = Path(__file__).with_name("planted_kernels.cu")
    code = nvcc.compile_file(source, limits, ["-DSIZE=64"], {"generated.cuh": "#define OFFSET 3\n"})
    yield CudaKernel("lookup", code, warps=8, dynamic_shared=0)
    yield CudaKernel("reversed", code, warps=4, dynamic_shared=limits.shared_per_block)


def _product(block: int, warps: int, stages: int, block_depth: int = 64) -> None:
    a, b = (tensor(block, 1024, dtype=torch.bfloat16) for _ in range(2))
    out = tensor(block, block, dtype=torch.float32)
    _product_kernel[(1,)](
        a, b, out, 1024, BLOCK_ROWS=block, BLOCK_DEPTH=block_depth, num_warps=warps, num_stages=stages
    )


def _copy(block: int) -> None:
    """Launched in a way that remembers launches, and does not ask Triton again for one it saw."""
    launch(_copy_kernel, 1, "copy", *(tensor(block, dtype=torch.float32) for _ in range(2)), BLOCK=block)
