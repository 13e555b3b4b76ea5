"""Launches forward.cu, and backward_q.cu and backward_kv.cu for the gradients."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.arguments import check_arguments
from mta_kernels.nvrtc.structures import Rows, fields, in_chunks
from mta_kernels.operation import key_padding, softmax_scale
from mta_ladder.cuda_conv import shape as shapes
from mta_ladder.cuda_conv.shape import Shape, launch

SIZES = fields(c_int, "group length row_blocks pad causal")


class ForwardArguments(ctypes.Structure):
    """`struct Arguments` of forward.cu."""

    _fields_ = (
        *fields(Rows, "q k v"), *fields(c_void_p, "weight out logsumexp"), ("scale_log2", c_float), ("heads", c_int),
        *SIZES,
    )  # fmt: skip


class BackwardArguments(ctypes.Structure):
    """`struct Arguments` of backward_q.cu and, with other names, of backward_kv.cu."""

    _fields_ = (
        *fields(Rows, "q k v grad_out"), *fields(c_void_p, "weight logsumexp delta"),
        *fields(c_void_p, "first second"),  # dq and dweight, or dk and dv
        *fields(c_float, "scale scale_log2"), ("heads", c_int),  # of q, or of k and v
        *SIZES,
    )  # fmt: skip


def conv_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, causal: bool = True, scale: float | None = None,
    pad_key: str = "both",
) -> Tensor:  # fmt: skip
    """Conv attention `[B, Hq, N, D]` of `q [B, Hq, N, D]`, `k, v [B, Hkv, N, D]`, `weight [Hq, cq, ck]`.

    As `mta_kernels.conv_attention.conv_attention`, without chunks of a prompt and packed documents. Differentiable once
    in q, k, v and weight; the weight's gradient varies in its last bits from run to run. Memory beyond its inputs and
    results is O(N). Tensors whose rows cannot be loaded 16 bytes at a time are copied first. With 16-bit inputs,
    probabilities and gradients of scores are rounded to 16 bits where they are multiplied; all else is float32.
    Raises ValueError or TypeError, in one sentence, for arguments that do not fit or that `unsupported` refuses.
    """
    check_arguments(q, k, v, pad_key, {"weight": weight})
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} rows and k {k.shape[2]}; cuda-conv takes whole sequences: give both the same"
        )
    refuse(q, weight)
    return _ConvAttention.apply(
        q, k, v, weight, causal, softmax_scale(scale, q.shape[3]), key_padding(weight.shape[2], pad_key)
    )


def refuse(q: Tensor, weight: Tensor) -> None:
    """Raise ValueError if `unsupported` has a reason."""
    reason = shapes.unsupported(
        device=q.device, dtype=q.dtype, head_dim=q.shape[3], query_taps=weight.shape[1], key_taps=weight.shape[2]
    )
    if reason is not None:
        raise ValueError(f"cuda-conv cannot run this: {reason}")


def taps_of(weight: Tensor) -> Tensor:
    """The weight as contiguous float32."""
    return weight.detach().float().contiguous()


class _ConvAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool, scale: float, pad: int
    ) -> Tensor:
        q, k, v = (in_chunks(x) for x in (q, k, v))
        batch, heads, length, head_dim = q.shape
        shape, taps = Shape(q.dtype, head_dim, *weight.shape[1:]), taps_of(weight)
        out = empty(q.shape, dtype=q.dtype, device=q.device)
        logsumexp = empty(q.shape[:3], dtype=torch.float32, device=q.device)
        row_blocks = -(-length // shape.forward_rows)
        arguments = ForwardArguments(
            Rows.of(q), Rows.of(k), Rows.of(v), taps.data_ptr(), out.data_ptr(), logsumexp.data_ptr(),
            scale * math.log2(math.e), heads, heads // k.shape[1], length, row_blocks, pad, causal,
        )  # fmt: skip
        launch(shape, "forward.cu", "conv_attention_forward", row_blocks * heads * batch, q.device, arguments)
        ctx.save_for_backward(q, k, v, weight, out, logsumexp)
        ctx.causal, ctx.scale, ctx.pad = causal, scale, pad
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight, out, logsumexp = ctx.saved_tensors
        grad_out = in_chunks(grad_outs[0])
        delta = (out.float() * grad_out.float()).sum(-1)
        batch, heads, length, head_dim = q.shape
        kv_heads = k.shape[1]
        shape, taps = Shape(q.dtype, head_dim, *weight.shape[1:]), taps_of(weight)
        tensors = [Rows.of(x) for x in (q, k, v, grad_out)] + [x.data_ptr() for x in (taps, logsumexp, delta)]
        factors = (ctx.scale, ctx.scale * math.log2(math.e))

        def run(of: str, first: Tensor, second: Tensor, own_heads: int, block_rows: int) -> None:
            blocks = -(-length // block_rows)
            arguments = BackwardArguments(
                *tensors, first.data_ptr(), second.data_ptr(), *factors, own_heads, heads // kv_heads, length, blocks,
                ctx.pad, ctx.causal,
            )  # fmt: skip
            kernel = f"conv_attention_backward_{of}"
            launch(shape, f"backward_{of}.cu", kernel, blocks * own_heads * batch, q.device, arguments)

        dq = dk = dv = dweight = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            dq = empty(q.shape, dtype=q.dtype, device=q.device)
            dweight = torch.zeros(weight.shape, dtype=torch.float32, device=q.device)
            run("q", dq, dweight, heads, shape.backward_rows)
            dweight = dweight.to(weight.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = (empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
            run("kv", dk, dv, kv_heads, shape.backward_columns)
        return dq, dk, dv, dweight, None, None, None
