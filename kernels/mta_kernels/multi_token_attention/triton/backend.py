"""The Triton backend of the whole operation: what it supports, and its stages, which are imported when they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mta_kernels.backend import HEAD_DIMS, Backend, Request, caches_unsupported, size_unsupported
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.conv_attention.triton.backend import platform_unsupported
from mta_kernels.gpu_limits import absent, shared_memory_limit
from mta_kernels.multi_token_attention import separate_heads
from mta_kernels.multi_token_attention.mixers import MixerGradients, Mixers
from mta_kernels.operation import ONE_TAP, Convolution, Operation

HEADS, QUERY_TAPS, KEY_TAPS = 64, 8, 17  # at most; decode takes more taps: see `size_unsupported`


def why_not(request: Request) -> str | None:
    """Why Triton's kernels cannot run a request on this machine, in a clause, or None if they can."""
    if request.decode is not None:
        return _decode_unsupported(request, *request.decode[1:])
    return (
        absent(request.device)
        or platform_unsupported(request.device, request.dtype)
        or _shape_unsupported(request)
        or ("it has no dropout" if request.dropout else None)
    )


def _decode_unsupported(request: Request, k_cache: Tensor, v_cache: Tensor) -> str | None:
    operation, head_dim = request.operation, request.head_dim
    return (
        caches_unsupported(k_cache, v_cache)
        or _heads_unsupported(request.heads)
        or absent(request.device)
        or platform_unsupported(request.device, request.dtype)
        or size_unsupported(head_dim, *(operation.pre_conv or ONE_TAP).taps)
        or size_unsupported(head_dim, *(operation.post_conv or ONE_TAP).taps)
        or _decode_does_not_fit(request)
    )


def _decode_does_not_fit(request: Request) -> str | None:
    from mta_kernels.multi_token_attention.decode.plan import values_blocks

    room = shared_memory_limit(torch.device(request.device))
    if values_blocks(request.operation, request.head_dim, request.heads, request.dtype.itemsize, room):
        return None
    key_taps = (request.operation.post_conv or ONE_TAP).key_taps
    return (
        f"{request.heads} heads of {key_taps} key taps after the softmax in {request.dtype} need more than the {room} "
        "bytes of shared memory that this GPU has"
    )


def _shape_unsupported(request: Request) -> str | None:
    # Not `in`: torch.compile cannot evaluate it for a symbol.
    if not HEAD_DIMS.start <= request.head_dim < HEAD_DIMS.stop:
        return f"head_dim {request.head_dim} is outside {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
    operation = request.operation
    return (
        _heads_unsupported(request.heads)
        or _taps_unsupported(operation.pre_conv)
        or _taps_unsupported(operation.post_conv)
    )


def _heads_unsupported(heads: int) -> str | None:
    return f"{heads} query heads are more than {HEADS}" if heads > HEADS else None


def _taps_unsupported(convolution: Convolution | None) -> str | None:
    if convolution is None:
        return None
    query_taps, key_taps = convolution.taps
    if query_taps <= QUERY_TAPS and key_taps <= KEY_TAPS:
        return None
    return f"{query_taps}x{key_taps} taps are outside 1x1 to {QUERY_TAPS}x{KEY_TAPS} (query taps x key taps)"


def rank(request: Request) -> int:
    """The rank among backends that can run a request: a backend that is faster somewhere ranks before this one."""
    return 2


def _forward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, **options: Any
) -> tuple[Tensor, Tensor]:
    from mta_kernels.multi_token_attention.triton.forward import mixed_attention_forward

    with on_device_of(q), without_autocast(q):
        return separate_heads.forward(mixed_attention_forward, operation, q, k, v, mixers, **options)


def _backward(operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, *rest: Tensor, **options: Any
              ) -> MixerGradients:  # fmt: skip
    from mta_kernels.multi_token_attention.triton.backward import mixed_attention_backward

    with on_device_of(q), without_autocast(q):
        return separate_heads.backward(mixed_attention_backward, operation, q, k, v, mixers, *rest, **options)


def _decode(operation: Operation, q_window: Tensor, *rest: Any) -> Tensor:
    from mta_kernels.multi_token_attention.decode.triton import newest_row

    with without_autocast(q_window):
        return newest_row(operation, q_window, *rest)


TRITON = Backend("triton", why_not, rank, _forward, _backward, _decode)
