"""A top rung, `flex`: PyTorch's FlexAttention, a fused kernel that torch.compile generates for a mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mta_kernels import torch_compile

MOST_SHAPES = 64  # whose kernels and masks are kept
LEAST_HEAD_DIM = 16  # on a GPU


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention of `q [B, Hq, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, Dv]`: `[B, Hq, M, Dv]` in q's dtype.

    Causal: the queries are the last M of N positions. The first call of a shape compiles, which takes seconds, and
    makes its mask from `M x N` booleans. Gradients exist on a GPU.
    """
    function = _compiled(q.shape, k.shape, v.shape, q.dtype, q.device, q.requires_grad, causal)
    mask = _block_mask(q.shape[2], k.shape[2], q.device) if causal else None
    return function(q, k, v, mask, scale)


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot run, or None."""
    if device.type == "cpu" and not torch.cpu._is_avx2_supported():
        return "FlexAttention needs AVX2 on a CPU"
    if device.type == "cuda" and head_dim < LEAST_HEAD_DIM:
        return f"FlexAttention takes head dims from {LEAST_HEAD_DIM} on a GPU, not {head_dim}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "FlexAttention needs a GPU of sm_80 or later"
    return torch_compile.missing(device.type)


@functools.lru_cache(maxsize=MOST_SHAPES)
def _compiled(*shapes_and_options: Any) -> Callable[..., Tensor]:
    """A function compiled for these alone. It never runs uncompiled, which would store the scores."""
    return torch_compile.compiled_apart(_flex_attention)


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    grouped = q.shape[1] != k.shape[1]
    return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)


@functools.lru_cache(maxsize=MOST_SHAPES)
def _block_mask(rows: int, keys: int, device: torch.device) -> Any:
    """The blocks of keys that a block of queries sees wholly, in part or not at all."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + (keys - rows)

    return create_block_mask(seen, None, None, rows, keys, device=str(device))
