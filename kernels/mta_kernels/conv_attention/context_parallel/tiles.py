"""How the scores are divided: a tile is a chunk of queries against the keys of one chunk, or nearly so.

Rows of q and k that take part in the convolution and in nothing else are a tile's margins. The tile on the diagonal
takes the last keys of the chunk before too, so that no other tile needs a mask: docs/design/context-parallel.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from mta_kernels.conv_attention.context_parallel.layout import chunks_of
from mta_kernels.operation import Convolution, Operation

# In chunks of LONG rows and more, tiles have whole blocks of keys: a kernel is faster where it knows that they are.
LONG, BLOCK = 2048, 128


@dataclass(frozen=True)
class Problem:
    """What every rank agrees on: `rows` a chunk, and what is computed of the sequence."""

    rows: int
    operation: Operation

    @property
    def conv(self) -> Convolution:
        return self.operation.conv

    def of_tile(self, tile: Tile) -> Operation:
        """What is computed of a tile, which is causal on the diagonal alone."""
        return replace(self.operation, causal=tile.causal)

    @property
    def lead(self) -> int:
        """Keys of the chunk before that the tile on the diagonal takes: E, or whole blocks."""
        keys = self.operation.band
        return keys if self.rows < LONG else -(-keys // BLOCK) * BLOCK

    @property
    def before(self) -> tuple[int, int, int]:
        """Rows of q, k and v that a chunk needs of the chunk before it."""
        return self.conv.query_taps - 1, self.lead + self.conv.pad, self.lead

    @property
    def after(self) -> tuple[int, int, int]:
        """Rows of q, k and v that a chunk needs of the chunk after it."""
        return 0, self.conv.key_taps - 1 - self.conv.pad, 0

    @property
    def least_rows(self) -> int:
        """Rows that a chunk must have: those that it needs are its neighbours' alone."""
        return sum(self.conv.taps) - 1


@dataclass(frozen=True)
class Tile:
    """Chunk `query` of this rank against chunk `key` of another's, by their places, 0 or 1.

    `query_rows`, `key_rows` and `value_rows` are those of the widened chunks (see `halo`) that take part, of which the
    first `query_margin` and `key_margin` are the convolution's alone. `causal` on the diagonal alone.
    """

    query: int
    key: int
    causal: bool
    query_rows: slice
    key_rows: slice
    value_rows: slice
    query_margin: int
    key_margin: int

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its rows of widened chunks `[2, B, H, rows, D]`, or of their gradients."""
        return (
            q[self.query, :, :, self.query_rows],
            k[self.key, :, :, self.key_rows],
            v[self.key, :, :, self.value_rows],
        )


def tiles(problem: Problem, rank: int, owner: int, ranks: int) -> Iterator[Tile]:
    """The tiles of a rank's queries and the keys that rank `owner` holds."""
    for query, query_chunk in enumerate(chunks_of(rank, ranks)):
        for key, key_chunk in enumerate(chunks_of(owner, ranks)):
            if not problem.operation.causal or key_chunk < query_chunk:
                yield _full(problem, query, key, neighbours=key_chunk == query_chunk - 1)
            elif key_chunk == query_chunk:
                yield _diagonal(problem, query, key, first=query_chunk == 0)


def _full(problem: Problem, query: int, key: int, neighbours: bool) -> Tile:
    """Every query sees every key; of neighbouring chunks, the last keys are the diagonal tile's."""
    start, own_keys = problem.lead, problem.rows - (problem.lead if neighbours else 0)
    return Tile(
        query, key, causal=False, query_rows=slice(None),
        key_rows=slice(start, start + own_keys + problem.conv.key_taps - 1), value_rows=slice(start, start + own_keys),
        query_margin=problem.conv.query_taps - 1, key_margin=problem.conv.pad,
    )  # fmt: skip


def _diagonal(problem: Problem, query: int, key: int, first: bool) -> Tile:
    """A chunk with itself and the keys just before it; the first chunk of a sequence has none before."""
    before_queries, before_keys, before_values = problem.before if first else (0, 0, 0)
    return Tile(
        query, key, causal=True, query_rows=slice(before_queries, None),
        key_rows=slice(before_keys, problem.before[1] + problem.rows), value_rows=slice(before_values, None),
        query_margin=0 if first else problem.conv.query_taps - 1,
        key_margin=0 if first else problem.conv.pad,
    )  # fmt: skip
