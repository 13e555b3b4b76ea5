"""The forward: chunks of rows through the stages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mta_kernels.allocation import new_empty
from mta_kernels.conv_attention.triton.launch import call_signature
from mta_kernels.gpu_limits import has_large_memory
from mta_kernels.multi_token_attention import stages
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton import heads_stage, mix_stage
from mta_kernels.multi_token_attention.triton.band_stage import convolution_of
from mta_kernels.multi_token_attention.triton.chunks import chunks
from mta_kernels.multi_token_attention.triton.heads import mix_heads
from mta_kernels.multi_token_attention.triton.products import row_product, rows_of, score_product
from mta_kernels.multi_token_attention.triton.row_stage import mix_rows
from mta_kernels.operation import Operation
from mta_kernels.score_chunks import chunk_rows, halo_rows


def mixed_attention_forward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, *, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out `[B, Hq, M, D]` in q's dtype and the logsumexp `[B, Hq, M]` float32: an `Backend.forward`."""
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
    given = operation, q, k, v, mixers, plan, sequences, size, out, logsumexp
    if path != "stages":
        {"mix": mix_stage, "heads": heads_stage}[path].run_chunks(*given)
        return out, logsumexp
    before = convolution_of(operation.pre_conv, mixers.pre_conv, q)
    after = convolution_of(operation.post_conv, mixers.post_conv, q)
    memories = new_empty(q, 1 if before is after is None else 2, size).unbind()
    memories = memories[0], memories[-1]  # the same where nothing is convolved
    for first in range(0, batch, sequences):
        part = slice(first, first + sequences)
        for chunk in plan:
            scores, convolved = (chunk.buffer(x, q[part].shape[0], heads) for x in memories)
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
    return out, logsumexp
