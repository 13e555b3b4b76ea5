"""The fused backends as `torch.library` operators: what Triton cannot take, shapes, gradients.

Forward and backward are Triton's or Hopper's, by name, decode Triton's or plain CUDA's. `mta::conv_attention`,
`mta::conv_attention_backward` and `mta::conv_attention_decode` are opaque to torch.compile and torch.export. Gradients
are registered on the Autograd key by hand: `register_autograd` takes twice the host time.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from mta_kernels.conv_attention.arguments import (
    check_no_tangents,
    check_splits,
    key_padding,
    rows_before,
    softmax_scale,
    under_torch_func,
)
from mta_kernels.conv_attention.hopper.forward import conv_attention_forward as hopper_forward
from mta_kernels.conv_attention.packing import collect_rows, spread_layout, spread_rows
from mta_kernels.conv_attention.repeated import Launches, Seen, earlier_backward, may_repeat, remember_backward
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.torch_compile import constant_when_compiled

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = range(16, 257)
QUERY_TAPS = range(1, 17)
KEY_TAPS = range(1, 32)


def triton_unsupported(
    *, device: torch.device | str, dtype: torch.dtype, head_dim: int, query_taps: int, key_taps: int
) -> str | None:
    """Why the Triton kernels cannot run with these on this machine, or None if they can."""
    reason = _platform_unsupported(device, dtype)
    if reason is not None:
        return reason
    if not HEAD_DIMS.start <= head_dim < HEAD_DIMS.stop:
        return f"head_dim {head_dim} is outside {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
    if query_taps >= QUERY_TAPS.stop or key_taps >= KEY_TAPS.stop:
        return (
            f"{query_taps}x{key_taps} taps are outside 1x1 to {QUERY_TAPS.stop - 1}x{KEY_TAPS.stop - 1} "
            "(query taps x key taps)"
        )
    return None


@constant_when_compiled
def _platform_unsupported(device: torch.device | str, dtype: torch.dtype) -> str | None:
    return _cached_platform_unsupported(device, dtype, os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def _cached_platform_unsupported(device: torch.device | str, dtype: torch.dtype, interpreted: bool) -> str | None:
    device = torch.device(device)
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton; it exists for Linux)"
    if device.type != "cuda" and not interpreted:
        return (
            f"Triton kernels need a CUDA GPU, not a {device.type} device (TRITON_INTERPRET=1 runs them slowly on a CPU)"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than sm_80"
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of float16, bfloat16, float32"
    if interpreted and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly; use float16 or float32 there"
    return None


def conv_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    q_history: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    pad_key: str,
    head_chunk: int | None,
    backend: str,
) -> Tensor:
    """`conv_attention` by the kernels of "triton" or "hopper", for arguments already checked.

    Differentiable once, backwards, in every floating-point tensor; keeps those, the output and the logsumexp of its
    rows. Raises RuntimeError for dual tensors.
    """
    query_taps, key_taps = weight.shape[1:]
    pad = key_padding(key_taps, pad_key)
    options = (causal, softmax_scale(scale, q.shape[3]), pad, head_chunk or 0)
    if cu_seqlens is not None:
        _check_no_tangents("conv_attention", backend, q, k, v)  # which the Functions that spread rows do not know
        gap = max(query_taps - 1, pad, key_taps - 1 - pad)
        layout = spread_layout(cu_seqlens, q.shape[2], gap)
        spread = (spread_rows(x, layout) for x in (q, k, v))
        return collect_rows(CONV_ATTENTION(*spread, weight, *options, layout.spans, backend)[0], layout)
    before = rows_before(q.shape[2], k.shape[2], query_taps)
    if q_history is not None and before:
        q = torch.cat([q_history[:, :, -before:], q], dim=2)
    out = CONV_ATTENTION(q, k, v, weight, *options, None, backend)[0]
    return out[:, :, before:] if before else out  # the first rows lack queries before them; nobody sees those


def launch_again(seen: Seen, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """`conv_attention_op` as for the call that was seen, without the operator; its gradients are the same."""
    if seen.requires_grad and torch.is_grad_enabled():
        # Function's own `apply` first looks for functorch's tensors, which the call that was seen had none of.
        apply = super(torch.autograd.Function, _ConvAttentionAgain).apply
        return apply(seen.launches, q, k, v, weight)
    return seen.launches.out_alone(q, k, v, weight)


def conv_attention_decode_op(
    q_window: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weight: Tensor,
    *,
    lengths: Tensor,
    scale: float | None,
    pad_key: str,
    splits: int | str,
    block_table: Tensor | None,
    backend: str,
) -> Tensor:
    """`conv_attention_decode` by the kernels of `backend`, "triton" or "cuda", for arguments already checked.

    Not differentiable.
    """
    check_splits(splits)
    splits = 0 if splits == "auto" else splits
    arguments = (q_window, k_cache, v_cache, weight, lengths, block_table, scale, pad_key, splits, backend)
    return CONV_ATTENTION_DECODE(*arguments)


torch.library.define(
    "mta::conv_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor weight, bool causal, float scale, int pad, int head_chunk, Tensor? spans, "
    "str backend) -> (Tensor out, Tensor logsumexp)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "mta::conv_attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor weight, Tensor out, Tensor logsumexp, Tensor grad_out, "
    "bool causal, float scale, int pad, int head_chunk, Tensor? spans, str backend) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dw)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "mta::conv_attention_decode",
    "(Tensor q_window, Tensor k_cache, Tensor v_cache, Tensor weight, Tensor lengths, Tensor? block_table, "
    "float? scale, str pad_key, int splits, str backend) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
CONV_ATTENTION = torch.ops.mta.conv_attention.default
CONV_ATTENTION_BACKWARD = torch.ops.mta.conv_attention_backward.default
CONV_ATTENTION_DECODE = torch.ops.mta.conv_attention_decode.default


@torch.library.impl("mta::conv_attention", ("cpu", "cuda"))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor,
    causal: bool, scale: float, pad: int, head_chunk: int, spans: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if backend == "hopper":  # whose scratch is too small for head_chunk to matter
        return hopper_forward(q, k, v, weight, causal=causal, scale=scale, pad=pad, spans=spans)
    from mta_kernels.conv_attention.triton.forward import conv_attention_forward

    with on_device_of(q), without_autocast(q):
        return conv_attention_forward(
            q, k, v, weight, causal=causal, scale=scale, pad=pad, head_chunk=head_chunk, spans=spans
        )


@torch.library.register_fake("mta::conv_attention")
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl("mta::conv_attention_backward", ("cpu", "cuda"))
def _backward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor,
    causal: bool, scale: float, pad: int, head_chunk: int, spans: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from mta_kernels.conv_attention.hopper.backward import part_backward
    from mta_kernels.conv_attention.triton.backward import conv_attention_backward

    with on_device_of(q), without_autocast(q):
        return conv_attention_backward(
            q, k, v, weight, out, logsumexp, grad_out,
            causal=causal, scale=scale, pad=pad, head_chunk=head_chunk, spans=spans,
            part_backward=part_backward if backend == "hopper" else None,
        )  # fmt: skip


@torch.library.register_fake("mta::conv_attention_backward")
def _fake_backward(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, weight))


@torch.library.impl("mta::conv_attention_decode", ("cpu", "cuda"))
def _decode(
    q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, lengths: Tensor, block_table: Tensor | None,
    scale: float | None, pad_key: str, splits: int, backend: str,
) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {"lengths": lengths, "scale": scale, "pad_key": pad_key}
    options |= {"splits": splits or "auto", "block_table": block_table}
    if backend == "cuda":
        from mta_kernels.conv_attention.cuda_decode.decode import conv_attention_decode_cuda

        with on_device_of(q_window):
            return conv_attention_decode_cuda(q_window, k_cache, v_cache, weight, **options)
    from mta_kernels.conv_attention.triton.decode import conv_attention_decode_triton

    with without_autocast(q_window):
        return conv_attention_decode_triton(q_window, k_cache, v_cache, weight, **options)


@torch.library.register_fake("mta::conv_attention_decode")
def _fake_decode(q_window: Tensor, *options: Any) -> Tensor:
    batch, heads, _, head_dim = q_window.shape
    return q_window.new_empty(batch, heads, 1, head_dim)


class _ConvAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor,
        causal: bool, scale: float, pad: int, head_chunk: int, spans: Tensor | None, backend: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.options, ctx.backend = (causal, scale, pad, head_chunk), backend
        out, logsumexp = _run_in_function(CONV_ATTENTION, q, k, v, weight, *ctx.options, spans, backend)
        ctx.save_for_backward(q, k, v, weight, out, logsumexp, spans)
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_out is None:  # a later function gave no gradient
            return (None,) * 10
        *tensors, spans = ctx.saved_tensors
        gradients = CONV_ATTENTION_BACKWARD(*tensors, grad_out, *ctx.options, spans, ctx.backend)
        return *_wanted(gradients, ctx.needs_input_grad), None, None, None, None, None, None


class _ConvAttentionAgain(torch.autograd.Function):
    """`_ConvAttention` for a call like an earlier one: no more of PyTorch than it needs."""

    @staticmethod
    def forward(ctx: Any, launches: Launches, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        out, logsumexp = launches(q, k, v, weight)
        ctx.launches = launches
        ctx.save_for_backward(q, k, v, weight, out, logsumexp)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * 5
        tensors = *ctx.saved_tensors, grad_out
        launches = earlier_backward(ctx.launches, *tensors)
        if launches is not None:
            gradients = launches.gradients(*tensors)
        else:
            causal, scale, pad, _ = ctx.launches.options
            backend = ctx.launches.backend
            gradients = CONV_ATTENTION_BACKWARD(*tensors, causal, scale, pad, 0, None, backend)
            if backend == "hopper" and not torch.is_grad_enabled() and may_repeat(*tensors):
                remember_backward(ctx.launches, *tensors)
        return None, *_wanted(gradients, ctx.needs_input_grad[1:])


def _wanted(gradients: tuple[Tensor, ...], needed: tuple[bool, ...]) -> list[Tensor | None]:
    """The gradients, and None for those that are not needed."""
    return [x if is_needed else None for x, is_needed in zip(gradients, needed, strict=False)]


class _NoGradient(torch.autograd.Function):
    """An operator whose results cannot be differentiated: raises `sentence` rather than give no gradient.

    Its last argument is the backend.
    """

    @staticmethod
    def forward(ctx: Any, op: Callable, sentence: str, *arguments: Any) -> Any:
        ctx.sentence = sentence.format(backend=arguments[-1])
        return _run_in_function(op, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(ctx.sentence)


def _below_autograd(op: Callable, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _run_in_function(op: Callable, *arguments: Any) -> Any:
    """`op` below autograd, from a Function's forward: that has no gradients, but outer levels of torch.func have."""
    if not under_torch_func():
        return _below_autograd(op, *arguments)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below_autograd(op, *arguments)


