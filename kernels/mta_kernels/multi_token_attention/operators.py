"""The kernel backends as `torch.library` operators, which take their backend by name: shapes, gradients.

`mta::multi_token_attention` and `mta::multi_token_attention_backward` are opaque to torch.compile and torch.export.
An operator takes numbers, not objects: `numbers_of` takes an `Operation` apart, `operation_by_numbers` makes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mta_kernels import flop_formulas
from mta_kernels.allocation import new_empty
from mta_kernels.multi_token_attention.backend import MtaBackend
from mta_kernels.multi_token_attention.backends import named
from mta_kernels.multi_token_attention.documents import document_bounds
from mta_kernels.multi_token_attention.mixers import Mixers, operation_by_numbers, rows_needed_before
from mta_kernels.operation import Operation
from mta_kernels.operator_gradients import NoGradient, OneLevelFunction, call, register, run_in_function, wanted

Numbers = tuple[bool, float, int, int, int, int]  # of an operation: causal, scale, both pads, both counts of groups


def multi_token_attention_op(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, *, q_history: Tensor | None,
    cu_seqlens: Tensor | None, backend: MtaBackend,
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
    return out[:, :, before:] if before else out  # the first rows lack queries before them; nobody sees those


def numbers_of(operation: Operation) -> Numbers:
    """What an operator is told of an operation; the taps, and what is left out, are its mixers'."""
    pads = (conv.pad if conv else 0 for conv in (operation.pre_conv, operation.post_conv))
    groups = (mix.groups if mix else 1 for mix in (operation.pre_mix, operation.post_mix))
    return operation.causal, operation.scale, *pads, *groups  # type: ignore[return-value]


def _kernels(name: str) -> MtaBackend:
    """The backend of a name; raises ValueError if there is none."""
    backend = named(name)
    if backend is None:
        raise ValueError(f"backend {name!r} has no kernels for this operator")
    return backend


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? pre_conv, Tensor? pre_mix, Tensor? post_conv, Tensor? post_mix"
_NUMBERS = "bool causal, float scale, int pre_pad, int post_pad, int pre_groups, int post_groups"
torch.library.define(
    "mta::multi_token_attention",
    f"({_TENSORS}, {_NUMBERS}, Tensor? documents, str backend) -> (Tensor out, Tensor logsumexp)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(  # an operator cannot return None: the gradient of a mixer that is left out has no numbers
    "mta::multi_token_attention_backward",
    f"({_TENSORS}, Tensor logsumexp, Tensor grad_out, {_NUMBERS}, Tensor? documents, str backend) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dpre_conv, Tensor dpre_mix, Tensor dpost_conv, Tensor dpost_mix)",
    tags=torch.Tag.pt2_compliant_tag,
)
MULTI_TOKEN_ATTENTION = torch.ops.mta.multi_token_attention.default
MULTI_TOKEN_ATTENTION_BACKWARD = torch.ops.mta.multi_token_attention_backward.default
flop_formulas.count_flops(flop_formulas.multi_token_attention, flop_formulas.multi_token_attention_backward)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, pre_conv: Tensor | None, pre_mix: Tensor | None, post_conv: Tensor | None,
    post_mix: Tensor | None, causal: bool, scale: float, pre_pad: int, post_pad: int, pre_groups: int,
    post_groups: int, documents: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mixers = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    operation = operation_by_numbers(mixers, causal, scale, pre_pad, post_pad, pre_groups, post_groups)
    out, logsumexp = _kernels(backend).forward(operation, q, k, v, mixers, documents=documents)
    return out.contiguous(), logsumexp.contiguous()


@torch.library.register_fake("mta::multi_token_attention")
def _fake_forward(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, pre_conv: Tensor | None, pre_mix: Tensor | None, post_conv: Tensor | None,
    post_mix: Tensor | None, logsumexp: Tensor, grad_out: Tensor, causal: bool, scale: float, pre_pad: int,
    post_pad: int, pre_groups: int, post_groups: int, documents: Tensor | None, backend: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    mixers = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    operation = operation_by_numbers(mixers, causal, scale, pre_pad, post_pad, pre_groups, post_groups)
    dq, dk, dv, of_mixers = _kernels(backend).backward(
        operation, q, k, v, mixers, logsumexp, grad_out, documents=documents
    )
    gradients: Any = zip((q, k, v, *mixers), (dq, dk, dv, *of_mixers), strict=True)
    return tuple(new_empty(q, 0) if x is None else grad.to(x.dtype).contiguous() for x, grad in gradients)


@torch.library.register_fake("mta::multi_token_attention_backward")
def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, *others[:4]))


class _MultiTokenAttention(OneLevelFunction):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        tensors, numbers, documents, backend = arguments[:7], arguments[7:13], arguments[13], arguments[14]
        ctx.numbers, ctx.backend = numbers, backend
        out, logsumexp = run_in_function(MULTI_TOKEN_ATTENTION, *arguments)
        ctx.save_for_backward(*tensors, logsumexp, documents)
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_out is None:  # a later function gave no gradient
            return (None,) * 15
        *tensors, documents = ctx.saved_tensors
        gradients = call(MULTI_TOKEN_ATTENTION_BACKWARD, *tensors, grad_out, *ctx.numbers, documents, ctx.backend)
        return *wanted(gradients, ctx.needs_input_grad), *(None,) * 8


register(MULTI_TOKEN_ATTENTION, _forward, "multi_token_attention", _MultiTokenAttention)
register(
    MULTI_TOKEN_ATTENTION_BACKWARD, _backward, "the backward of multi_token_attention", NoGradient,
    MULTI_TOKEN_ATTENTION_BACKWARD,
    "multi_token_attention is differentiable once through backend '{backend}'; "
    "backend='reference' has second derivatives",
)  # fmt: skip
