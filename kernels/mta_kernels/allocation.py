"""Memory for what kernels write wholly: no deterministic mode fills it first.

PyTorch fills new tensors under `torch.use_deterministic_algorithms(True)`, with one kernel for each.
These functions take the arguments of its factories and return the same tensors, without such a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mta_kernels import planned

pytorch_fills = False  # True lets PyTorch fill here too: tests look for numbers that no kernel wrote


def empty(*size: Any, device: Any = None, **options: Any) -> Tensor:
    """As `torch.empty`."""
    if not torch.are_deterministic_algorithms_enabled() or _by_factory():
        return torch.empty(*size, device=device, **options)
    return _in_memory_of(torch.empty(0, device=device, **options), torch.empty(*size, device="meta", **options))


def empty_like(x: Tensor, **options: Any) -> Tensor:
    """As `torch.empty_like`."""
    if not torch.are_deterministic_algorithms_enabled() or _by_factory():
        return torch.empty_like(x, **options)
    return _in_memory_of(torch.empty(0, dtype=x.dtype, device=x.device), torch.empty_like(x, device="meta", **options))


def new_empty(x: Tensor, *size: Any, **options: Any) -> Tensor:
    """As `x.new_empty`."""
    if not torch.are_deterministic_algorithms_enabled() or _by_factory():
        return x.new_empty(*size, **options)
    return _in_memory_of(x.new_empty(0, **options), x.new_empty(*size, device="meta", **options))


def _by_factory() -> bool:
    return pytorch_fills or torch.compiler.is_compiling() or planned.recorder() is not None


def _in_memory_of(nothing: Tensor, like: Tensor) -> Tensor:
    """`nothing` with the shape and strides of `like`: PyTorch fills tensors, but not storages."""
    storage = torch.UntypedStorage(like.untyped_storage().nbytes(), device=nothing.device)
    return nothing.set_(storage, 0, like.shape, like.stride())  # type: ignore[arg-type]
