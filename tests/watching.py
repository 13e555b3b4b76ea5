"""Who watches operators, for the tests of calls that skip them."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Keeps the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops.append(function)
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    """May be anything."""
