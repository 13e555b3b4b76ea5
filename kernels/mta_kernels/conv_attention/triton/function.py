"""The Triton backend as a differentiable function, and what it cannot take."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import key_padding, softmax_scale

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = range(16, 257)
QUERY_TAPS = range(1, 17)
KEY_TAPS = range(1, 32)


def triton_unsupported(*, device: str, dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int) -> str | None:
    """Why the Triton kernels cannot run with these on this machine, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton; it exists for Linux)"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not interpreted:
        return f"Triton kernels need a CUDA GPU, not a {device} device (TRITON_INTERPRET=1 runs them slowly on a CPU)"
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than sm_80"
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of float16, bfloat16, float32"
    if interpreted and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly; use float16 or float32 there"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is outside {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
    if query_taps not in QUERY_TAPS or key_taps not in KEY_TAPS:
        return (
            f"{query_taps}x{key_taps} taps are outside 1x1 to {QUERY_TAPS.stop - 1}x{KEY_TAPS.stop - 1} "
            "(query taps x key taps)"
        )
    return None


def conv_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, causal: bool, scale: float | None, pad_key: str
) -> Tensor:
    """`conv_attention` by the Triton kernels, for arguments already checked.

    Differentiable once, in q, k, v and weight; keeps those, the output and the logsumexp of its rows.
    """
    return _ConvAttention.apply(q, k, v, weight, causal, scale, pad_key)


class _ConvAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        causal: bool,
        scale: float | None,
        pad_key: str,
    ) -> Tensor:
        from mta_kernels.conv_attention.triton.forward import conv_attention_forward

        ctx.options = {
            "causal": causal,
            "scale": softmax_scale(scale, q.shape[3]),
            "pad": key_padding(weight.shape[2], pad_key),
        }
        with on_device_of(q):
            out, logsumexp = conv_attention_forward(q, k, v, weight, **ctx.options)
        ctx.save_for_backward(q, k, v, weight, out, logsumexp)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from mta_kernels.conv_attention.triton.backward import conv_attention_backward

        with on_device_of(grad_out):
            q, k, v, weight, out, logsumexp = ctx.saved_tensors
            gradients = conv_attention_backward(q, k, v, weight, out, logsumexp, grad_out, **ctx.options)
        wanted = (x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False))
        return *wanted, None, None, None


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current GPU: make it that of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
