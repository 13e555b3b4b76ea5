"""Checks of the arguments that every backend shares, and the padding rule of the convolution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PAD_KEYS = ("both", "left", "right")
PAGE_SIZES = (16, 32, 64, 128, 256)


def key_padding(key_taps: int, pad_key: str) -> int:
    """Columns of zeros left of the scores: `pad` in `c[i, j] = sum w[a, b] s[i-(cq-1)+a, j-pad+b]`.

    "both" centres the taps (an even count takes one more column on the right), "left" looks back only,
    "right" looks ahead only.
    """
    if pad_key == "both":
        return (key_taps - 1) // 2
    if pad_key == "left":
        return key_taps - 1
    if pad_key == "right":
        return 0
    raise ValueError(f"pad_key is {pad_key!r}; expected one of {', '.join(map(repr, PAD_KEYS))}")


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The factor on `q . k`: `1 / sqrt(head_dim)` unless given."""
    return 1.0 / math.sqrt(head_dim) if scale is None else float(scale)


def check_heads(query_heads: int, key_heads: int) -> None:
    """Raise ValueError unless every KV head serves the same number of query heads."""
    if query_heads % key_heads:
        raise ValueError(
            f"{query_heads} query heads cannot share {key_heads} key heads: "
            "the number of query heads must be a multiple of the number of key heads"
        )


def check_weight(weight: Tensor, query_heads: int, q: Tensor) -> None:
    """Raise unless `weight` is `[query_heads, cq, ck]`, on the device of q, of its dtype or float32."""
    if weight.dim() != 3 or weight.shape[0] != query_heads or 0 in weight.shape:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; expected [query heads, query taps, key taps] "
            f"with {query_heads} query heads and at least one tap each way"
        )
    if weight.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"weight has dtype {weight.dtype}; expected {q.dtype}, as q, or torch.float32")
    if weight.device != q.device:
        raise ValueError(f"weight is on {weight.device} and q on {q.device}; move them to one device")


def check_arguments(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, pad_key: str) -> None:
    """Raise ValueError or TypeError, in one sentence, unless the arguments are those of `conv_attention`."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected four dimensions [batch, heads, seq_len, head_dim]"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; every dimension must be at least 1")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected a floating-point dtype")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} and q {q.dtype}; they must be the same")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}; move them to one device")
    batch, query_heads, seq_len, head_dim = q.shape
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they must be the same")
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, seq_len, head_dim):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; "
            "batch, seq_len and head_dim must be the same (only the number of heads may differ)"
        )
    check_heads(query_heads, k.shape[1])
    check_weight(weight, query_heads, q)
    key_padding(weight.shape[2], pad_key)


def check_block_table(block_table: Tensor, q_window: Tensor, k_cache: Tensor) -> None:
    """Raise ValueError unless `block_table` and the size of the cache's pages fit."""
    batch, page_size = q_window.shape[0], k_cache.shape[2]
    fits = block_table.dim() == 2 and block_table.shape[0] == batch and block_table.shape[1] > 0
    if not fits or block_table.dtype != torch.int32 or block_table.device != q_window.device:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}, dtype {block_table.dtype}, on {block_table.device}; "
            f"expected [{batch}, pages a sequence], torch.int32, on {q_window.device}"
        )
    if page_size not in PAGE_SIZES:
        raise ValueError(f"the cache has pages of {page_size} keys; expected one of {', '.join(map(str, PAGE_SIZES))}")