def _check_no_tangents(operation: str, backend: str, *arguments: Any) -> None:
    check_no_tangents(f"{operation} through backend {backend!r}", "backend='reference' has them", *arguments)


def _apply(function: Any, *arguments: Any) -> Any:
    """`function.apply` of an operator, of which torch.func transforms one level at a time."""
    if not under_torch_func():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*arguments)


def _register_gradient(op: torch._ops.OpOverload, operation: str, function: Callable) -> None:
    """Run `function` with the arguments of `op`, the backend last, where a gradient may be asked for."""

    def autograd(*arguments: Any) -> Any:
        _check_no_tangents(operation, arguments[-1], *arguments)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return function(*arguments)
        return _below_autograd(op, *arguments)

    torch.library.impl(op.name(), "Autograd")(autograd)


_register_gradient(CONV_ATTENTION, "conv_attention", functools.partial(_apply, _ConvAttention))
_register_gradient(
    CONV_ATTENTION_BACKWARD,
    "the backward of conv_attention",
    functools.partial(
        _apply,
        _NoGradient,
        CONV_ATTENTION_BACKWARD,
        "conv_attention is differentiable once through backend '{backend}'; backend='reference' has second derivatives",
    ),
)
_register_gradient(
    CONV_ATTENTION_DECODE,
    "conv_attention_decode",
    functools.partial(
        _apply,
        _NoGradient,
        CONV_ATTENTION_DECODE,
        "conv_attention_decode is not differentiable through backend '{backend}'; "
        "use backend='reference' for gradients",
    ),
)
