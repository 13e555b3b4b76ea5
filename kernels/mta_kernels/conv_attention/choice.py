"""Which backend a call takes: the one that it names, or the fastest that can run it."""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.backend import Choice, Request
from mta_kernels.conv_attention.arguments import (
    autocast_dtype,
    cast_unless_float32,
    check_are_tensors,
    check_explained,
    check_weight,
    like_cast,
    wants_gradient,
)
from mta_kernels.conv_attention.backends import CONV_ATTENTION
from mta_kernels.operation import Operation


def unsupported(
    backend: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    query_taps: int,
    key_taps: int,
    backward: bool = False,
    decode: bool = False,
) -> str | None:
    """Why `backend` cannot run conv attention with these on this machine, or None if it can.

    `device` is a torch device or its type, "cuda" or "cpu"; `backward` is whether gradients are wanted as well. The
    answer is about a whole forward, or with `decode` about a decode step on contiguous caches. Raises ValueError for an
    unknown backend.
    """
    request = Request(_with_taps(query_taps, key_taps), device, dtype, head_dim, backward)
    return CONV_ATTENTION.unsupported(backend, request, decode=decode)


def _with_taps(query_taps: int, key_taps: int, causal: bool = True) -> Operation:
    """An operation with so many taps: no other property decides which backend can run it."""
    return Operation.of((query_taps, key_taps), 1, causal=causal, scale=1.0)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    backend: str = "auto",
    decode: bool = False,
) -> Choice:
    """Which backend `conv_attention`, or `conv_attention_decode`, takes for these arguments, and why.

    Besides these arguments only autocast and `requires_grad` change the choice. Raises ValueError for an unknown
    backend, for a named one that cannot run them, and for shapes and devices that do not fit. Raises TypeError for
    wrong dtypes and for arguments that are no tensors.
    """
    check_are_tensors(q=q, k=k, v=v, weight=weight)
    weight = cast_unless_float32(weight)
    query = like_cast(q)
    check_explained(query, like_cast(k), like_cast(v), decode=decode)
    check_weight(weight, q.shape[1], query)
    request = Request(
        _with_taps(weight.shape[-2], weight.shape[-1], causal), q.device, autocast_dtype(q), q.shape[-1],
        wants_gradient(q, k, v, weight), (q, k, v) if decode else None,
    )  # fmt: skip
    kernels, reason = CONV_ATTENTION.choose(backend, request)
    return Choice("reference" if kernels is None else kernels.name, reason)
