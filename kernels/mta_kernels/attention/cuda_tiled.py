"""Attention in three CUDA kernels with tiles in shared memory, and the scores in memory: launches cuda_tiled.cu.

float32, float16 and bfloat16, any head dim. Takes `4 B Hq M N` bytes for the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.attention.cuda_launch import THREADS, unfused_attention, unfused_unsupported

TILE = 64  # as in cuda_tiled.cu


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """q `[B, Hq, M, D]`, k `[B, Hkv, N, D]`, v `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`. Copies what is not contiguous."""
    return unfused_attention("cuda_tiled.cu", _blocks, q, k, v, causal=causal, scale=scale)


def _blocks(batch_heads: int, queries: int, keys: int, value_dim: int) -> tuple[int, int, int]:
    """A block a tile of scores, a warp a row, and a block a tile of out."""
    row_tiles, rows_a_block = batch_heads * tiles(queries), THREADS // 32
    return row_tiles * tiles(keys), -(-batch_heads * queries // rows_a_block), row_tiles * tiles(value_dim)


def tiles(length: int) -> int:
    return -(-length // TILE)


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot run, in one clause with what would work, or None."""
    return unfused_unsupported("cuda-tiled", device, dtype)
