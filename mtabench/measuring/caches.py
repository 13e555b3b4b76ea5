"""The caches of a GPU before a timed window: nothing of an earlier call is in them, nor of an earlier process."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from mtabench.environment import l2_bytes

PAGE_BYTES = 2 * 2**20  # of a GPU's memory
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED: a GPU whose L2 cache has no set-aside


def cache_flush(device: str, cache: str) -> Callable[[], Any] | None:
    """Overwrites twice the L2 cache, whose persisting lines are ordinary from here on; None where caches stay warm.

    By a memset, and then a byte of every page by an ordinary kernel: after the memset alone, what NVBench launches
    before a call makes some kernels of 10 to 40 us half a microsecond longer (docs/comparing.md).
    """
    if device != "cuda":
        return None
    reset_persisting_lines()
    if cache == "warm":
        return None
    buffer = torch.empty(2 * l2_bytes(), dtype=torch.uint8, device="cuda")
    of_pages = buffer[::PAGE_BYTES]

    def flush() -> None:
        buffer.zero_()
        of_pages.zero_()

    return flush


def clean_lines() -> Callable[[], Any]:
    """Reads twice the L2 cache, so that none of its lines has still to be written back when a window begins."""
    return torch.zeros(2 * l2_bytes() // 8, dtype=torch.int64, device="cuda").max


def reset_persisting_lines() -> None:
    """Make all persisting lines of the current GPU's L2 cache ordinary ones.

    A kernel may mark what it reads as persisting, in a set-aside part of the cache. Such lines outlive its process and
    are not overwritten by a flush, so that later kernels have less of the cache. Raises RuntimeError if the driver
    refuses.
    """
    torch.cuda.current_stream().synchronize()  # PyTorch's context is this thread's from here on
    if (result := _libcuda().cuCtxResetPersistingL2Cache()) not in (0, NOT_SUPPORTED):
        raise RuntimeError(f"the CUDA driver does not reset the L2 cache's persisting lines: error {result}")


def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
