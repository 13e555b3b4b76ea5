"""Which rank holds which rows: the zigzag of the sequence, and the contiguous shares of a KV cache.

The sequence is cut into 2R equal chunks, and rank r of R holds chunks r and 2R-1-r, one after the other: causal rows of
both together see as many keys on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mta_kernels.conv_attention.context_parallel.ranks import GroupRanks
from mta_kernels.operation import key_padding


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The chunks of the sequence that a rank holds, in the order of its rows."""
    return rank, 2 * ranks - 1 - rank


def shard_sequence(x: Tensor, group: dist.ProcessGroup, *, dim: int = 2) -> Tensor:
    """This rank's rows of x, which every rank holds whole: a contiguous copy, `dim` being that of the sequence.

    Raises ValueError if the sequence cannot be cut into two equal chunks a rank.
    """
    ranks, length = group.size(), x.shape[dim]
    if length % (2 * ranks):
        raise ValueError(
            f"{length} rows cannot be shared by {ranks} ranks, two equal chunks each: "
            f"give a multiple of {2 * ranks} rows, {-(-length // (2 * ranks)) * 2 * ranks} for instance"
        )
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[chunk] for chunk in chunks_of(group.rank(), ranks)], dim)


def unshard_sequence(x: Tensor, group: dist.ProcessGroup, *, dim: int = 2) -> Tensor:
    """The whole of which every rank holds its rows x, as by `shard_sequence`; every rank calls this. No gradients."""
    ranks = group.size()
    shards = GroupRanks(group).gather(x.detach())
    chunks: list[Tensor] = [x] * (2 * ranks)
    for rank, shard in enumerate(shards):
        for chunk, rows in zip(chunks_of(rank, ranks), shard.chunk(2, dim), strict=True):
            chunks[chunk] = rows
    return torch.cat(chunks, dim)


def cache_positions(rank: int, ranks: int, capacity: int, *, key_taps: int, pad_key: str = "both") -> range:
    """The positions of a KV cache for `capacity` tokens that a rank holds in `conv_attention_decode(group=)`.

    A rank attends to `capacity / ranks` positions, and holds the few before and after them as well that its scores are
    mixed with: of a token that lies in the ranges of two ranks, both keep key and value, and decode passes no keys.
    Raises ValueError if the ranks do not divide the capacity, or a share is shorter than what it is mixed with.
    """
    if capacity % ranks:
        raise ValueError(
            f"{ranks} ranks do not divide a cache of {capacity} tokens; "
            f"make it {-(-capacity // ranks) * ranks}, of which the last ones may stay empty"
        )
    pad = key_padding(key_taps, pad_key)
    share = capacity // ranks
    if share < key_taps - 1:
        raise ValueError(
            f"a cache of {capacity} tokens gives each of {ranks} ranks {share} of them, and {key_taps} key taps need "
            f"{key_taps - 1}: make it {(key_taps - 1) * ranks} or more"
        )
    before, after = cache_margins(rank, ranks, key_taps, pad)
    return range(rank * share - before, (rank + 1) * share + after)


def cache_margins(rank: int, ranks: int, key_taps: int, pad: int) -> tuple[int, int]:
    """Positions before and after its own that a rank's cache holds for the convolution."""
    return pad if rank else 0, key_taps - 1 - pad if rank < ranks - 1 else 0
