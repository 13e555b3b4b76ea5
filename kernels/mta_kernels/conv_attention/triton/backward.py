"""The backward: the gradients of the scores by chunks of query rows, then plain products with them.

With the prepared `c[i, j] = unit * Q'[i] . K'[j]`, `P = exp(c - logsumexp)`, `dP = dO V^T` and
`delta[i] = dO[i] . out[i]`, the scores have the gradient `dC = P * (dP - delta)`, and `dV = P^T dO`,
`dK' = dC^T Q'`, `dQ' = dC K'`. A chunk of P and dC is stored in the dtype of the inputs, so memory stays
proportional to the sequence; nothing is added atomically, so results are the same from run to run.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.backend import Gradients
from mta_kernels.conv_attention.head_chunks import gradients_by_chunks
from mta_kernels.conv_attention.packing import largest_of_documents
from mta_kernels.conv_attention.triton.backward_band import add_band
from mta_kernels.conv_attention.triton.backward_fold import add_expanded, add_overlapping
from mta_kernels.conv_attention.triton.backward_products import add_transposed_product, row_product
from mta_kernels.conv_attention.triton.backward_scores import (
    chunks,
    launch_probabilities,
    launch_value_gradients,
    loss_scale_of,
    probabilities_config,
    value_gradients_config,
)
from mta_kernels.conv_attention.triton.forward import value_block
from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, launch, next_power_of_2
from mta_kernels.conv_attention.triton.prepare import LN_2, LOG2_E, _load_rows, prepare, row_pitch
from mta_kernels.gpu_limits import compiled_capability, shared_memory_limit
from mta_kernels.operation import Operation

# Query rows whose P and dC are kept at a time; a multiple of ALIGNED.
CHUNK_ROWS = 2048
# Largest magnitudes of scaled float16 gradients (of the output, and of one product with a value): sums of 256
# of these stay below the largest float16.
LARGEST_GRADIENT, LARGEST_TERM = 1024.0, 16.0


@triton.jit
def _output_gradient_kernel(
    grad_ptr, out_ptr, loss_scale_ptr, rows_ptr, delta_ptr,
    stride_gb, stride_gh, stride_gn, stride_gd, stride_ob, stride_oh, stride_on, stride_od,
    heads, seq_len, head_dim,
    SPANS: tl.constexpr, PITCH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`rows[i] = loss_scale * grad[i]`, `[B*H, N, PITCH]` with zeros behind, and `delta[i] = rows[i] . out[i]`."""
    blocks = tl.cdiv(seq_len, BLOCK_ROWS)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_D)
    grad_ptr += (batch_head // heads) * stride_gb + (batch_head % heads) * stride_gh
    out_ptr += (batch_head // heads) * stride_ob + (batch_head % heads) * stride_oh
    grad = _load_rows(grad_ptr, row, dim, stride_gn, stride_gd, seq_len, head_dim)  # [BLOCK_ROWS, BLOCK_D]
    out = _load_rows(out_ptr, row, dim, stride_on, stride_od, seq_len, head_dim)  # [BLOCK_ROWS, BLOCK_D]
    grad = grad.to(tl.float32) * loss_scale_of(loss_scale_ptr, batch_head, row, seq_len, SPANS)
    rows = batch_head * seq_len + row
    inside = row < seq_len
    tl.store(delta_ptr + rows, tl.sum(grad * out.to(tl.float32), 1), mask=inside)
    rows_ptr += rows[:, None] * PITCH + dim[None, :]
    tl.store(rows_ptr, grad.to(rows_ptr.dtype.element_ty), mask=inside[:, None] & (dim < PITCH)[None, :])


def _gradients(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor, spans: Tensor | None,
) -> Gradients:  # fmt: skip
    """Gradients of some heads in float32; logsumexp is contiguous."""
    batch, heads, query_rows, head_dim = grad_out.shape
    kv_heads, key_rows = v.shape[1:3]
    query_taps, key_taps, pad = operation.conv.query_taps, operation.conv.key_taps, operation.conv.pad
    causal, factor = operation.causal, operation.scale * LOG2_E.value
    signature = call_signature(q, k, v, weight, grad_out, logsumexp, spans, options=(causal, pad))
    prepared = prepare(operation, q, k, v, weight, signature=signature)
    gpu: dict[str, int] = {"element_size": q.element_size(), "shared_memory": shared_memory_limit(q.device)}
    probabilities = probabilities_config(compute_capability=compiled_capability(q.device), **gpu)
    value_gradients = value_gradients_config(block_d=value_block(q), **gpu)
    loss_scale = gradient_scale(grad_out, v, spans)
    grad_rows, delta = output_gradient(grad_out, out, loss_scale)

    def sums(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.float32, device=q.device)

    dq, dk = sums(batch * heads, q.shape[2], head_dim), sums(batch * kv_heads, k.shape[2], head_dim)
    dv, dkeys = sums(batch * heads, key_rows, head_dim), sums(batch * heads, key_rows, prepared.queries.shape[2])
    dweight = torch.zeros(weight.shape, dtype=torch.float32, device=q.device)
    unit = 16 // q.element_size()
    scratch = empty(
        2, batch * heads, min(CHUNK_ROWS, query_rows), cdiv(key_rows, unit) * unit,
        dtype=q.dtype, device=q.device,
    )  # fmt: skip
    expanded_keys = query_taps <= key_taps
    query_units, key_units = (None, prepared.units) if expanded_keys else (prepared.units, None)
    for chunk in chunks(query_rows, key_rows, CHUNK_ROWS, causal, spans, signature):
        p, dc = scratch[:, :, : chunk.rows, : chunk.keys]
        launch_probabilities(prepared, logsumexp, p, chunk, probabilities)
        launch_value_gradients(p, dc, prepared.values, grad_rows, delta, loss_scale, dv, chunk, value_gradients)
        add_transposed_product(dc, prepared.queries, dkeys, loss_scale, query_units, chunk, factor=LN_2.value)
        dqueries = row_product(dc, prepared.keys, loss_scale, key_units, chunk, factor=LN_2.value)
        rows_of_q: dict[str, int] = {"above": query_taps - 1, "first_row": chunk.first_row}
        if expanded_keys:
            add_overlapping(dqueries, dq, chunk.signature, taps=query_taps, **rows_of_q)
        else:
            dweight += add_expanded(dqueries, q, weight.mT, dq, chunk.signature, factor=factor, **rows_of_q).mT
    if expanded_keys:
        dweight += add_expanded(dkeys, k, weight, dk, signature, factor=factor, above=pad)
    else:
        add_overlapping(dkeys, dk, signature, taps=key_taps, above=pad)
    if prepared.band_width:
        dweight += add_band(
            prepared.band, q, k, v, weight, grad_out, logsumexp, delta, loss_scale, dq, dk, dv, signature,
            factor=factor, pad=pad, width=prepared.band_width, spans=spans,
        )  # fmt: skip
    dv = dv.view(batch, kv_heads, heads // kv_heads, key_rows, head_dim)
    return dq.view(q.shape), dk.view(k.shape), dv.squeeze(2) if heads == kv_heads else dv.sum(2), dweight


conv_attention_backward = functools.partial(gradients_by_chunks, _gradients)


def output_gradient(grad_out: Tensor, out: Tensor, loss_scale: Tensor) -> tuple[Tensor, Tensor]:
    """`loss_scale * grad_out` as `[B*H, N, pitch]`, and its product with out, row by row, `[B*H, N]` float32.

    loss_scale as `gradient_scale` gives it.
    """
    batch, heads, seq_len, head_dim = grad_out.shape
    pitch = row_pitch(grad_out)
    rows = empty(batch * heads, seq_len, pitch, dtype=grad_out.dtype, device=grad_out.device)
    delta = empty(batch * heads, seq_len, dtype=torch.float32, device=grad_out.device)
    launch(
        _output_gradient_kernel, cdiv(seq_len, 32) * batch * heads, call_signature(grad_out, out),
        grad_out, out, loss_scale, rows, delta, *grad_out.stride(), *out.stride(), heads, seq_len, head_dim,
        SPANS=loss_scale.dim() == 2, PITCH=pitch, BLOCK_ROWS=32, BLOCK_D=next_power_of_2(pitch),
    )  # fmt: skip
    return rows, delta


def gradient_scale(grad_out: Tensor, v: Tensor, spans: Tensor | None) -> Tensor:
    """`[B*Hq]` powers of two that keep the gradients of a head's scores within float16; ones for other dtypes.

    With spans each document has one of its own, given for each row: `[Hq, M]`.
    """
    batch, heads, rows = grad_out.shape[:3]
    if grad_out.dtype != torch.float16:
        shape = (batch * heads,) if spans is None else (heads, rows)
        return torch.ones(shape, dtype=torch.float32, device=grad_out.device)
    if spans is None:
        maxima = [x.abs().amax((2, 3)).float() for x in (grad_out, v)]
    else:
        maxima = [largest_of_documents(x[0].abs().amax(2).float(), spans) for x in (grad_out, v)]
    largest, largest_value = (x.clamp_min(1e-10) for x in maxima)
    largest_value = largest_value.repeat_interleave(heads // v.shape[1], dim=0 if spans is not None else 1)
    scale = (LARGEST_TERM / (largest * largest_value)).minimum(LARGEST_GRADIENT / largest)
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    return scale.flatten() if spans is None else scale
