"""Attention as it is defined, in three CUDA kernels with the scores in memory: launches cuda_naive.cu.

float32, float16 and bfloat16, any head dim. Takes `4 B Hq M N` bytes for the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.attention.cuda_launch import ELEMENTS, MatrixArguments, device_unsupported, kernel
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import missing_package

THREADS = 256


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """q `[B, Hq, M, D]`, k `[B, Hkv, N, D]`, v `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`. Copies what is not contiguous."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, heads, queries = q.shape[:3]
    scores = torch.empty(batch, heads, queries, k.shape[2], dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, queries, v.shape[3], dtype=q.dtype, device=q.device)
    arguments = MatrixArguments.of(q, k, v, out, scores, causal=causal, scale=scale)
    constants = (("ELEMENT", ELEMENTS[q.dtype]),)
    numbers = {"scores": scores.numel(), "softmax_rows": batch * heads * queries, "weighted_sum": out.numel()}
    for name, threads in numbers.items():
        blocks = -(-threads // THREADS)
        driver.launch(
            kernel("cuda_naive.cu", name, constants, q.device.index), (blocks, 1), THREADS, 0, q.device.index, arguments
        )
    return out


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot run, in one clause with what would work, or None."""
    if dtype not in ELEMENTS:
        return f"cuda-naive takes float32, float16 and bfloat16, not {dtype}"
    return device_unsupported(device) or missing_package()
