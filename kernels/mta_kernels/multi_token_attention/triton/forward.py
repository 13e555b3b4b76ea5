"""The forward: chunks of rows through the stages."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mta_kernels.allocation import empty, new_empty
from mta_kernels.conv_attention.triton.launch import call_signature
from mta_kernels.gpu_limits import has_large_memory
from mta_kernels.multi_token_attention import stages
from mta_kernels.multi_token_attention.heads_cuda.heads import post_heads, pre_heads
from mta_kernels.multi_token_attention.mix_cuda import keep_logits, mix_values
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton.band_stage import convolution_of, mix_rows, rows_of_chunk
from mta_kernels.multi_token_attention.triton.chunks import Chunk, chunks
from mta_kernels.multi_token_attention.triton.heads import mix_heads
from mta_kernels.multi_token_attention.triton.products import row_product, rows_of, score_product
from mta_kernels.operation import Operation
from mta_kernels.score_chunks import chunk_rows, halo_rows

Run = Callable[[slice, Chunk], None]  # runs this chunk for these sequences


def mixed_attention_forward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, *, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out `[B, Hq, M, D]` in q's dtype and the logsumexp `[B, Hq, M]` float32: a `Backend.forward`."""
    batch, heads, query_rows, head_dim = q.shape
    key_rows = k.shape[2]
    out = new_empty(q, q.shape)
    logsumexp = new_empty(q, q.shape[:3], dtype=torch.float32)
    q, k, v = (rows_of(x) for x in (q, k, v))
    halo = halo_rows(operation)
    large = has_large_memory(q.device)
    sequences, rows = chunk_rows(operation, batch, heads, key_rows, q.element_size(), backward=False, large=large)
    signature = call_signature(q, k, v, documents, options=operation)
    plan = chunks(operation, query_rows, key_rows, rows, documents, signature, above=halo)
    size = max(math.prod(chunk.shape) for chunk in plan) * sequences * heads
    path = stages.forward(
        operation, stages.cuda_gpu(q.device), q.dtype, heads, head_dim, documents=documents is not None,
        key_rows=key_rows, rows=plan[0].rows, sequences=sequences,
    )  # fmt: skip
    given = operation, q, k, v, mixers, size, out, logsumexp
    if path == "mix":
        run = _mix(*given, sequences * heads * plan[0].rows)
    else:
        run = _meet(*given) if path == "heads" else _stages(*given)
    for first in range(0, batch, sequences):
        for chunk in plan:
            run(slice(first, first + sequences), chunk)
    return out, logsumexp


def _stages(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, size: int, out: Tensor, logsumexp: Tensor
) -> Run:
    """One stage for each step. q, k and v are as from `rows_of`; any chunk's stored scores fit `size` elements."""
    before = convolution_of(operation.pre_conv, mixers.pre_conv, q)
    after = convolution_of(operation.post_conv, mixers.post_conv, q)
    memories = new_empty(q, 1 if before is after is None else 2, size).unbind()
    memories = memories[0], memories[-1]  # the same where nothing is convolved

    def run(part: slice, chunk: Chunk) -> None:
        scores, convolved = (chunk.buffer(x, q[part].shape[0], q.shape[1]) for x in memories)
        score_product(q[part], k[part], scores, chunk, operation.scale)
        if before is not None:
            before(scores, convolved, chunk)
            scores, convolved = convolved, scores
        mix_rows(scores, mixers.pre_mix, None if after else mixers.post_mix, logsumexp[part], chunk)
        if after is not None:
            after(scores, convolved, chunk)
            scores = convolved
            if mixers.post_mix is not None:
                mix_heads(scores, mixers.post_mix, chunk)
        row_product(scores, v[part], out[part], chunk)

    return run


def _mix(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, size: int, out: Tensor, logsumexp: Tensor,
    stored_rows: int,
) -> Run:  # fmt: skip
    """Mixed heads without convolutions: two kernels in CUDA C++, for chunks with so many rows of all heads.

    They store exponentials where the stages store scores. They round scores as `score_product` does; the backward
    recomputes probabilities from those by their logsumexp.
    """
    memory = empty(size, dtype=q.dtype, device=q.device)
    scales = empty(stored_rows, dtype=torch.float32, device=q.device)

    def run(part: slice, chunk: Chunk) -> None:
        of_q, rows = q[part], slice(chunk.first_row, chunk.first_row + chunk.rows)
        kept = chunk.buffer(memory, of_q.shape[0], q.shape[1])
        scale = scales[: math.prod(kept.shape[:3])].view(kept.shape[:3])
        keep_logits(
            of_q, k[part], mixers.pre_mix, kept, scale, logsumexp[part, :, rows], scale=operation.scale,
            first_row=chunk.first_row, keys=chunk.keys, causal=chunk.causal,
        )  # fmt: skip
        mix_values(
            kept, scale, mixers.post_mix, v[part], out[part, :, rows], first_position=chunk.first_position,
            keys=chunk.keys, causal=chunk.causal,
        )  # fmt: skip

    return run


def _meet(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, size: int, out: Tensor, logsumexp: Tensor
) -> Run:
    """Both mixings and a convolution of probabilities: kernels in CUDA C++ that mix heads, between the products.

    They pass over the scores twice and store exponentials of logits in between.
    """
    post_conv, pre_taps = operation.post_conv, mixers.pre_conv
    if pre_taps is None:  # the kernels always convolve
        pre_taps = q.new_ones(q.shape[1], 1, 1)
    if mixers.pre_mix is None or post_conv is None or mixers.post_conv is None or mixers.post_mix is None:
        raise ValueError("the kernels in which heads meet need taps before and after the softmax, and both mixings")
    # In the dtype that the kernels read: else each chunk would cast them.
    given = pre_taps, mixers.pre_mix, mixers.post_conv, mixers.post_mix
    pre_taps, pre_mix, post_taps, post_mix = (x.to(q.dtype).contiguous() for x in given)
    memories = empty(2, size, dtype=q.dtype, device=q.device)

    def run(part: slice, chunk: Chunk) -> None:
        scores, kept = (chunk.buffer(x, q[part].shape[0], q.shape[1]) for x in memories)
        score_product(q[part], k[part], scores, chunk, operation.scale)
        where = rows_of_chunk(chunk)
        factors = pre_heads(
            scores, pre_taps, operation.conv, pre_mix, kept, logsumexp[part], where, above=chunk.above,
            owned=chunk.owned,
        )  # fmt: skip
        post_heads(kept, factors, post_taps, post_conv, post_mix, scores, where)
        row_product(scores, v[part], out[part], chunk)

    return run
