"""The one place that chooses the kernels of each step of forward and backward: CUDA's where they run, else Triton's.

It chooses for a `Gpu` that need not be present, since predictions of times call it, too. None is a device that CUDA's
kernels cannot run on. Imports no Triton.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from mta_kernels.gpu_limits import Gpu, gpu_of
from mta_kernels.multi_token_attention.bands_cuda import bands
from mta_kernels.multi_token_attention.heads_cuda import heads as meeting
from mta_kernels.multi_token_attention.mix_cuda import logits as mix
from mta_kernels.multi_token_attention.mix_cuda.values import constants_for as values_constants
from mta_kernels.multi_token_attention.rows_cuda import rows
from mta_kernels.nvrtc.compiler import missing_package
from mta_kernels.operation import ONE_TAP, Convolution, Operation

# Whether to use CUDA's kernels where they run; measurements and tests turn them off.
CUDA_MIX = True  # forward, heads mixed and nothing convolved
CUDA_HEADS = True  # forward with a convolution of probabilities and mixings
CUDA_ROWS = True  # both passes, nothing convolved
CUDA_BANDS = True  # convolutions and their gradients
CUDA_BACKWARD_HEADS = True  # mixings of a backward with a convolution of probabilities
# Where `mix` was the fastest when measured (docs/decisions/044, 088): up to this head dim, beyond it from so many keys
# on. And only if a chunk has tiles for so many blocks.
SMALL_HEAD_DIM, MANY_KEYS, LEAST_BLOCKS = 64, 4096, 64

# A forward: kernels from queries to the output (`mix_cuda`); kernels that mix heads between the two products
# (`heads_cuda`); or one stage for each step, with `convolves` and `mixes_rows` to choose their kernels.
Forward = Literal["mix", "heads", "stages"]


@functools.lru_cache(256)
def cuda_gpu(device: torch.device) -> Gpu | None:
    """The GPU that a device is, None where no kernel in CUDA C++ can be compiled or run."""
    if device.type != "cuda" or missing_package(device) is not None or gpu_of(device).capability < (8, 0):
        return None
    return gpu_of(device)


def forward(
    operation: Operation, gpu: Gpu | None, dtype: torch.dtype, heads: int, head_dim: int, *, documents: bool,
    key_rows: int, rows: int, sequences: int,
) -> Forward:  # fmt: skip
    """The kernels of a forward of `key_rows` keys, in chunks of so many `sequences` with so many `rows` each."""
    mixes = CUDA_MIX and can_mix(operation, gpu, dtype, heads, head_dim, documents=documents)
    if mixes and mix_pays(heads, head_dim, key_rows, rows, sequences):
        return "mix"
    if CUDA_HEADS and _supports_head_mixing(operation, gpu, dtype, heads):
        return "heads"
    return "stages"


@functools.lru_cache(256)
def can_mix(
    operation: Operation, gpu: Gpu | None, dtype: torch.dtype, heads: int, head_dim: int, *, documents: bool
) -> bool:  # fmt: skip
    """Whether `mix_cuda` can run a forward."""
    if gpu is None or gpu.capability[0] != 9 or documents or operation.is_convolved:
        return False
    return mix.shape_unsupported(dtype, heads, head_dim) is None


def mix_pays(heads: int, head_dim: int, key_rows: int, rows: int, sequences: int) -> bool:
    """Whether `mix_cuda` is the fastest there."""
    if head_dim > SMALL_HEAD_DIM and key_rows < MANY_KEYS:
        return False
    constants = values_constants(heads, head_dim)
    return sequences * -(-rows // constants.rows) * constants.cluster >= LEAST_BLOCKS


@functools.lru_cache(256)
def _supports_head_mixing(operation: Operation, gpu: Gpu | None, dtype: torch.dtype, heads: int) -> bool:
    """Whether `heads_cuda` can run a forward: it needs both mixings."""
    after = operation.post_conv
    if gpu is None or after is None or operation.pre_mix is None or operation.post_mix is None:
        return False
    convolutions = {"pre": operation.pre_conv or ONE_TAP, "post": after}
    return meeting.shape_unsupported(gpu.shared_memory, dtype, heads, convolutions) is None


def convolves(convolution: Convolution, gpu: Gpu | None, dtype: torch.dtype) -> bool:
    """Whether CUDA's kernels run a convolution of stored scores, and its gradients."""
    return CUDA_BANDS and gpu is not None and bands.shape_unsupported(dtype, convolution) is None


def mixes_rows(gpu: Gpu | None, dtype: torch.dtype, heads: int, keys: int, *, backward: bool) -> bool:
    """Whether CUDA's kernels mix rows of so many keys; only without convolutions, as their chunks have no halo."""
    return CUDA_ROWS and gpu is not None and _has_rows(gpu, dtype, heads, keys, backward)


@functools.lru_cache(1024)
def _has_rows(gpu: Gpu, dtype: torch.dtype, heads: int, keys: int, backward: bool) -> bool:
    return rows.shape_unsupported(gpu, dtype, heads, keys, backward) is None


def mixes_heads_backward(operation: Operation, gpu: Gpu | None, dtype: torch.dtype, heads: int) -> bool:
    """Whether `heads_cuda` runs the mixings of a backward: both of them, with a convolution in between.

    It needs delta, which CUDA's convolution computes.
    """
    if not CUDA_BACKWARD_HEADS or operation.post_conv is None or not convolves(operation.post_conv, gpu, dtype):
        return False
    return _supports_backward_mixing(operation, gpu, dtype, heads)


def recomputes_probabilities(operation: Operation, gpu: Gpu | None, dtype: torch.dtype, heads: int) -> bool:
    """Whether one of these kernels convolves scores and recomputes probabilities, as the forward's kernels do.

    They need as much memory.
    """
    forward_meets = (
        CUDA_HEADS and operation.pre_conv is not None and _supports_head_mixing(operation, gpu, dtype, heads)
    )
    return forward_meets and mixes_heads_backward(operation, gpu, dtype, heads)


@functools.lru_cache(256)
def _supports_backward_mixing(operation: Operation, gpu: Gpu | None, dtype: torch.dtype, heads: int) -> bool:
    if gpu is None or operation.pre_mix is None or operation.post_mix is None or operation.post_conv is None:
        return False
    convolutions = {"heads": operation.post_conv}
    return meeting.shape_unsupported(gpu.shared_memory, dtype, heads, convolutions) is None
