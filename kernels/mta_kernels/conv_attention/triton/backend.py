"""The Triton backend: what it runs where, and its kernels, which are imported when they first run."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.backend import Backend, Gradients, Request, caches_unsupported, size_unsupported
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.gpu_limits import absent, compiled_capability, cuda_capability
from mta_kernels.operation import Operation
from mta_kernels.torch_compile import cached_constant, constant_when_compiled, statically_true

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Where query heads share a KV head, this decode is faster than CUDA's on short caches, if the copy engine reads them.
# Short is up to `few_keys` of all sequences and KV heads, times the heads that share one (decisions 68 and 83).
MOST_SHARING = 4  # above it, nowhere (decision 76)


def few_keys(head_dim: int) -> int:
    """The most keys on which this decode is faster than CUDA's."""
    return head_dim * 512


def why_not(request: Request) -> str | None:
    """Why the Triton kernels cannot run a request on this machine, or None if they can."""
    # Triton 3.6 compiles tiles of keys whose numbers lie apart to reads beyond a block's shared memory.
    if request.decode is not None and (reason := caches_unsupported(*request.decode[1:])):
        return reason
    return (
        absent(request.device)
        or platform_unsupported(request.device, request.dtype)
        or size_unsupported(request.head_dim, *request.operation.conv.taps)
    )


@constant_when_compiled
def platform_unsupported(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel could run in a dtype on this machine, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and not planned.gpu_at(torch.device(device).index)
    return _cached_platform_unsupported(device, dtype, interpreted)


@functools.cache
def _cached_platform_unsupported(device: torch.device | str, dtype: torch.dtype, interpreted: bool) -> str | None:
    device = torch.device(device)
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton; it exists for Linux)"
    if device.type != "cuda" and not interpreted:
        return (
            f"Triton kernels need a CUDA GPU, not a {device.type} device (TRITON_INTERPRET=1 runs them slowly on a CPU)"
        )
    if device.type == "cuda" and cuda_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than sm_80"
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of float16, bfloat16, float32"
    if interpreted and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly; use float16 or float32 there"
    return None


def rank(request: Request) -> int:
    """After all other backends, but before them for a decode of few keys."""
    return 0 if _decodes_few_keys(request) else 3


def _decodes_few_keys(request: Request) -> bool:
    """Whether this is the faster backend for a step on short caches whose heads a few query heads share."""
    if request.decode is None:
        return False
    q, k, _ = request.decode
    group = q.shape[1] // k.shape[1]
    if group == 1 or group > MOST_SHARING:
        return False
    keys = k.shape[0] * k.shape[1] * k.shape[2]
    if not statically_true(keys * group <= few_keys(request.head_dim)):
        return False
    # With another batch size than q's the caches are pages, which the copy engine does not read.
    if not statically_true(k.shape[0] == q.shape[0]) or why_not(request) is not None:
        return False
    from mta_kernels.conv_attention.triton.decode_plan import bulk_pays

    return bulk_pays(request.head_dim, group, request.dtype.itemsize, _capability(q.device))


_capability = cached_constant(compiled_capability)


def _forward(operation: Operation, q: Tensor, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from mta_kernels.conv_attention.triton.forward import conv_attention_forward

    with on_device_of(q), without_autocast(q):
        return conv_attention_forward(operation, q, *tensors, **options)


def _backward(operation: Operation, q: Tensor, *tensors: Tensor, **options: Any) -> Gradients:
    from mta_kernels.conv_attention.triton.backward import conv_attention_backward

    return conv_attention_backward(operation, q, *tensors, **options)


def _decode(operation: Operation, q_window: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    from mta_kernels.conv_attention.triton.decode import conv_attention_decode

    with without_autocast(q_window):
        return conv_attention_decode(operation, q_window, *tensors, **options)


TRITON = Backend("triton", why_not, rank, _forward, _backward, _decode)
