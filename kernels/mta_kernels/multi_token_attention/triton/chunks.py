"""Chunks of query rows whose scores are stored at a time, and which scores are written and read.

A stage writes row i of the scores, at position p, from `stored_from` to `stored_end`: zeros where a key is not seen. No
stage reads outside this range, so nothing needs to be written there.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from mta_kernels import score_chunks
from mta_kernels.operation import Operation

BLOCK: tl.constexpr = tl.constexpr(score_chunks.BLOCK)


@dataclass(frozen=True)
class Chunk:
    """`rows` rows of stored scores. The chunk computes the `owned` rows from `above` on.

    The other rows, the halo, serve a convolution alone. Row 0 is query `first_row`, which is negative where the halo
    reaches above the first query. `keys` of the `key_rows` take part; a row of scores takes `pitch` elements.
    """

    first_row: int
    rows: int
    above: int
    owned: int
    query_rows: int
    key_rows: int
    causal: bool
    documents: Tensor | None
    convolved: bool  # whether rows are stored further, for tiles that begin anywhere and read beyond a row's keys
    signature: Hashable

    @property
    def first_position(self) -> int:
        """The position of row 0 among the keys."""
        return self.key_rows - self.query_rows + self.first_row

    @functools.cached_property
    def keys(self) -> int:
        stop = self.first_row + self.rows
        return score_chunks.keys_before(stop, self.query_rows, self.key_rows, causal=self.causal)

    @functools.cached_property
    def pitch(self) -> int:
        return score_chunks.pitch_of(self.keys)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of its stored scores, and elements of a row."""
        return self.rows, self.pitch

    @property
    def own_rows(self) -> slice:
        return slice(self.above, self.above + self.owned)

    def buffer(self, memory: Tensor, batch: int, heads: int) -> Tensor:
        """Stored scores `[batch, heads, rows, pitch]` at the beginning of `memory`."""
        shape = batch, heads, self.rows, self.pitch
        return memory[: batch * heads * self.rows * self.pitch].view(shape)


def chunks(
    operation: Operation, query_rows: int, key_rows: int, rows: int, documents: Tensor | None, signature: Hashable, *,
    above: int = 0, below: int = 0,
) -> list[Chunk]:  # fmt: skip
    """All rows of q in chunks, as `score_chunks.own_rows` divides them, each with a halo."""
    return [
        Chunk(
            own.start - above, above + len(own) + below, above, len(own), query_rows, key_rows, operation.causal,
            documents, operation.is_convolved, (signature, own.start),
        )
        for own in score_chunks.own_rows(operation, query_rows, key_rows, rows, above=above, below=below)
    ]  # fmt: skip


@triton.jit
def stored_end(row, first_position, pitch, CAUSAL: tl.constexpr, CONVOLVED: tl.constexpr):
    """One past the last key at which the scores of a row, or of rows, of a chunk are stored; a multiple of BLOCK.

    Every row of a product's tile is stored at all keys that the tile reads: to the end of the row's block. Convolution
    tiles begin anywhere, so with convolutions rows are stored up to BLOCK keys after their own.
    """
    if CAUSAL:
        if CONVOLVED:
            last = first_position + row + (BLOCK - 1)
        else:
            last = first_position + (row // BLOCK * BLOCK + (BLOCK - 1))
        return tl.minimum((tl.maximum(last, -1) + BLOCK) // BLOCK * BLOCK, pitch)
    return row * 0 + pitch


@triton.jit
def stored_from(row, first_position, documents_ptr, DOCUMENTS: tl.constexpr, CONVOLVED: tl.constexpr):
    """The first key at which the scores of a row of a chunk are stored; a multiple of BLOCK."""
    if DOCUMENTS and not CONVOLVED:
        return tl.load(documents_ptr + first_position + row // BLOCK * BLOCK) // BLOCK * BLOCK
    return row * 0


@triton.jit
def seen_keys(row, first_position, first_row, query_rows, key_rows, documents_ptr,
              CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """The first key that a row, or rows, of a chunk see, and one past the last; none outside the queries."""
    position = first_position + row
    inside = (first_row + row >= 0) & (first_row + row < query_rows)
    start = position * 0
    end = position * 0 + key_rows
    if CAUSAL:
        end = position + 1
    if DOCUMENTS:
        start = tl.load(documents_ptr + position, mask=inside, other=0)
        end = tl.minimum(end, tl.load(documents_ptr + key_rows + position, mask=inside, other=0))
    return tl.where(inside, start, 0), tl.where(inside, end, 0)
