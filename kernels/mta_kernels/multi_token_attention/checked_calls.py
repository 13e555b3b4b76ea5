"""Calls that passed all checks, for those that differ from them in addresses and values alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.call_memory import CallMemory, is_cacheable, may_be_known
from mta_kernels.multi_token_attention.backend import MtaBackend
from mta_kernels.operation import Operation

# Of the options causal, scale, pad_key, norm_eps, depth, dropout and backend. Those of others are for the checks, which
# may refuse what is equal to an option that they have passed: True for 1.
KINDS: tuple[tuple[type, ...], ...] = (
    (bool,), (float, type(None)), (str,), (float,), (int, type(None)), (float,), (str,),
)  # fmt: skip


class CheckedCall(NamedTuple):
    """What the checks of a call found."""

    operation: Operation
    kernels: MtaBackend


_checked: CallMemory[CheckedCall] = CallMemory()


def checked_before(tensors: Sequence[Tensor | None], options: Sequence[Any]) -> CheckedCall | None:
    """A call that was like this one; None for one that the checks must see. The first of the tensors is there."""
    given = [x for x in tensors if x is not None]
    if not may_be_known(given[0]) or not _are_usual(options):
        return None
    return _checked.find(_key(tensors, options), *given)


def remember(
    tensors: Sequence[Tensor | None], options: Sequence[Any], operation: Operation, kernels: MtaBackend
) -> None:
    """A call that passed all checks, if one like it may be known again."""
    given = [x for x in tensors if x is not None]
    if _are_usual(options) and is_cacheable(*given):
        _checked.keep(_key(tensors, options), CheckedCall(operation, kernels), *given)


def _are_usual(options: Sequence[Any]) -> bool:
    return all(type(x) in kinds for x, kinds in zip(options, KINDS, strict=True))


def _key(tensors: Sequence[Tensor | None], options: Sequence[Any]) -> Hashable:
    """What calls alike have in common, beside what guards tell."""
    there = tuple([x is not None for x in tensors])
    return torch.is_grad_enabled(), tensors[0].shape, there, *options  # type: ignore[union-attr]
