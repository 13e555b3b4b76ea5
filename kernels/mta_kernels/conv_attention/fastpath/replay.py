"""Calls that differ from an earlier one in addresses and values alone go straight to the launches of their kernels.

The checks, the choice of a backend and PyTorch's dispatcher take longer than a short sequence takes on the GPU, and
for an equal call they have nothing new to say. The operator runs wherever somebody would see that it did not:
compilers, tracers, transforms, modes, tensor subclasses, and the profiler, whose records name it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.conv_attention import operators, tile_sizes
from mta_kernels.conv_attention.arguments import cast_for_autocast, check_are_tensors, under_autocast
from mta_kernels.conv_attention.backend import Backend, ForwardReplay, Gradients
from mta_kernels.conv_attention.fastpath.alike import guards_of, keep_alike, may_repeat
from mta_kernels.operation import Operation
from mta_kernels.watchers import is_watched


class Call(NamedTuple):
    """A call of `conv_attention` whose arguments fit; `backend` is None for the reference."""

    operation: Operation
    backend: Backend | None
    run: Callable[[], Tensor]


class Seen(NamedTuple):
    """A call that passed all checks."""

    is_like: Callable[[Tensor, Tensor, Tensor, Tensor], bool]  # its tensors, in all but addresses and values
    forward: ForwardReplay
    wants_gradient: bool
    operation: Operation
    backend: Backend


class SeenBackward(NamedTuple):
    """A backward that the operator ran."""

    is_like: Callable[..., bool]  # its tensors, as a call's
    backward: Callable[..., Gradients]


_seen: dict[tuple, list[Seen]] = {}
_seen_backward: dict[ForwardReplay, list[SeenBackward]] = {}  # by the forward's


def replay_or_call(
    check: Callable[..., Call], q: Tensor, k: Tensor, v: Tensor, weight: Tensor, q_history: Tensor | None,
    cu_seqlens: Tensor | None, causal: bool, scale: float | None, pad_key: str, head_chunk: int | None, backend: str,
    group: Any,
) -> Tensor:  # fmt: skip
    """What `check(q, k, v, ...).run()` gives, arguments as those of `conv_attention`: by a replay if there is one."""
    if q_history is not None or cu_seqlens is not None or head_chunk is not None or group is not None:
        return check(
            q, k, v, weight, q_history, cu_seqlens, causal, scale, pad_key, head_chunk, backend, group
        ).run()  # fmt: skip
    seen = _earlier(q, k, v, weight, causal, scale, pad_key, backend, False)
    if seen is None:
        return _new_call(check, q, k, v, weight, causal, scale, pad_key, backend)
    return _apply(seen, q, k, v, weight) if seen.wants_gradient else seen.forward.out_alone(q, k, v, weight)


def _new_call(
    check: Callable[..., Call], q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool, scale: float | None,
    pad_key: str, backend: str,
) -> Tensor:  # fmt: skip
    """A call of tensors unlike any before, unless autocast makes them alike."""
    check_are_tensors(q=q, k=k, v=v, weight=weight)
    cast = under_autocast(q)
    options = causal, scale, pad_key, backend, cast
    if cast:
        weight, q, k, v = cast_for_autocast(weight, q, k, v)
        if (seen := _earlier(q, k, v, weight, *options)) is not None:
            return _apply(seen, q, k, v, weight) if seen.wants_gradient else seen.forward.out_alone(q, k, v, weight)
    call = check(q, k, v, weight, None, None, causal, scale, pad_key, None, backend, None)
    if call.backend is not None and call.backend.replay is not None and may_repeat(q, k, v, weight):
        forward = call.backend.replay(call.operation, q, k, v, weight)
        if forward is not None:
            _remember(call.operation, call.backend, forward, (q, k, v, weight), options)
    return call.run()


def _earlier(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool, scale: float | None, pad_key: str, backend: str,
    cast: bool,
) -> Seen | None:  # fmt: skip
    """A call that was like this one; None for one that the operator must run, or that the checks must see.

    `cast` is whether autocast has cast the tensors: what it would cast them to may change.
    """
    if (
        torch.compiler.is_compiling()
        or not _seen
        or is_watched(q)
        or not (type(causal) is bool and type(pad_key) is str and type(backend) is str)
        or not (scale is None or type(scale) is float)
    ):
        return None
    alike = torch.is_grad_enabled(), tile_sizes.generation, q.shape, causal, scale, pad_key, backend, cast
    for seen in _seen.get(alike, ()):
        if seen.is_like(q, k, v, weight):
            return seen
    return None


class _Replayed(torch.autograd.Function):
    """The operator's Function for a replay: no more of PyTorch than it needs."""

    @staticmethod
    def forward(ctx: Any, seen: Seen, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
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
        replay = _earlier_backward(seen.forward, *tensors)
        if replay is not None:
            gradients = replay(*tensors)
        else:
            numbers = operators.numbers_of(seen.operation)
            options = *numbers, 0, None, seen.backend.name
            gradients = operators.call(operators.CONV_ATTENTION_BACKWARD, *tensors, *options)
            if seen.backend.replay_backward and not torch.is_grad_enabled() and may_repeat(*tensors):
                _remember_backward(seen, *tensors)
        return None, *gradients  # autograd drops those of what needs none


# Function's own `apply` first looks for functorch's tensors, which a call that is remembered had none of.
_apply = super(torch.autograd.Function, _Replayed).apply


def _earlier_backward(forward: ForwardReplay, *tensors: Tensor) -> Callable[..., Gradients] | None:
    """The replay of a backward that was like this one, after a replay of the forward; None if the operator must run.

    `tensors` are those of the operator, grad_out the last. The operator runs also where the gradients are to be
    differentiated, to say that they cannot be.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    found = _seen_backward.get(forward)
    if found is None or is_watched(tensors[-1]):
        return None
    for seen in found:
        if seen.is_like(*tensors):
            return seen.backward
    return None


def _remember(
    operation: Operation, backend: Backend, forward: ForwardReplay, tensors: tuple[Tensor, ...], options: tuple
) -> None:
    """For calls like this one, which passed all checks and may repeat; options as those of `_earlier`."""
    with_gradients = torch.is_grad_enabled()
    wants_gradient = with_gradients and any(x.requires_grad for x in tensors)
    seen = Seen(guards_of(*tensors).check, forward, wants_gradient, operation, backend)
    keep_alike(_seen, (with_gradients, tile_sizes.generation, tensors[0].shape, *options), seen)


def _remember_backward(call: Seen, *tensors: Tensor) -> None:
    """For backwards like this one, which the operator ran and which may repeat; tensors as `_earlier_backward`'s."""
    q, k, v, weight, out, _, grad_out = tensors
    assert call.backend.replay_backward is not None
    backward = call.backend.replay_backward(call.operation, q, k, v, weight, out, grad_out)
    keep_alike(_seen_backward, call.forward, SeenBackward(guards_of(*tensors).check, backward))
