"""Attention in three CUDA kernels with tiles in shared memory, and the scores in memory: launches cuda_tiled.cu.

float32, float16 and bfloat16, any head dim. Takes `4 B Hq M N` bytes for the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.attention.cuda_launch import ELEMENTS, MatrixArguments, device_unsupported, kernel
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import missing_package

TILE, THREADS = 64, 256  # as in cuda_tiled.cu


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """q `[B, Hq, M, D]`, k `[B, Hkv, N, D]`, v `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`. Copies what is not contiguous."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, heads, queries = q.shape[:3]
    keys, value_dim = v.shape[2:]
    scores = torch.empty(batch, heads, queries, keys, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, queries, value_dim, dtype=q.dtype, device=q.device)
    arguments = MatrixArguments.of(q, k, v, out, scores, causal=causal, scale=scale)
    constants = (("ELEMENT", ELEMENTS[q.dtype]),)
    row_tiles = batch * heads * tiles(queries)
    blocks = {
        "scores": row_tiles * tiles(keys),
        "softmax_rows": -(-batch * heads * queries // (THREADS // 32)),
        "weighted_sum": row_tiles * tiles(value_dim),
    }
    for name, count in blocks.items():
        driver.launch(
            kernel("cuda_tiled.cu", name, constants, q.device.index), (count, 1), THREADS, 0, q.device.index, arguments
        )
    return out


def tiles(length: int) -> int:
    return -(-length // TILE)


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot run, in one clause with what would work, or None."""
    if dtype not in ELEMENTS:
        return f"cuda-tiled takes float32, float16 and bfloat16, not {dtype}"
    return device_unsupported(device) or missing_package()
