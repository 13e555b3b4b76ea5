"""The forward with a convolution of probabilities, whose steps between the products are kernels in CUDA C++.

They do all of these steps in two passes over the scores. With both mixings, kernels in which heads meet store
exponentials of logits in between. Else the tile kernels store logits, rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mta_kernels.multi_token_attention.heads_cuda import forward
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.tiles_cuda import post_tiles, pre_tiles
from mta_kernels.multi_token_attention.triton.band_stage import rows_of_chunk
from mta_kernels.multi_token_attention.triton.chunks import BLOCK, Chunk
from mta_kernels.multi_token_attention.triton.products import row_product, score_product
from mta_kernels.operation import Operation


def run_chunks(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, plan: list[Chunk], sequences: int, size: int,
    out: Tensor, logsumexp: Tensor, *, by_heads: bool,
) -> None:  # fmt: skip
    """Write out `[B, H, M, D]` and logsumexp `[B, H, M]`, a chunk of `sequences` sequences at a time.

    q, k and v are of `rows_of`; `size` numbers hold the stored scores of any chunk of `plan`, which has its halo.
    `by_heads` takes the kernels in which heads meet, not the tile kernels.
    """
    batch, heads = q.shape[:2]
    mixed_probabilities = probabilities_by_tiles
    if by_heads:
        mixed_probabilities = probabilities_by_heads
        if mixers.pre_conv is None:  # those kernels convolve in any case
            mixers = mixers._replace(pre_conv=q.new_ones(heads, 1, 1))
        # As those kernels read them: else each chunk casts them.
        mixers = Mixers(*[None if x is None else x.to(q.dtype).contiguous() for x in mixers])
    memories = torch.empty(2, size, dtype=q.dtype, device=q.device)
    for first in range(0, batch, sequences):
        part = slice(first, first + sequences)
        for chunk in plan:
            scores, kept = (chunk.buffer(x, q[part].shape[0], heads) for x in memories)
            score_product(q[part], k[part], scores, chunk, operation.scale)
            mixed_probabilities(operation, scores, kept, mixers, logsumexp[part], chunk)
            row_product(scores, v[part], out[part], chunk)


def probabilities_by_heads(
    operation: Operation, scores: Tensor, kept: Tensor, mixers: Mixers, logsumexp: Tensor, chunk: Chunk
) -> None:
    """Scores of a chunk to mixed probabilities in its own rows, in place; their logsumexp `[B, H, M]` is written.

    `kept`, of the same shape as the scores, is scratch.
    """
    where, post_conv = rows_of_chunk(chunk), operation.post_conv
    pre_taps, pre_mix, post_taps, post_mix = mixers
    if pre_taps is None or pre_mix is None or post_conv is None or post_taps is None or post_mix is None:
        raise ValueError("the kernels in which heads meet need taps before and after the softmax, and both mixings")
    factors = forward.pre_heads(
        scores, pre_taps, operation.conv, pre_mix, kept, logsumexp, where, above=chunk.above, owned=chunk.owned
    )
    forward.post_heads(kept, factors, post_taps, post_conv, post_mix, scores, where)


def probabilities_by_tiles(
    operation: Operation, scores: Tensor, logits: Tensor, mixers: Mixers, logsumexp: Tensor, chunk: Chunk
) -> None:
    """As `probabilities_by_heads`; `logits` is scratch: it gets those of the own rows and, above, of those that the
    second convolution reads."""
    pre, post = operation.pre_conv, operation.post_conv
    above = post.query_taps - 1 if post else 0
    logits = logits[:, :, chunk.above - above :]
    where: dict[str, Any] = {
        "keys": chunk.key_rows, "causal": chunk.causal, "first_query": chunk.key_rows - chunk.query_rows,
        "documents": chunk.documents,
    }  # fmt: skip
    position = chunk.first_position + chunk.above
    sums = torch.empty(logits.shape[:3], dtype=torch.float32, device=scores.device)
    statistics = pre_tiles(
        scores, mixers.pre_conv, pre.pad if pre else 0, mixers.pre_mix, logits, sums, above=chunk.above - above,
        first_position=position - above, **where,
    )  # fmt: skip
    logsumexp[:, :, chunk.first_row + chunk.above :][:, :, : chunk.owned] = sums[:, :, above:]
    post_tiles(
        logits, statistics, mixers.post_conv, post.pad if post else 0, mixers.post_mix, scores[:, :, chunk.own_rows],
        above=above, first_position=position, zero_block=BLOCK.value, **where,
    )  # fmt: skip
