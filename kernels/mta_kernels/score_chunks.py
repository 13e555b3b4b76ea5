"""Chunks of the staged pipeline of multi-token attention: how many query rows have their scores stored at a time.

Pure numbers, which whoever predicts memory and time reads too; imports neither torch nor Triton.
"""

from __future__ import annotations

from mta_kernels.operation import Operation

# Rows and keys of a block: a product's tile of rows lies in one block of rows and reads whole blocks of keys.
BLOCK = 128
# Bytes of a chunk's scores where there is one buffer of them, and rows of a chunk, at most; a chunk has no fewer rows
# than the last. The larger a chunk, the more tiles run at once: on an H200 256 MB cost 10 to 20 % more time than 1 GB.
# A forward has twice the rows where it has the memory: of 64 mixed rows each, 4096 fill that GPU's clusters once.
CHUNK_BYTES = 2**31
CHUNK_ROWS = 2048
LEAST_ROWS = 16


def halo_rows(operation: Operation) -> int:
    """Rows above that an output row depends on, besides its own: both convolutions look back."""
    after = operation.post_conv.query_taps - 1 if operation.post_conv else 0
    return operation.conv.query_taps - 1 + after


def chunk_rows(
    operation: Operation, batch: int, heads: int, keys: int, element_size: int, *, backward: bool, large: bool = False
) -> tuple[int, int]:  # fmt: skip
    """Sequences and rows of each of a chunk whose scores take at most CHUNK_BYTES, where that can be; its halo beside.

    A backward has two buffers, each of half as many bytes. With convolutions it has up to five of a quarter, and a
    forward two of half; each of twice as many on a GPU with `large` memory.
    """
    convolved = operation.is_convolved
    parts = (1 + backward) * (1 + convolved)
    most = CHUNK_BYTES // parts * (2 if convolved and large else 1)
    most_rows = CHUNK_ROWS if backward or (convolved and not large) else 2 * CHUNK_ROWS
    row = heads * -(-keys // BLOCK) * BLOCK * element_size
    sequences = max(1, min(batch, most // (row * BLOCK)))
    rows = most // (row * sequences)
    block = BLOCK if rows >= BLOCK else LEAST_ROWS
    return sequences, max(LEAST_ROWS, min(rows // block * block, most_rows))
