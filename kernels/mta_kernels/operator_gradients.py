"""Operators that kernels run, and their gradients: registered by hand, and differentiable under torch.func as well.

On the Autograd key, since `torch.library.register_autograd` takes twice the host time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from mta_kernels.watchers import can_bypass_dispatcher, may_be_dual

_unseen: dict[Any, tuple[Callable, Callable, tuple]] = {}  # of an operator: `register`'s kernel, Function and `first`

_kernels: dict[Any, Callable[..., Any]] = {}


def kernel_of(op: Any) -> Callable[..., Any]:
    """What runs an operator of this package."""
    return _kernels[op]


def under_torch_func() -> bool:
    """Whether a transform of torch.func is active: grad, vjp, jvp, vmap."""
    return torch._C._are_functorch_transforms_active()


def _is_mapped(x: Tensor) -> bool:
    """Whether torch.func.vmap maps x, at any level of torch.func."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def check_not_mapped(operation: str, *arguments: object) -> None:
    """Raise RuntimeError if torch.func.vmap maps one of these, for what changes a tensor in place."""
    if torch.compiler.is_compiling() or not under_torch_func():
        return
    if any(isinstance(x, Tensor) and _is_mapped(x) for x in arguments):
        raise RuntimeError(f"{operation} cannot run within torch.func.vmap; give all sequences as one batch instead")


def check_no_tangents(operation: str, instead: str, *arguments: object) -> None:
    """Raise RuntimeError if one of these is a dual tensor: kernels have no forward-mode derivatives."""
    if not may_be_dual():
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise RuntimeError(f"{operation} has no forward-mode derivatives (torch.func.jvp, dual tensors); {instead}")


class OneLevelFunction(torch.autograd.function._SingleLevelFunction):
    """The gradient of one operator; torch.func transforms it a level at a time, like PyTorch's own gradients.

    torch.autograd.Function would look for rules of its own for each of torch.func's transforms.
    """


