"""Chunks of the staged pipeline of multi-token attention: how many query rows have their scores stored at a time.

Pure numbers, which the predictions of memory and time read too; imports neither torch nor Triton.
"""

from __future__ import annotations

import functools

from mta_kernels.operation import Operation

# Rows and keys of a block: a product's tile of rows lies in one block of rows and reads whole blocks of keys.
BLOCK = 128
# Bytes of a chunk's scores where there is one buffer of them, and rows that see all keys, at most; a chunk has no
# fewer rows than the last. The larger a chunk, the more tiles run at once: on an H200 256 MB cost 10 to 20 % more time
# than 1 GB. A forward has twice the rows where it has the memory: of 64 mixed rows each, 4096 fill that GPU's clusters
# once.
CHUNK_BYTES = 2**31
CHUNK_ROWS = 2048
LEAST_ROWS = 16


def pitch_of(keys: int) -> int:
    """Room for the scores of a row: keys in whole blocks."""
    return -(-keys // BLOCK) * BLOCK


def keys_before(stop: int, query_rows: int, key_rows: int, *, causal: bool) -> int:
    """Keys that the query rows before `stop` see, which may lie below the last."""
    return key_rows - query_rows + min(stop, query_rows) if causal else key_rows


def halo_rows(operation: Operation) -> int:
    """Rows above that an output row depends on, besides its own: both convolutions look back."""
    after = operation.post_conv.query_taps - 1 if operation.post_conv else 0
    return operation.conv.query_taps - 1 + after


def chunk_rows(
    operation: Operation, batch: int, heads: int, keys: int, element_size: int, *, backward: bool, large: bool = False
) -> tuple[int, int]:  # fmt: skip
    """A chunk's sequences, and its rows of each: scores take at most CHUNK_BYTES where possible, and the halo besides.

    This is a chunk whose rows see all keys: `own_rows` gives all chunks.

    A backward has two buffers, each of half as many bytes. With convolutions it has up to five of a quarter, and a
    forward two of half; each of twice as many on a GPU with `large` memory.
    """
    convolved = operation.is_convolved
    parts = (1 + backward) * (1 + convolved)
    most = CHUNK_BYTES // parts * (2 if convolved and large else 1)
    most_rows = CHUNK_ROWS if backward or (convolved and not large) else 2 * CHUNK_ROWS
    row = heads * pitch_of(keys) * element_size
    sequences = max(1, min(batch, most // (row * BLOCK)))
    rows = most // (row * sequences)
    block = _block(rows)
    return sequences, max(LEAST_ROWS, min(rows // block * block, most_rows))


def stored_scores(
    operation: Operation, query_rows: int, key_rows: int, own: range, *, above: int = 0, below: int = 0
) -> int:
    """Elements for one head of a chunk with these `own` query rows: with its halo, and keys in whole blocks."""
    keys = keys_before(own.stop + below, query_rows, key_rows, causal=operation.causal)
    return (above + len(own) + below) * pitch_of(keys)


@functools.lru_cache(1024)
def own_rows(
    operation: Operation, query_rows: int, key_rows: int, rows: int, *, above: int = 0, below: int = 0
) -> tuple[range, ...]:
    """The query rows that each chunk computes; its halo has `above` rows before them and `below` after.

    A chunk has `rows` rows. With convolutions, chunks whose rows see fewer keys have more rows if that saves a chunk:
    each has room for `rows` that see all keys, and all store about as many scores. Without convolutions the chunks are
    equal: the row kernels run best on rows of like lengths.
    """
    equal = tuple(range(first, min(first + rows, query_rows)) for first in range(0, query_rows, rows))
    if not operation.is_convolved:
        return equal

    def stored(first: int, stop: int) -> int:
        return stored_scores(operation, query_rows, key_rows, range(first, stop), above=above, below=below)

    def divided(rows: int) -> tuple[range, ...]:
        most, block, found, first = stored(query_rows - rows, query_rows), _block(rows), [], 0
        size = query_rows  # a later chunk sees more keys, so it never has more rows than the one before
        while first < query_rows:
            size = -(-min(size, query_rows - first) // block) * block
            while size > block and stored(first, first + size) > most:
                size -= block
            stop = min(first + size, query_rows)
            found.append(range(first, stop))
            first = stop
        return tuple(found)

    fewest, block = divided(rows), _block(rows)
    if len(fewest) == len(equal):
        return equal
    return next((found for x in range(block, rows, block) if len(found := divided(x)) == len(fewest)), fewest)


def _block(rows: int) -> int:
    """The number of which a chunk's rows are a multiple."""
    return BLOCK if rows >= BLOCK else LEAST_ROWS
