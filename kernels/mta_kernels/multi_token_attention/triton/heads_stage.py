"""The forward with both mixings and a convolution of probabilities, between the products by kernels in CUDA C++.

Heads meet in them. They go over the scores twice and store exponentials of logits in between.
"""

from __future__ import annotations

from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.multi_token_attention.heads_cuda import forward
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton.band_stage import rows_of_chunk
from mta_kernels.multi_token_attention.triton.chunks import Chunk
from mta_kernels.multi_token_attention.triton.products import row_product, score_product
from mta_kernels.operation import Operation


def run_chunks(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, plan: list[Chunk], sequences: int, size: int,
    out: Tensor, logsumexp: Tensor,
) -> None:  # fmt: skip
    """Write out `[B, H, M, D]` and logsumexp `[B, H, M]`, a chunk of `sequences` sequences at a time.

    q, k and v are of `rows_of`; `size` numbers hold the stored scores of any chunk of `plan`, which has its halo.
    """
    batch, heads = q.shape[:2]
    if mixers.pre_conv is None:  # the kernels convolve in any case
        mixers = mixers._replace(pre_conv=q.new_ones(heads, 1, 1))
    # As the kernels read them: else each chunk casts them.
    mixers = Mixers(*[None if x is None else x.to(q.dtype).contiguous() for x in mixers])
    memories = empty(2, size, dtype=q.dtype, device=q.device)
    for first in range(0, batch, sequences):
        part = slice(first, first + sequences)
        for chunk in plan:
            scores, kept = (chunk.buffer(x, q[part].shape[0], heads) for x in memories)
            score_product(q[part], k[part], scores, chunk, operation.scale)
            mixed_probabilities(operation, scores, kept, mixers, logsumexp[part], chunk)
            row_product(scores, v[part], out[part], chunk)


def mixed_probabilities(
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
