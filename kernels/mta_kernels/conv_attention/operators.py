"""The kernel backends as `torch.library` operators, which take their backend by name: shapes, gradients.

`mta::conv_attention`, `mta::conv_attention_backward` and `mta::conv_attention_decode` are opaque to torch.compile and
torch.export.
An operator takes numbers, not objects: an `Operation` is taken apart and put together again in this file alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mta_kernels import flop_formulas
from mta_kernels.backend import Backend, Request, check_can_run
from mta_kernels.conv_attention.arguments import rows_before
from mta_kernels.conv_attention.backends import CONV_ATTENTION as BACKENDS
from mta_kernels.conv_attention.packing import collect_rows, spread_layout, spread_rows
from mta_kernels.operation import Convolution, Operation
from mta_kernels.operator_gradients import (
    NoGradient,
    call,
    check_no_tangents_in_kernels,
    define,
    like_attention,
    like_each,
    like_newest_row,
    register,
    register_with_backward,
)

Numbers = tuple[bool, float, int]  # of an operation: causal, scale, pad


def conv_attention_op(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, q_history: Tensor | None,
    cu_seqlens: Tensor | None, head_chunk: int | None, backend: Backend,
) -> Tensor:  # fmt: skip
    """`conv_attention` by the kernels of a backend, for arguments already checked.

    Differentiable once, backwards, in every floating-point tensor; keeps those, the output and the logsumexp of its
    rows. Raises RuntimeError for dual tensors.
    """
    conv = operation.conv
    options = (*numbers_of(operation), head_chunk or 0)
    if cu_seqlens is not None:
        check_no_tangents_in_kernels(
            "conv_attention", backend.name, q, k, v
        )  # the Functions that spread rows have no forward mode
        gap = max(conv.query_taps - 1, conv.pad, conv.key_taps - 1 - conv.pad)
        layout = spread_layout(cu_seqlens, q.shape[2], gap)
        spread = (spread_rows(x, layout) for x in (q, k, v))
        return collect_rows(call(CONV_ATTENTION, *spread, weight, *options, layout.spans, backend.name)[0], layout)
    rows = rows_before(q.shape[2], k.shape[2], conv.query_taps)
    if q_history is not None and rows:
        q = torch.cat([q_history[:, :, -rows:], q], dim=2)
    out = call(CONV_ATTENTION, q, k, v, weight, *options, None, backend.name)[0]
    return out[:, :, rows:] if rows else out  # the history's rows lack queries before them, and are no results


def conv_attention_decode_op(
    q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, *, lengths: Tensor, scale: float | None,
    pad_key: str, splits: int | str, block_table: Tensor | None, backend: Backend,
) -> Tensor:  # fmt: skip
    """`conv_attention_decode` by the kernels of a backend, for arguments already checked.

    Not differentiable.
    """
    splits = 0 if splits == "auto" else splits
    arguments = (q_window, k_cache, v_cache, weight, lengths, block_table, scale, pad_key, splits, backend.name)
    return call(CONV_ATTENTION_DECODE, *arguments)


def numbers_of(operation: Operation) -> Numbers:
    """What an operator receives of an operation; the taps are the weight's."""
    return operation.causal, operation.scale, operation.conv.pad


def _operation(weight: Tensor, causal: bool, scale: float, pad: int) -> Operation:
    """The operation of these numbers."""
    _, query_taps, key_taps = weight.shape
    return Operation(Convolution(query_taps, key_taps, pad), scale, causal)


def _like_backward(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return like_each(q, k, v, weight)


CONV_ATTENTION = define(
    "conv_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor weight, bool causal, float scale, int pad, int head_chunk, Tensor? spans, "
    "str backend) -> (Tensor out, Tensor logsumexp)",
    like_attention,
)
CONV_ATTENTION_BACKWARD = define(
    "conv_attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor weight, Tensor out, Tensor logsumexp, Tensor grad_out, "
    "bool causal, float scale, int pad, int head_chunk, Tensor? spans, str backend) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dw)",
    _like_backward,
)
CONV_ATTENTION_DECODE = define(
    "conv_attention_decode",
    "(Tensor q_window, Tensor k_cache, Tensor v_cache, Tensor weight, Tensor lengths, Tensor? block_table, "
    "float? scale, str pad_key, int splits, str backend) -> Tensor",
    like_newest_row,
)
flop_formulas.count_flops(
    flop_formulas.conv_attention, flop_formulas.conv_attention_backward, flop_formulas.conv_attention_decode
)


def _pass(part: str, *arguments: Any) -> tuple[Tensor, ...]:
    """`forward` or `backward` of a backend, by an operator's arguments."""
    *tensors, causal, scale, pad, head_chunk, spans, backend = arguments
    operation = _operation(tensors[3], causal, scale, pad)
    return BACKENDS.part(backend, part)(operation, *tensors, head_chunk=head_chunk, spans=spans)


def _decode(
    q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, lengths: Tensor, block_table: Tensor | None,
    scale: float | None, pad_key: str, splits: int, backend: str,
) -> Tensor:  # fmt: skip
    decode, kernels = BACKENDS.part(backend, "decode"), BACKENDS.named(backend)
    assert kernels is not None
    tensors, head_dim = (q_window, k_cache, v_cache), q_window.shape[3]
    operation = Operation.of(weight.shape[1:], head_dim, scale=scale, pad_key=pad_key)
    check_can_run(kernels, Request(operation, q_window.device, q_window.dtype, head_dim, decode=tensors))
    return decode(operation, *tensors, weight, lengths=lengths, splits=splits or "auto", block_table=block_table)


register_with_backward(
    CONV_ATTENTION, partial(_pass, "forward"), CONV_ATTENTION_BACKWARD, partial(_pass, "backward"),
    "conv_attention", first=4, keeps=(0, 1), needs=range(4),
)  # fmt: skip
register(
    CONV_ATTENTION_DECODE, _decode, "conv_attention_decode", NoGradient, CONV_ATTENTION_DECODE,
    "conv_attention_decode is not differentiable through backend '{backend}'; use backend='reference' for gradients",
)  # fmt: skip
