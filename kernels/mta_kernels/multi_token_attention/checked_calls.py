"""Calls that passed all checks, for those that differ from them in addresses and values alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels.conv_attention.fastpath.alike import guards_of, keep_alike, may_repeat
from mta_kernels.multi_token_attention.backend import MtaBackend
from mta_kernels.operation import Operation
from mta_kernels.watchers import is_watched

# Of the options causal, scale, pad_key, norm_eps, depth, dropout and backend. Those of others are for the checks, which
# may refuse what is equal to an option that they have passed: True for 1.
KINDS: tuple[tuple[type, ...], ...] = (
    (bool,), (float, type(None)), (str,), (float,), (int, type(None)), (float,), (str,),
)  # fmt: skip


class CheckedCall(NamedTuple):
    """What the checks of a call found."""

    is_like: Callable[..., bool]  # its tensors, in all but addresses and values
    operation: Operation
    kernels: MtaBackend


_checked: dict[Hashable, list[CheckedCall]] = {}


def checked_before(tensors: Sequence[Tensor | None], options: Sequence[Any]) -> CheckedCall | None:
    """A call that was like this one; None for one that the checks must see. The first of the tensors is there."""
    if torch.compiler.is_compiling() or not _checked or not _are_usual(options):
        return None
    given = [x for x in tensors if x is not None]
    if is_watched(given[0]):
        return None
    for checked in _checked.get(_key(tensors, options), ()):
        if checked.is_like(*given):
            return checked
    return None


def remember(
    tensors: Sequence[Tensor | None], options: Sequence[Any], operation: Operation, kernels: MtaBackend
) -> None:
    """A call that passed all checks, if one like it may be known again."""
    given = [x for x in tensors if x is not None]
    if not torch.compiler.is_compiling() and _are_usual(options) and may_repeat(*given):
        keep_alike(_checked, _key(tensors, options), CheckedCall(guards_of(*given).check, operation, kernels))


def _are_usual(options: Sequence[Any]) -> bool:
    return all(type(x) in kinds for x, kinds in zip(options, KINDS, strict=True))


def _key(tensors: Sequence[Tensor | None], options: Sequence[Any]) -> Hashable:
    """What calls alike have in common, beside what guards tell."""
    there = tuple([x is not None for x in tensors])
    return torch.is_grad_enabled(), tensors[0].shape, there, *options  # type: ignore[union-attr]
