"""Two functions to measure, in plain PyTorch: plain attention, and conv attention.

mtabench verify --impl docs/examples/my_attention.py:attention
mtabench fwd --impl docs/examples/my_attention.py:attention,sdpa-math --seq 256,512
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Plain attention: `q [B, Hq, N, D]`, `k, v [B, Hkv, N, D]`; each KV head serves Hq / Hkv query heads."""
    return probabilities(scores(q, k, scale), causal) @ shared(v, q)


def conv_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Conv attention: `weight [Hq, cq, ck]` looks `cq - 1` queries back, and its key taps are centred."""
    before = scores(q, k, scale)
    if causal:
        before = before.tril()
    _, query_taps, key_taps = weight.shape
    left = (key_taps - 1) // 2
    padded = F.pad(before, (left, key_taps - 1 - left, query_taps - 1, 0))
    convolved = F.conv2d(padded, weight[:, None], groups=q.shape[1])
    return probabilities(convolved, causal) @ shared(v, q)


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """`[B, Hq, N, N]`."""
    return q @ shared(k, q).mT * scale


def shared(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values a query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def probabilities(x: Tensor, causal: bool) -> Tensor:
    """The softmax of scores, over the keys that a query may see."""
    if causal:
        later = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        x = x.masked_fill(later, float("-inf"))
    return x.softmax(-1, dtype=torch.float32).to(x.dtype)


def decode(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """One new query `[B, Hq, 1, D]`, which sees every key of the cache."""
    return attention(q, k, v, causal=False, scale=scale)


attention.decode = decode
attention.work = conv_attention.work = "dense"
