"""Launches backward.cu, whose blocks compute rows of a head, or products of what these left."""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import c_float, c_int, c_void_p

import torch
from torch import Tensor

from mta_kernels.allocation import new_empty
from mta_kernels.backend import Gradients
from mta_kernels.conv_attention.banded.backward_exact import ExactArguments
from mta_kernels.conv_attention.banded.backward_plan import ALIGNED, NORM_PARTS, ChunkPlan, Chunks
from mta_kernels.conv_attention.banded.structures import Inputs, Positions
from mta_kernels.conv_attention.cuda_sm80.backward_constants import BackwardConstants, constants_for
from mta_kernels.conv_attention.cuda_sm80.forward import in_reach
from mta_kernels.conv_attention.head_chunks import gradients_by_chunks
from mta_kernels.conv_attention.packing import document_factors, rows_that_see
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.gpu_limits import shared_memory_limit, sm_count
from mta_kernels.nvrtc.kernel import Kernel, kernel
from mta_kernels.nvrtc.structures import Rows, Weight, fields
from mta_kernels.operation import Operation


class Preparation(ctypes.Structure):
    """`struct Arguments` of prepare.cu."""

    _fields_ = (
        *fields(Rows, "v out grad_out"), *fields(c_void_p, "value_norms grad_norms delta counters"),
        *fields(c_int, "heads kv_heads batch query_rows key_rows counter_count"),
    )  # fmt: skip


class BackwardArguments(ctypes.Structure):
    """`struct Arguments` of backward_layout.cuh."""

    _fields_ = (
        ("at", Positions), ("inputs", Inputs), ("grad_out", Rows),
        *fields(c_void_p, "value_norms grad_norms logsumexp delta p ds ds_unit dk dv seen_by dq dweight"),
        *fields(c_float, "scale scale_log2"), *fields(c_int, "chunk_rows pitch"), ("chunks", Chunks),
    )  # fmt: skip


def conv_attention_backward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor, *, head_chunk: int = 0, spans: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of `conv_attention_forward` in q, k, v and weight, in their shapes and dtypes, or in `dtype`.

    The arguments are those of the forward, its results `out [B, Hq, M, D]` and `logsumexp [B, Hq, M]`, and
    `grad_out [B, Hq, M, D]`, the gradient of out, all of any strides. `head_chunk` query heads are worked on at a time,
    all if 0. The same from run to run. Scratch: p and ds of the chunks of rows under way, see `ChunkPlan`.
    """

    def some_heads(*tensors: Tensor) -> Gradients:
        return _gradients(operation, *tensors, spans=spans)

    tensors = q, k, v, weight, out, logsumexp, grad_out
    with on_device_of(q), without_autocast(q):
        return gradients_by_chunks(some_heads, *tensors, head_chunk=head_chunk, dtype=dtype)


def _gradients(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor, *, spans: Tensor | None,
) -> Gradients:  # fmt: skip
    """Dq in q's dtype, dk, dv and the weight's gradient in float32; logsumexp is contiguous."""
    q, k, v, out, grad_out = map(in_reach, (q, k, v, out, grad_out))
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    batch_heads, device = batch * heads, q.device
    constants = constants_for(
        q.dtype, head_dim, operation.conv, operation.causal, spans is not None, shared_memory_limit(device)
    )
    assert constants, "no_room is asked first"
    plan = _plan(constants, batch_heads, query_rows, key_rows, sm_count(device) * constants.tiles.blocks)
    taps = weight[0].numel()

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return new_empty(q, shape, dtype=dtype)

    dq = new_empty(q, q.shape)
    dk, dv = (numbers(batch, kv_heads, heads // kv_heads, key_rows, head_dim) for _ in range(2))
    dweight = numbers(batch, heads, plan.all_row_blocks, taps)
    chunk_rows = plan.row_blocks * constants.block_rows
    stored = numbers(2, plan.slots, chunk_rows, plan.pitch, dtype=q.dtype)
    value_norms, grad_norms = numbers(batch * kv_heads, NORM_PARTS), numbers(batch_heads, NORM_PARTS)
    delta, ds_unit = numbers(batch_heads, query_rows), numbers(batch_heads)
    counters = numbers(plan.counters, dtype=torch.int32)
    seen_by, factors = None, grad_norms
    if spans is not None:
        seen_by, factors = rows_that_see(spans, ALIGNED), document_factors(grad_out, v, spans)

    preparation = Preparation(
        Rows.of(v), Rows.of(out), Rows.of(grad_out), value_norms.data_ptr(), grad_norms.data_ptr(), delta.data_ptr(),
        counters.data_ptr(), heads, kv_heads, batch, query_rows, key_rows, len(counters),
    )  # fmt: skip
    chunks = plan.chunk_structure(batch_heads)
    chunks.scheduler = counters.data_ptr()
    at = Positions(None if spans is None else spans.data_ptr(), heads, heads // kv_heads, query_rows, key_rows)
    inputs = Inputs(Rows.of(q), Rows.of(k), Rows.of(v), Weight.of(weight), operation.scale)
    arguments = BackwardArguments(
        at, inputs, Rows.of(grad_out), value_norms.data_ptr(), factors.data_ptr(), logsumexp.data_ptr(),
        delta.data_ptr(), stored[0].data_ptr(), stored[1].data_ptr(), ds_unit.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        None if seen_by is None else seen_by.data_ptr(), dq.data_ptr(), dweight.data_ptr(),
        operation.scale, operation.scale * math.log2(math.e), chunk_rows, plan.pitch, chunks,
    )  # fmt: skip
    exact_arguments = ExactArguments(
        at, inputs, Rows.of(grad_out), logsumexp.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        dweight.data_ptr(), plan.all_row_blocks * taps, delta.data_ptr(),
    )  # fmt: skip
    jobs = max(batch_heads, batch * kv_heads), 2 * NORM_PARTS
    prepare, backward, exact = _kernels(constants, device.index)
    prepare.launch(jobs, preparation)
    backward.launch((plan.work_tiles, 1), arguments)
    exact.launch((batch_heads, 1), exact_arguments)
    dk, dv = (x.squeeze(2) if heads == kv_heads else x.sum(2) for x in (dk, dv))
    return dq, dk, dv, dweight.sum((0, 2)).view(weight.shape)


_plan = functools.lru_cache(256)(ChunkPlan.of)


@functools.cache
def _kernels(constants: BackwardConstants, device: int) -> tuple[Kernel, ...]:
    return tuple(kernel(x, device) for x in (constants.prepared, constants, constants.exact))
