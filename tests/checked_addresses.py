"""Triton's interpreter with every address checked: a kernel may read and write what its tensors hold, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

LARGEST = 1 << 24  # numbers from a tensor's first to its last, above which the gaps between them are not looked at


class Owned(NamedTuple):
    """Bytes from `start` to before `end`, and which numbers of `size` bytes of them are a tensor's: None if all are."""

    start: int
    end: int
    size: int
    numbers: np.ndarray | None

    @classmethod
    def by(cls, x: Tensor) -> Owned:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        numbers = None
        if extent <= LARGEST:
            numbers = np.zeros(extent, bool)
            np.lib.stride_tricks.as_strided(numbers, tuple(x.shape), x.stride())[...] = True
        return cls(x.data_ptr(), x.data_ptr() + extent * x.element_size(), x.element_size(), numbers)

    def has(self, addresses: np.ndarray) -> np.ndarray:
        inside = (addresses >= self.start) & (addresses < self.end)
        if self.numbers is not None:
            inside &= self.numbers[np.where(inside, (addresses - self.start) // self.size, 0)]
        return inside


def check_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a kernel in the interpreter raises IndexError where it reads or writes outside of its arguments."""
    owned: list[Owned] = []
    builder = type(interpreter.interpreter_builder)
    launch = interpreter.GridExecutor.__call__

    def checked_launch(self: Any, *args: Any, **options: Any) -> None:
        tensors = [getattr(x, "base", x) for x in (*args, *options.values())]
        owned[:] = [Owned.by(x) for x in tensors if isinstance(x, torch.Tensor) and x.numel()]
        launch(self, *args, **options)

    def checked(access: Callable, mask_at: int) -> Callable:
        def wrapper(self: Any, pointers: Any, *others: Any, **options: Any) -> Any:
            wanted = np.broadcast_to(others[mask_at].data, pointers.data.shape).astype(bool)
            addresses = pointers.data[wanted].astype(np.int64)
            known = np.zeros(addresses.shape, bool)
            for each in owned:
                known |= each.has(addresses)
            if not known.all():
                raise IndexError(f"{(~known).sum()} of {known.size} numbers lie outside of the kernel's tensors")
            return access(self, pointers, *others, **options)

        return wrapper

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", checked_launch)
    monkeypatch.setattr(builder, "create_masked_load", checked(builder.create_masked_load, 0))
    monkeypatch.setattr(builder, "create_masked_store", checked(builder.create_masked_store, 1))
