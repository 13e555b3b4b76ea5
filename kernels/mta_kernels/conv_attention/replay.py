"""Calls that differ from an earlier one in addresses and values alone skip its checks and the choice of a backend.

For an equal call their result is known. Some backends launch their kernels again without PyTorch's dispatcher.
The operator still runs wherever PyTorch would miss it: compilers, tracers, transforms, modes, tensor subclasses, and
the profiler, whose records name it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.backend import Backend, ForwardReplay
from mta_kernels.call_memory import CallMemory, is_cacheable, may_be_known
from mta_kernels.conv_attention import operators
from mta_kernels.conv_attention.arguments import cast_for_autocast, check_are_tensors, under_autocast
from mta_kernels.operation import Operation


class Call(NamedTuple):
    """A call of `conv_attention` whose arguments fit; `backend` is None for the reference."""

    operation: Operation
    backend: Backend | None
    run: Callable[[], Tensor]


class Seen(NamedTuple):
    """A call that passed all checks; `forward` is None where the operator runs."""

    forward: ForwardReplay | None
    wants_gradient: bool
    operation: Operation
    backend: Backend

    def run(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        """As `conv_attention`, for tensors like that call's."""
        if self.forward is None:
            return operators.conv_attention_op(
                self.operation, q, k, v, weight, q_history=None, cu_seqlens=None, head_chunk=None, backend=self.backend
            )
        return _apply(self, q, k, v, weight) if self.wants_gradient else self.forward.out_alone(q, k, v, weight)


_seen: CallMemory[Seen] = CallMemory()
_seen_backward: CallMemory[Callable[..., tuple[Tensor, ...]]] = CallMemory()  # by the forward's replay


def replay_or_call(
    check: Callable[..., Call], q: Tensor, k: Tensor, v: Tensor, weight: Tensor, q_history: Tensor | None,
    cu_seqlens: Tensor | None, causal: bool, scale: float | None, pad_key: str, head_chunk: int | None, backend: str,
) -> Tensor:  # fmt: skip
    """The result of `check(q, k, v, ...).run()`, by a replay if there is one; arguments as for `conv_attention`."""
    if q_history is not None or cu_seqlens is not None or head_chunk is not None:
        return check(q, k, v, weight, q_history, cu_seqlens, causal, scale, pad_key, head_chunk, backend).run()
    seen = _seen.find((causal, scale, pad_key, backend, False), q, k, v, weight)
    if seen is not None:
        return seen.run(q, k, v, weight)
    return _new_call(check, q, k, v, weight, causal, scale, pad_key, backend)


def _new_call(
    check: Callable[..., Call], q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool, scale: float | None,
    pad_key: str, backend: str,
) -> Tensor:  # fmt: skip
    """A call of tensors unlike any before, unless autocast makes them alike."""
    check_are_tensors(q=q, k=k, v=v, weight=weight)
    cast = under_autocast(q)
    options = causal, scale, pad_key, backend, cast  # what autocast casts to may change
    if cast:
        weight, q, k, v = cast_for_autocast(weight, q, k, v)
        if (seen := _seen.find(options, q, k, v, weight)) is not None:
            return seen.run(q, k, v, weight)
    call = check(q, k, v, weight, None, None, causal, scale, pad_key, None, backend)
    tensors = q, k, v, weight
    if call.backend is not None and is_cacheable(*tensors):
        wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        forward = call.backend.replay and call.backend.replay(call.operation, *tensors)
        _seen.keep(options, Seen(forward, wants_gradient, call.operation, call.backend), *tensors)
    return call.run()


class _Replayed(torch.autograd.Function):
    """The operator's Function for a replay: no more of PyTorch than it needs."""

    @staticmethod
    def forward(ctx: Any, seen: Seen, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        assert seen.forward is not None
        out, logsumexp = seen.forward(q, k, v, weight)
        ctx.seen = seen
        ctx.save_for_backward(q, k, v, weight, out, logsumexp)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * 5
        seen, tensors = ctx.seen, (*ctx.saved_tensors, grad_out)
        # For second derivatives the operator runs: it raises, since there are none.
        may_replay = not torch.is_grad_enabled() and may_be_known(grad_out)
        if may_replay and (replay := _seen_backward.find_known(seen.forward, *tensors)) is not None:
            return None, *replay(*tensors)  # autograd drops gradients that no tensor needs
        options = *operators.numbers_of(seen.operation), 0, None, seen.backend.name
        gradients = operators.call(operators.CONV_ATTENTION_BACKWARD, *tensors, *options)
        if seen.backend.replay_backward and may_replay and is_cacheable(*tensors):
            q, k, v, weight, out = tensors[:5]
            backward = seen.backend.replay_backward(seen.operation, q, k, v, weight, out, grad_out)
            _seen_backward.keep_known(seen.forward, backward, *tensors)
        return None, *gradients


# Function's own `apply` first looks for functorch's tensors. A remembered call has none.
_apply = super(torch.autograd.Function, _Replayed).apply
