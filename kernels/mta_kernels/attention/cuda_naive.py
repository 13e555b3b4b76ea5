"""Attention as it is defined, in three CUDA kernels with the scores in memory: launches cuda_naive.cu.

float32, float16 and bfloat16, any head dim. Takes `4 B Hq M N` bytes for the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.attention.cuda_launch import THREADS, unfused_attention, unfused_unsupported


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """q `[B, Hq, M, D]`, k `[B, Hkv, N, D]`, v `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`. Copies what is not contiguous."""
    return unfused_attention("cuda_naive.cu", _blocks, q, k, v, causal=causal, scale=scale)


def _blocks(batch_heads: int, queries: int, keys: int, value_dim: int) -> list[int]:
    """A thread a score, a row, and an element of out."""
    rows = batch_heads * queries
    return [-(-threads // THREADS) for threads in (rows * keys, rows, rows * value_dim)]


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot run, in one clause with what would work, or None."""
    return unfused_unsupported("cuda-naive", device, dtype)
