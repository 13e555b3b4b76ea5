"""Rung 1, `c-loops`: attention in C as it is written down, three loops after each other (c_loops.c), on one core."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mta_kernels.attention import c_compiler

SOURCE = Path(__file__).with_suffix(".c")


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention of `q [B, Hq, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`, all float32.

    Causal: the queries are the last M of N positions. Stores the `M x N` scores of one head at a time. Inputs that are
    not contiguous are copied.
    """
    return c_compiler.attention(SOURCE, q, k, v, causal=causal, scale=scale)


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot run, or None: it needs a C compiler, a CPU and float32."""
    return c_compiler.unsupported(SOURCE, device=device, dtype=dtype)
