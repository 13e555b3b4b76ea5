"""Inputs and error measures shared by the kernel tests."""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.conv_attention import conv_attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bfloat16 matrices wrongly, so bf16 needs a GPU.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def make(batch, heads, kv_heads, seq_len, head_dim, taps, dtype=torch.float32, seed=0, magnitude=1.0):
    """Random q, k, v and weight on the test device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    q = (normal(batch, heads, seq_len, head_dim) * magnitude).to(dtype)
    k, v = (normal(batch, kv_heads, seq_len, head_dim).to(dtype) for _ in range(2))
    return q, k, v, (normal(heads, *taps) * 0.3).to(dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item()


def assert_close(got: Tensor, q, k, v, weight, **options) -> None:
    """`got` is as near to float64 as twice eager's own error in the dtype of q (and a few units of rounding)."""
    exact = conv_attention_reference(q.double(), k.double(), v.double(), weight.double(), **options)
    eager = conv_attention_reference(q, k, v, weight, **options)
    assert got.shape == exact.shape
    assert got.dtype == q.dtype
    tolerance = max(2 * relative_error(eager, exact), 4 * torch.finfo(q.dtype).eps)
    assert relative_error(got, exact) <= tolerance, (relative_error(got, exact), tolerance)
