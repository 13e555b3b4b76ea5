"""Calls that differ in addresses and values alone: how they are told, and what is kept for them."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from mta_kernels.conv_attention.fastpath.memory import keep
from mta_kernels.watchers import CAN_ASK, nobody_watches

try:  # all properties of a tensor at once are not compared through PyTorch's public interface
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # in a PyTorch to come: then no call is remembered
    CAN_COMPARE = False
else:
    CAN_COMPARE = CAN_ASK

K = TypeVar("K")
S = TypeVar("S")
MAX_ALIKE = 16  # calls remembered that have the grad mode, q's shape and the options in common


def may_repeat(*tensors: Tensor) -> bool:
    """Whether a call, or a backward, with these tensors may be known again, once it is remembered."""
    return CAN_COMPARE and nobody_watches(*tensors)


def guards_of(*tensors: Tensor) -> Any:
    """Those of torch.compile: for the types, dtypes, devices, shapes, strides and requires_grad of tensors.

    And for what else would send a call of theirs to another kernel: autocast, transforms, tracers.
    """
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    guards: Any = TensorGuards  # whose stub has it wrong
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def keep_alike(memory: dict[K, list[S]], key: K, seen: S) -> None:
    """Put it with those that have the key in common."""
    keep(memory, key, [*memory.get(key, [])[-MAX_ALIKE + 1 :], seen])  # another list: a thread may be in the old one
