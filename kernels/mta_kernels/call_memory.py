"""Bounded caches of what a call has decided: by a key, or for calls that differ in addresses and values alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mta_kernels.watchers import CAN_ASK, PLAIN, can_bypass_dispatcher, is_traced

try:  # all properties of a tensor at once are not compared through PyTorch's public interface
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # in a PyTorch to come: then no call is remembered
    CAN_COMPARE = False
else:
    CAN_COMPARE = CAN_ASK

K = TypeVar("K")
V = TypeVar("V")
MAX_KEPT = 256
MAX_ALIKE = 16  # calls kept that have a key in common


def keep(memory: dict[K, V], key: K, value: V, most: int = MAX_KEPT) -> V:
    """Put `value` into `memory`, which is emptied first if it has `most` entries; returns the value.

    Entries in use soon come back; entries that the program no longer uses are gone.
    """
    if len(memory) >= most:
        memory.clear()
    memory[key] = value
    return value


def is_cacheable(*tensors: Tensor) -> bool:
    """Whether a call, or a backward, with these tensors may be kept."""
    return CAN_COMPARE and can_bypass_dispatcher(*tensors)


def may_be_known(x: Tensor) -> bool:
    """Whether to look this tensor's call up: nothing observes that less runs, and its shape has no symbols."""
    return CAN_COMPARE and type(x) in PLAIN and not torch.compiler.is_compiling() and not is_traced(x)


def tensor_guards(*tensors: Tensor) -> Any:
    """The guards of torch.compile: of the types, dtypes, devices, shapes, strides and requires_grad of tensors.

    They also compare what else would change a call's kernel: autocast, transforms, tracers.
    """
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    guards: Any = TensorGuards  # the stub has its type wrong
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


SCALARS = frozenset((bool, int, float, str, type(None)))  # equal options of these types are the same option


class CallMemory(Generic[V]):
    """Values by calls that differ in addresses and values alone: options are compared, and guards look at tensors."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[tuple[Callable[..., bool], V]]] = {}

    def find(self, options: tuple[Any, ...], *tensors: Tensor) -> V | None:
        """The value of a call that was like this one; None if there is none."""
        if not may_be_known(tensors[0]):
            return None
        try:
            kept = self._kept.get(_key(options, tensors[0]), ())
        except TypeError:  # an option without a hash: no call with one is kept
            return None
        return _first_like(kept, tensors)

    def find_known(self, key: Hashable, *tensors: Tensor) -> V | None:
        """The same by a key, for tensors that `may_be_known`."""
        return _first_like(self._kept.get(key, ()), tensors)

    def keep(self, options: tuple[Any, ...], value: V, *tensors: Tensor) -> None:
        """Keep `value` for calls with these options, if a later call can be found again."""
        if SCALARS.issuperset(map(type, options)) and is_cacheable(*tensors):
            self.keep_known(_key(options, tensors[0]), value, *tensors)

    def keep_known(self, key: Hashable, value: V, *tensors: Tensor) -> None:
        """The same by a key, for tensors that are cacheable."""
        alike = self._kept.get(key, [])[-MAX_ALIKE + 1 :]
        keep(self._kept, key, [*alike, (tensor_guards(*tensors).check, value)])  # threads may read the old list

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()


def _first_like(kept: Iterable[tuple[Callable[..., bool], V]], tensors: tuple[Tensor, ...]) -> V | None:
    for is_like, value in kept:
        if is_like(*tensors):
            return value
    return None


def _key(options: tuple[Any, ...], first: Tensor) -> Hashable:
    """The key that calls alike share, besides what guards compare. True is another option than 1, though equal."""
    return torch.is_grad_enabled(), first.shape, options, tuple(map(type, options))
