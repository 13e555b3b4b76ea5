"""Plain attention as it is defined, in eager PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.conv_attention.reference import repeat_heads
from mta_kernels.operation import softmax_scale


def attention_reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
    """`softmax(scale * q k^T) v` for `q [B, Hq, Nq, D]`, `k, v [B, Hkv, N, D]`: `[B, Hq, Nq, D]`.

    Stores the `Nq x N` scores. With `causal`, the queries are the last `Nq` of the sequence.
    """
    keys, values = (repeat_heads(x, q.shape[1]) for x in (k, v))
    scores = q @ keys.transpose(-1, -2) * softmax_scale(scale, q.shape[3])
    if causal:
        rows, columns = scores.shape[-2:]
        future = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1 + columns - rows)
        scores = scores.masked_fill(future, float("-inf"))
    return torch.softmax(scores, dim=-1) @ values
