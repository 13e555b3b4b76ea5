"""Calls that differ from an earlier one in addresses and values alone go straight to the launches of their kernels.

The checks, the choice of a backend and PyTorch's dispatcher take longer than a short sequence takes on the GPU, and
for an equal call they have nothing new to say. The operator runs wherever somebody would see that it did not:
compilers, tracers, transforms, modes, tensor subclasses, and the profiler, whose records name it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from mta_kernels.conv_attention.hopper import backward
from mta_kernels.remembering import keep

try:  # neither who watches nor all of a tensor at once is asked through PyTorch's public interface
    from torch._C import (
        _are_functorch_transforms_active,
        _dispatch_isTensorSubclassLike,
        _get_tracing_state,
        _is_torch_function_mode_enabled,
    )
    from torch._C._autograd import _profiler_enabled
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # in a PyTorch to come: then every call takes the operator
    CAN_ASK = False
else:
    CAN_ASK = hasattr(forward_ad, "_current_level")

K = TypeVar("K")
S = TypeVar("S")
PLAIN = (Tensor, nn.Parameter)
MAX_ALIKE = 16  # calls remembered that have the grad mode, q's shape and the options in common


class Launches(Protocol):
    """The forward by a backend, for tensors alike in all but addresses and values."""

    backend: str
    options: tuple[bool, float, int, bool]  # causal, scale, pad, packed

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the logsumexp of its rows."""

    def out_alone(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        """The output."""


class Seen(NamedTuple):
    """A call that passed all checks."""

    is_like: Callable[[Tensor, Tensor, Tensor, Tensor], bool]  # its tensors, in all but addresses and values
    launches: Launches
    requires_grad: bool


class SeenBackward(NamedTuple):
    """A backward that the operator ran."""

    is_like: Callable[..., bool]  # its tensors, as a call's
    launches: backward.Launches


_seen: dict[tuple, list[Seen]] = {}
_seen_backward: dict[Launches, list[SeenBackward]] = {}  # by the forward's


def earlier(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool, scale: float | None, pad_key: str, backend: str,
    cast: bool,
) -> Seen | None:  # fmt: skip
    """A call that was like this one; None for one that the operator must run, or that the checks must see.

    `cast` is whether autocast has cast the tensors: what it would cast them to may change.
    """
    if (
        torch.compiler.is_compiling()
        or not _seen
        or _is_watched(q)
        or not (type(causal) is bool and type(pad_key) is str and type(backend) is str)
        or not (scale is None or type(scale) is float)
    ):
        return None
    for seen in _seen.get((torch.is_grad_enabled(), q.shape, causal, scale, pad_key, backend, cast), ()):
        if seen.is_like(q, k, v, weight):
            return seen
    return None


def earlier_backward(launches: Launches, *tensors: Tensor) -> backward.Launches | None:
    """The launches of a backward that was like this one, of a forward by `launches`; None if the operator must run.

    `tensors` are those of the operator, grad_out the last. The operator runs also where the gradients are to be
    differentiated, to say that they cannot be.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    found = _seen_backward.get(launches)
    if found is None or _is_watched(tensors[-1]):
        return None
    for seen in found:
        if seen.is_like(*tensors):
            return seen.launches
    return None


def _is_watched(x: Tensor) -> bool:
    """Whether the profiler or a mode is on, dual tensors may be about, or x is not what it seems."""
    return (
        _profiler_enabled()
        or forward_ad._current_level >= 0  # a dual tensor looks like any other, to guards too
        or _is_torch_function_mode_enabled()
        or _dispatch_isTensorSubclassLike(x)  # so is every tensor while a dispatch mode is on
    )


def may_repeat(*tensors: Tensor) -> bool:
    """Whether `earlier`, or `earlier_backward`, may find a call with these tensors, once it is remembered."""
    return (
        CAN_ASK
        and not torch.compiler.is_compiling()
        and not _is_watched(tensors[0])
        and not _are_functorch_transforms_active()  # this, and the next, are seen by guards
        and not _get_tracing_state()
        and all(map(_is_plain, tensors))
    )


def remember(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *options: Any, launches: Launches) -> None:
    """For calls like this one, which passed all checks and may repeat; options as those of `earlier`."""
    tensors = (q, k, v, weight)
    seen = Seen(_guards(*tensors).check, launches, any(x.requires_grad for x in tensors))
    _keep_alike(_seen, (torch.is_grad_enabled(), q.shape, *options), seen)


def remember_backward(launches: Launches, *tensors: Tensor) -> None:
    """For backwards like this one, which the operator ran and which may repeat; arguments as `earlier_backward`'s."""
    q, k, v, weight, out, _, grad_out = tensors
    seen = SeenBackward(
        _guards(*tensors).check, backward.launches_for(q, k, v, weight, out, grad_out, *launches.options)
    )
    _keep_alike(_seen_backward, launches, seen)


def _keep_alike(memory: dict[K, list[S]], key: K, seen: S) -> None:
    """Put it with those that have the key in common."""
    keep(memory, key, [*memory.get(key, [])[-MAX_ALIKE + 1 :], seen])  # another list: a thread may be in the old one


def _guards(*tensors: Tensor) -> Any:
    """Those of torch.compile: for the types, dtypes, devices, shapes, strides and requires_grad of tensors.

    And for what else would send a call of theirs to another kernel: autocast, transforms, tracers.
    """
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    guards: Any = TensorGuards  # whose stub has it wrong
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _is_plain(x: Tensor) -> bool:
    """Whether x is numbers in memory."""
    return type(x) in PLAIN and not _dispatch_isTensorSubclassLike(x) and not x.is_neg() and not x._is_zerotensor()
