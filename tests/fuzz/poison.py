"""NaN in all memory that a call may get, so that a number which nobody wrote cannot pass for a result."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

from mta_kernels import allocation
from mtabench.measuring.poison import poison_free_blocks

HELD_BYTES = 2 << 30  # free memory that the allocator may keep; what is beyond goes back


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Within it PyTorch fills each new tensor with NaN, or the largest whole number: outputs and scratch alike."""
    settings: Any = deterministic  # a module with a property, which its stub lacks
    filled, mode = settings.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that have no deterministic form, which are PyTorch's own
        settings.fill_uninitialized_memory = allocation.pytorch_fills = True
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            settings.fill_uninitialized_memory, allocation.pytorch_fills = filled, False


def fill_free_blocks() -> None:
    """Fill every block that the GPU's allocator holds free with NaN, for what is read outside of tensors."""
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > HELD_BYTES:
        torch.cuda.empty_cache()
    poison_free_blocks()
