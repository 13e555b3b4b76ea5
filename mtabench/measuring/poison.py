"""Free memory full of NaN, so that a kernel that does not write its result has no right one there by luck.

An allocator hands freed memory out again: without this, a kernel that writes nothing returns the last right result.

`torch.utils.deterministic.fill_uninitialized_memory` would do it too, but needs deterministic algorithms: other kernels
than those that are timed, and other graphs of torch.compile.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

NAN_BYTE = 0xFF  # all bits set is NaN in every floating-point type
M_PERTURB = -6  # of glibc's mallopt: memory that malloc hands out is filled with 255 less the low byte of the value
FILL_WITH_NAN_BYTES = 0x100
CACHED_BY_MALLOC = 1 << 11  # bytes: malloc may hand out a block up to about that size again without filling it
BLOCKS_CACHED = 64
LARGEST_SMALL_REQUEST = 1 << 20  # bytes: PyTorch's caching allocator keeps small blocks in a pool of their own


@contextmanager
def poisoned_memory(device: str, sizes: Iterable[int] = ()) -> Iterator[None]:
    """Within, on "cpu", memory that malloc hands out to any caller is NaN: with glibc all of more than 2 KiB.

    On either device free blocks of `sizes` bytes are NaN at the start; on "cuda", so is all that PyTorch's
    allocator has free.
    """
    if device == "cuda":
        poison_free_blocks(sizes)
        yield
        return
    set_fill = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    for size in sizes:
        if size <= CACHED_BY_MALLOC:
            for block in [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(BLOCKS_CACHED)]:
                block.fill_(NAN_BYTE)
    set_fill(M_PERTURB, FILL_WITH_NAN_BYTES)
    try:
        yield
    finally:
        set_fill(M_PERTURB, 0)


def poison_free_blocks(sizes: Iterable[int] = ()) -> None:
    """Fill every free block of the current CUDA stream with NaN, and a block of each of `sizes` bytes.

    The allocator gives a request the smallest block that holds it: a request of a free block's size gets that block.
    """
    held = [_block(size) for size in sizes]
    held += [_block(size) for size in sorted(_free_sizes(), reverse=True)]
    for block in held:
        if block is not None:
            block.fill_(NAN_BYTE)


def _block(size: int) -> Tensor | None:
    """Memory of so many bytes on the GPU; None if there is no such block and no room for it."""
    try:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return None


def _free_sizes() -> Iterator[int]:
    """Requests, in bytes, that take all free blocks of the current stream, but for the blocks of graphs.

    None where CUDA's own allocator (cudaMallocAsync) stands for PyTorch's: it does not report its free blocks.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    for segment in torch.cuda.memory_snapshot():
        if (segment["device"], segment["stream"], tuple(segment["segment_pool_id"])) != (device, stream, (0, 0)):
            continue
        small = segment["segment_type"] == "small"
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] != "inactive" or (not small and size <= LARGEST_SMALL_REQUEST):
                continue
            piece = LARGEST_SMALL_REQUEST if small else size
            yield from (min(piece, size - start) for start in range(0, size, piece))
