"""Layers for `kernels.kernelize`, which gives their `forward` to modules of other classes: no state of their own."""

from __future__ import annotations

from torch import Tensor, nn

from mta_kernels.conv_attention import conv_attention
from mta_kernels.multi_token_attention import MultiTokenAttention as Module
from mta_kernels.multi_token_attention import multi_token_attention

__all__ = ["ConvAttention", "MultiTokenAttention"]


class ConvAttention(nn.Module):
    """`conv_attention(q, k, v, self.weight)` for modules with `forward(self, q, k, v)` and the members named here."""

    can_torch_compile = True

    weight: Tensor  # [heads, query taps, key taps]
    causal: bool
    scale: float | None
    pad_key: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[B, heads, M, D]` of `q [B, heads, M, D]` and `k, v [B, Hkv, N, D]`; raises as `conv_attention`."""
        return conv_attention(q, k, v, self.weight, causal=self.causal, scale=self.scale, pad_key=self.pad_key)


class MultiTokenAttention(nn.Module):
    """`multi_token_attention` for modules with `forward(self, q, k, v)` and the members named here.

    Names and shapes are as in the original implementation, and in this kernel's module of the same name. A part that
    is None is left out.
    """

    can_torch_compile = True

    mta_kernel: Tensor | None
    wpsm: nn.Linear | None
    mta_kernel_after_sm: Tensor | None
    head_kernel: Tensor | None
    wposm: nn.Linear | None
    subln: nn.RMSNorm | None
    gate: nn.Linear | None
    depth: int | None
    dropout: float
    causal: bool
    scale: float | None
    pad_key: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[B, heads, M, D]` of `q [B, heads, M, D]` and `k, v [B, Hkv, N, D]`; raises as `multi_token_attention`."""
        return multi_token_attention(
            q, k, v, **Module.mixers(self), depth=self.depth, dropout=self.dropout if self.training else 0.0,
            causal=self.causal, scale=self.scale, pad_key=self.pad_key,
        )  # fmt: skip
