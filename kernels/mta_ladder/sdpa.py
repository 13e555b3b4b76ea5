"""PyTorch's `scaled_dot_product_attention` with its backend named: the yardstick for every kernel here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Plain attention of `q [B, Hq, Nq, D]`, `k, v [B, Hkv, N, D]` by exactly `backend`: flash, cudnn or math.

    Causal takes as many queries as keys, or a single query (the newest, which sees every key).
    Raises RuntimeError where PyTorch has no such kernel for these arguments; it never falls back to another.
    """
    if causal and q.shape[2] not in (1, k.shape[2]):
        raise ValueError(f"{q.shape[2]} queries and {k.shape[2]} keys: causal takes one query, or as many as keys")
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal and q.shape[2] > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def unsupported(
    *, device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, keys: int | None = None
) -> str | None:
    """Why `attention` cannot run with these (and `keys` keys) on this machine, or None if it can."""
    if backend == "math":
        return None
    if backend == "cudnn":
        if device.type != "cuda":
            return "cuDNN's attention needs a CUDA GPU"
        if not torch.backends.cudnn.is_available():
            return "this PyTorch has no cuDNN"
        if keys == 1:
            return "cuDNN's attention takes two keys or more"
    if device.type == "cuda":
        if dtype == torch.float32:
            return f"{backend} attention takes fp16 and bf16 only"
        if head_dim % 8 or head_dim > 256:
            return f"{backend} attention takes head dims that are multiples of 8 up to 256, not {head_dim}"
        if backend == "cudnn" and head_dim > 128 and torch.cuda.get_device_capability()[0] < 9:
            return f"cuDNN's attention takes head dims up to 128 on this GPU, not {head_dim}"
        if torch.cuda.get_device_capability() < (8, 0):
            return f"{backend} attention needs a GPU of sm_80 or later"
    return None
