"""Mixes heads of stored numbers where no softmax is between: after a convolution of the probabilities."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.launch import launch
from mta_kernels.conv_attention.triton.prepare import dot_precision
from mta_kernels.gpu_limits import sm_count
from mta_kernels.multi_token_attention.triton.chunks import Chunk, stored_end
from mta_kernels.multi_token_attention.triton.rows import (
    load_keys,
    load_mix,
    matrix_strides,
    mixed,
    row_signature,
    row_tile,
    store_keys,
)
from mta_kernels.multi_token_attention.triton.rows_backward import BACKWARD, MixingGradients, add_partial, row_unit

# Keys of a tile times heads, programs a multiprocessor, warps, stages of the pipeline.
HEADS_FORWARD = {"tile": 4096, "programs": 8, "num_warps": 4, "stages": 3}


@triton.jit(do_not_specialize=["rows", "first_position", "above", "owned", "total_rows"])
def _mix_heads_kernel(
    x_ptr, grad_ptr, mix_ptr, partial_ptr, loss_scale_ptr, stride_in, stride_out,
    heads, rows, pitch, first_position, above, owned, total_rows,
    GRADIENT: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, HEADS: tl.constexpr,
    C: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Mixes the heads of `x [B, H, rows, pitch]` in place, at all keys that are stored.

    With GRADIENT, grad, the gradient of the mixed x, becomes the gradient of x, and the owned rows add to the mixing's
    gradient, `[programs, HEADS, HEADS]` (out, in).
    """
    dtype = x_ptr.dtype.element_ty
    pitch = tl.multiple_of(pitch, 8)
    head = tl.arange(0, HEADS)
    mix = load_mix(mix_ptr, heads, stride_in, stride_out, HEADS).to(dtype)
    back = load_mix(mix_ptr, heads, stride_out, stride_in, HEADS).to(dtype)
    total = tl.zeros([HEADS, HEADS], tl.float32)
    for index in range(tl.program_id(0), total_rows, tl.num_programs(0)):
        batch = (index // rows).to(tl.int64)
        row = index % rows
        place = ((batch * heads + head[:, None]) * rows + row) * pitch  # [HEADS, 1]
        end = stored_end(row, first_position, pitch, CAUSAL, True)
        counted = (row >= above) & (row < above + owned)
        before = total
        if SCALED:
            total = tl.zeros([HEADS, HEADS], tl.float32)
        for first in tl.range(0, end, C, num_stages=STAGES):
            key = first + tl.arange(0, C)
            x = load_keys(x_ptr + place, key, 0, end, heads, HEADS)  # [HEADS, C]
            if GRADIENT:
                grad = load_keys(grad_ptr + place, key, 0, end, heads, HEADS)
                # No `if` around the product: Triton 3.6 would read x after a later tile's copy has overwritten it.
                own = tl.where(counted, grad, 0.0).to(dtype)
                total = tl.dot(own, tl.trans(x), total, input_precision=PRECISION)
                store_keys(grad_ptr + place, key, mixed(grad, back, True, PRECISION), 0, end, heads, HEADS)
            store_keys(x_ptr + place, key, mixed(x, mix, True, PRECISION), 0, end, heads, HEADS)
        if SCALED:
            unit = row_unit(loss_scale_ptr, batch, first_position + row, counted, SCALED, DOCUMENTS)
            total = before + total * unit
    if GRADIENT:
        add_partial(partial_ptr, total, HEADS)


def mix_heads(x: Tensor, post_mix: Tensor, chunk: Chunk) -> None:
    """Mix the heads of `x [B, H, rows, pitch]` of a chunk by `post_mix [H, H]` (in, out), in place."""
    programs = HEADS_FORWARD["programs"] * sm_count(x.device)
    _launch(x, x, post_mix, x, None, chunk, HEADS_FORWARD, programs, gradient=False)


def mix_heads_backward(
    x: Tensor, grad: Tensor, post_mix: Tensor, gradients: MixingGradients, chunk: Chunk, loss_scale: Tensor | None
) -> None:
    """`mix_heads`; and grad, the mixed x's gradient times `loss_scale`, becomes x's. Adds to `gradients`."""
    _launch(x, grad, post_mix, gradients.partial[1], loss_scale, chunk, BACKWARD, gradients.programs, gradient=True)


def _launch(
    x: Tensor, grad: Tensor, post_mix: Tensor, partial: Tensor, loss_scale: Tensor | None, chunk: Chunk,
    config: dict[str, int], programs: int, *, gradient: bool,
) -> None:  # fmt: skip
    batch, heads, rows, pitch = x.shape
    launch(
        _mix_heads_kernel, min(batch * rows, programs), row_signature(chunk, post_mix, loss_scale),
        x, grad, post_mix, partial, partial if loss_scale is None else loss_scale, *matrix_strides(post_mix),
        heads, rows, pitch, chunk.first_position, chunk.above, chunk.owned, batch * rows,
        GRADIENT=gradient, SCALED=loss_scale is not None, CAUSAL=chunk.causal,
        DOCUMENTS=chunk.documents is not None, **row_tile(heads, x.element_size(), config), STAGES=config["stages"],
        PRECISION=dot_precision(x.dtype), num_warps=config["num_warps"],
    )  # fmt: skip
