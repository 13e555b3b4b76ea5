"""The kernel backends as `torch.library` operators, which take their backend by name: shapes, gradients.

`mta::multi_token_attention` and `mta::multi_token_attention_backward` are opaque to torch.compile and torch.export.
An operator takes numbers, not objects: `numbers_of` flattens an `Operation`, `operation_by_numbers` restores it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mta_kernels import flop_formulas
from mta_kernels.allocation import new_empty
from mta_kernels.backend import Backend
from mta_kernels.multi_token_attention.backends import MULTI_TOKEN_ATTENTION as BACKENDS
from mta_kernels.multi_token_attention.documents import document_bounds
from mta_kernels.multi_token_attention.mixers import Mixers, operation_by_numbers, rows_needed_before
from mta_kernels.operation import Operation
from mta_kernels.operator_gradients import call, define, like_attention, like_each, register_with_backward

Numbers = tuple[bool, float, int, int, int, int]  # of an operation: causal, scale, both pads, both counts of groups


def multi_token_attention_op(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, *, q_history: Tensor | None,
    cu_seqlens: Tensor | None, backend: Backend,
) -> Tensor:  # fmt: skip
    """Steps 1 to 6 and the product with v by the kernels of a backend, for arguments already checked.

    Differentiable once, backwards, in every floating-point tensor; keeps those, and the logsumexp of the rows. The
    mixings are dense. Raises RuntimeError for dual tensors.
    """
    documents = None if cu_seqlens is None else document_bounds(cu_seqlens, k.shape[2])
    before = min(rows_needed_before(mixers), k.shape[2] - q.shape[2])
    if q_history is not None and before:
        q = torch.cat([q_history[:, :, -before:], q], dim=2)
    out = call(MULTI_TOKEN_ATTENTION, q, k, v, *mixers, *numbers_of(operation), documents, backend.name)[0]
    return out[:, :, before:] if before else out  # the first rows lack earlier queries; nobody reads them


def numbers_of(operation: Operation) -> Numbers:
    """The numbers of an operation that an operator takes; its mixers define the taps, and which steps exist."""
    pads = (conv.pad if conv else 0 for conv in (operation.pre_conv, operation.post_conv))
    groups = (mix.groups if mix else 1 for mix in (operation.pre_mix, operation.post_mix))
    return operation.causal, operation.scale, *pads, *groups  # type: ignore[return-value]


def _like_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return like_each(*arguments[:7])


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? pre_conv, Tensor? pre_mix, Tensor? post_conv, Tensor? post_mix"
_NUMBERS = "bool causal, float scale, int pre_pad, int post_pad, int pre_groups, int post_groups"
MULTI_TOKEN_ATTENTION = define(
    "multi_token_attention",
    f"({_TENSORS}, {_NUMBERS}, Tensor? documents, str backend) -> (Tensor out, Tensor logsumexp)",
    like_attention,
)
MULTI_TOKEN_ATTENTION_BACKWARD = define(
    "multi_token_attention_backward",
    f"({_TENSORS}, Tensor logsumexp, Tensor grad_out, {_NUMBERS}, Tensor? documents, str backend) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dpre_conv, Tensor dpre_mix, Tensor dpost_conv, Tensor dpost_mix)",
    _like_backward,
)
flop_formulas.count_flops(flop_formulas.multi_token_attention, flop_formulas.multi_token_attention_backward)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, pre_conv: Tensor | None, pre_mix: Tensor | None, post_conv: Tensor | None,
    post_mix: Tensor | None, causal: bool, scale: float, pre_pad: int, post_pad: int, pre_groups: int,
    post_groups: int, documents: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mixers = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    operation = operation_by_numbers(mixers, causal, scale, pre_pad, post_pad, pre_groups, post_groups)
    out, logsumexp = BACKENDS.part(backend, "forward")(operation, q, k, v, mixers, documents=documents)
    return out.contiguous(), logsumexp.contiguous()


def _backward(
    q: Tensor, k: Tensor, v: Tensor, pre_conv: Tensor | None, pre_mix: Tensor | None, post_conv: Tensor | None,
    post_mix: Tensor | None, logsumexp: Tensor, grad_out: Tensor, causal: bool, scale: float, pre_pad: int,
    post_pad: int, pre_groups: int, post_groups: int, documents: Tensor | None, backend: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    mixers = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    operation = operation_by_numbers(mixers, causal, scale, pre_pad, post_pad, pre_groups, post_groups)
    dq, dk, dv, of_mixers = BACKENDS.part(backend, "backward")(
        operation, q, k, v, mixers, logsumexp, grad_out, documents=documents
    )
    gradients: Any = zip((q, k, v, *mixers), (dq, dk, dv, *of_mixers), strict=True)
    return tuple(new_empty(q, 0) if x is None else grad.to(x.dtype).contiguous() for x, grad in gradients)


register_with_backward(
    MULTI_TOKEN_ATTENTION, _forward, MULTI_TOKEN_ATTENTION_BACKWARD, _backward, "multi_token_attention",
    first=7, keeps=(1,), needs=range(7),
)  # fmt: skip
