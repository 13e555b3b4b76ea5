"""The backward: chunks of rows through the stages of the forward, and those of their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.conv_attention.triton.launch import call_signature
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton.chunks import chunk_rows, chunks, halo_rows
from mta_kernels.multi_token_attention.triton.products import (
    add_transposed_product,
    row_product,
    rows_of,
    score_product,
)
from mta_kernels.multi_token_attention.triton.rows_backward import MixingGradients, mix_rows_backward
from mta_kernels.operation import Operation

# Largest magnitudes of scaled float16 gradients: of the output, and of a product of one with a value, mixed.
LARGEST_GRADIENT, LARGEST_TERM = 1024.0, 16.0


def mixed_attention_backward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, logsumexp: Tensor, grad_out: Tensor, *,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Mixers]:  # fmt: skip
    """Gradients of q, k, v and the mixers, in their dtypes: an `MtaBackend.backward`."""
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.zeros(2, batch, kv_heads, key_rows, head_dim, dtype=torch.float32, device=q.device)
    loss_scale = gradient_scale(grad_out, v, mixers)
    if loss_scale is not None:
        grad_out = (grad_out * loss_scale).to(q.dtype)
    given, dtypes = mixers, (q.dtype, k.dtype, v.dtype)
    q, k, v, grad_out = (rows_of(x) for x in (q, k, v, grad_out))
    halo = halo_rows(operation)
    sequences, rows = chunk_rows(batch, heads, key_rows, q.element_size(), 2 * halo)
    signature = call_signature(q, k, v, grad_out, documents, options=operation)
    plan = chunks(operation, query_rows, key_rows, rows, documents, signature, above=halo, below=halo)
    size = max(chunk.rows * chunk.pitch for chunk in plan) * sequences * heads
    memories = torch.empty(2, size, dtype=q.dtype, device=q.device)
    mixings = MixingGradients(q, heads)
    for first in range(0, batch, sequences):
        part = slice(first, first + sequences)
        dk, dv = sums[:, part]
        for chunk in plan:
            scores, grad = (chunk.buffer(memory, q[part].shape[0], heads) for memory in memories)
            score_product(q[part], k[part], scores, chunk, operation.scale)
            score_product(grad_out[part], v[part], grad, chunk, 1.0)
            mix_rows_backward(scores, grad, mixers.pre_mix, mixers.post_mix, logsumexp[part], mixings, chunk=chunk)
            add_transposed_product(scores, grad_out[part], dv, chunk, 1.0, loss_scale)
            row_product(grad, k[part], dq[part], chunk, operation.scale, loss_scale)
            add_transposed_product(grad, q[part], dk, chunk, operation.scale, loss_scale)
    found = Mixers(
        None,
        None if mixers.pre_mix is None else mixings.dpre(),
        None,
        None if mixers.post_mix is None else mixings.dpost(),
    )
    gradients = Mixers(
        *(None if x is None else unscaled(x, loss_scale).to(y.dtype) for x, y in zip(found, given, strict=True))
    )
    dk, dv = sums
    return dq, dk.to(dtypes[1]), dv.to(dtypes[2]), gradients


def gradient_scale(grad_out: Tensor, v: Tensor, mixers: Mixers) -> Tensor | None:
    """A power of two `[1]` that keeps the gradients of scores within float16; None for other dtypes.

    One for all heads, which the mixings bring together.
    """
    if grad_out.dtype != torch.float16:
        return None
    largest, largest_value = (x.abs().amax().float().clamp_min(1e-10) for x in (grad_out, v))
    growth = torch.ones_like(largest)
    for mixer in mixers:  # by how much a step may enlarge what it is given
        if mixer is not None:
            parts = mixer.flatten(1) if mixer.dim() == 3 else mixer
            growth *= parts.float().abs().sum(1).amax().clamp_min(1.0)
    scale = (LARGEST_TERM / (largest * largest_value * growth)).minimum(LARGEST_GRADIENT / largest)
    return torch.exp2(torch.floor(torch.log2(scale)))[None]


def unscaled(x: Tensor, loss_scale: Tensor | None) -> Tensor:
    return x if loss_scale is None else x / loss_scale