class NoGradient(OneLevelFunction):
    """An operator whose results cannot be differentiated: raises `sentence` rather than give no gradient.

    The sentence may name the `{backend}`, which is then the last argument.
    """

    @staticmethod
    def forward(ctx: Any, op: Callable, sentence: str, *arguments: Any) -> Any:
        ctx.sentence = sentence.format(backend=arguments[-1])
        return run_in_function(op, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(ctx.sentence)


def call(op: Any, *arguments: Any) -> Any:
    """`op(*arguments)`, of one registered here; bypasses PyTorch's dispatcher where nothing observes the call."""
    if not _is_unseen(op, arguments):
        return op(*arguments)
    kernel, apply, first = _unseen[op]
    if _wants_gradient(arguments):
        return apply(*first, *arguments)
    return _below_autograd(kernel, *arguments)


def _is_unseen(op: Any, arguments: tuple) -> bool:
    """Whether nothing observes that `op` is called, or that its kernel is called instead."""
    if torch.compiler.is_compiling() or op not in _unseen:
        return False
    return can_bypass_dispatcher(*(x for x in arguments if isinstance(x, Tensor)))


def _wants_gradient(arguments: tuple) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def _below_autograd(function: Callable, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return function(*arguments)


def run_in_function(op: Callable, *arguments: Any) -> Any:
    """`op` below autograd, from a Function's forward: that has no gradients, but outer levels of torch.func have."""
    if not under_torch_func():
        return _below_autograd(_unseen[op][0] if _is_unseen(op, arguments) else op, *arguments)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below_autograd(op, *arguments)


def check_no_tangents_in_kernels(operation: str, backend: str, *arguments: Any) -> None:
    """Raise RuntimeError if one of the arguments of a backend's operator is a dual tensor."""
    check_no_tangents(f"{operation} through backend {backend!r}", "backend='reference' has them", *arguments)


def define(name: str, schema: str, fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """The operator `mta::name`; `fake` gives its results without their numbers."""
    torch.library.define("mta::" + name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake("mta::" + name)(fake)
    return getattr(torch.ops.mta, name).default


def like_attention(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """The output `[B, H, M, D]` and the logsumexp of its rows, float32, without their numbers."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def like_newest_row(q_window: Tensor, *others: Any) -> Tensor:
    """The output `[B, H, 1, D]` of a decode step without its numbers."""
    batch, heads, _, head_dim = q_window.shape
    return q_window.new_empty(batch, heads, 1, head_dim)


def like_each(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients without their numbers: an operator cannot return None, so the gradient of None is an empty tensor."""
    there = next(x for x in tensors if x is not None)
    return tuple(there.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def register_kernel(op: torch._ops.OpOverload, kernel: Callable[..., Any]) -> None:
    """Let `kernel` run an operator."""
    torch.library.impl(op.name(), ("cpu", "cuda"))(kernel)
    _kernels[op] = kernel


def register(
    op: torch._ops.OpOverload, kernel: Callable[..., Any], operation: str, function: Any, *first: Any,
    of_backends: bool = True,
) -> None:  # fmt: skip
    """Let `kernel` run an operator; for a gradient, apply a OneLevelFunction to `first` and its arguments.

    With `of_backends` the last argument is the backend.
    """

    def autograd(*arguments: Any) -> Any:
        if of_backends:
            check_no_tangents_in_kernels(operation, arguments[-1], *arguments)
        else:
            check_no_tangents(operation, "backend='reference' has them", *arguments)
        if not _wants_gradient(arguments):
            return _below_autograd(op, *arguments)
        if not under_torch_func():
            return function.apply(*first, *arguments)
        with enable_single_level_autograd_function():
            return function.apply(*first, *arguments)

    register_kernel(op, kernel)
    torch.library.impl(op.name(), "Autograd")(autograd)
    _unseen[op] = kernel, function.apply, first


def register_with_backward(
    op: torch._ops.OpOverload, kernel: Callable[..., Any], backward: torch._ops.OpOverload,
    backward_kernel: Callable[..., Any], operation: str, *, first: int, keeps: tuple[int, ...], needs: Sequence[int],
    of_backends: bool = True,
) -> None:  # fmt: skip
    """Let kernels run an operator and its backward, which is differentiable no further.

    Behind the `first` arguments of `op` the backward takes the results of it at the places `keeps` and the gradient of
    the first one, then the other arguments. It gives the gradients of the arguments at the places `needs`.
    """
    function = _with_backward(op, backward, first, keeps, needs)
    once = "through backend '{backend}'" if of_backends else "on a GPU"
    sentence = f"{operation} is differentiable once {once}; backend='reference' has second derivatives"
    register(op, kernel, operation, function, of_backends=of_backends)
    register(
        backward, backward_kernel, f"the backward of {operation}", NoGradient, backward, sentence,
        of_backends=of_backends,
    )  # fmt: skip


def _with_backward(
    op: torch._ops.OpOverload, backward_op: torch._ops.OpOverload, first: int, keeps: tuple[int, ...],
    needs: Sequence[int],
) -> type[OneLevelFunction]:  # fmt: skip
    """The Function that `register_with_backward` describes."""
    are_tensors = ["Tensor" in str(x.type) for x in op._schema.arguments]
    count = len(are_tensors)

    class WithBackward(OneLevelFunction):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            results = run_in_function(op, *arguments)
            several = results if isinstance(results, tuple) else (results,)
            ctx.others = [None if is_tensor else x for x, is_tensor in zip(arguments, are_tensors, strict=True)]
            tensors = [x for x, is_tensor in zip(arguments, are_tensors, strict=True) if is_tensor]
            ctx.save_for_backward(*tensors, *[several[at] for at in keeps])
            ctx.mark_non_differentiable(*several[1:])
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
            if grad is None:  # a later function gave no gradient
                return (None,) * count
            saved = iter(ctx.saved_tensors)
            arguments = [next(saved) if is_tensor else x for x, is_tensor in zip(ctx.others, are_tensors, strict=True)]
            gradients = call(backward_op, *arguments[:first], *saved, grad, *arguments[first:])
            found: list[Tensor | None] = [None] * count
            for at, gradient in zip(needs, gradients, strict=True):
                if ctx.needs_input_grad[at]:
                    found[at] = gradient
            return tuple(found)

    return WithBackward
