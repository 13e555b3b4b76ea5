"""From gradients of the prepared inputs back to q, k and the weight.

`X'` is the prepared form of x (see `prepare`): either rows of x side by side, `X'[i, t] = x[i - above + t]`,
or with the taps folded in, `X'[i, t] = factor * sum_s weight[h, t, s] * x[i - above + s]`. The gradient of
`X' [B*Hq, N, T * pitch]` goes back to x by a sum over overlapping rows, and to the weight by a correlation.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.triton.launch import cdiv, launch, next_power_of_2
from mta_kernels.conv_attention.triton.prepare import _load_rows, dot_precision

# Rows that one program sums for the gradient of the weight.
WEIGHT_ROWS = 512
# Products of float32 inputs that are added one by one to a number of the weight's gradient. Rounding errors grow with
# the square root of how many. 16-bit inputs are rounded by more, so a program may add all of its rows.
FLOAT32_CHAIN = 256


@triton.jit
def _overlap_add_kernel(
    grad_ptr, out_ptr,
    group, first_row, rows, first_out, out_rows, seq_len, above, head_dim,
    TAPS: tl.constexpr, PITCH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`out[x] += sum_{heads of the group, t} grad[x + above - t, t]`, the gradient of overlapping rows.

    grad `[B*H*group, rows, TAPS, PITCH]` holds the rows from `first_row` on; out `[B*H, N, D]` float32: its rows
    from `first_out` on take part, those before `first_row` hold a sum already.
    """
    column_blocks = tl.cdiv(head_dim, BLOCK_D)
    row_blocks = tl.cdiv(out_rows, BLOCK_ROWS)
    dim = tl.program_id(0) % column_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    row = first_out + tl.program_id(0) // column_blocks % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    batch_head = (tl.program_id(0) // (column_blocks * row_blocks)).to(tl.int64)
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for head in tl.range(group):
        head_ptr = grad_ptr + (batch_head * group + head) * rows * TAPS * PITCH
        for tap in tl.static_range(TAPS):
            source = row + above - tap - first_row
            total += _load_rows(head_ptr + tap * PITCH, source, dim, TAPS * PITCH, 1, rows, head_dim)
    _add_rows(out_ptr, total, batch_head, row, dim, first_out + out_rows, first_row, seq_len, head_dim)


@triton.jit
def _expand_transposed_kernel(
    grad_ptr, weight_ptr, out_ptr, stride_wh, stride_wt, stride_ws,
    heads, group, first_row, rows, first_out, out_rows, seq_len, above, head_dim, factor,
    TAPS: tl.constexpr, SUMMED_TAPS: tl.constexpr, PITCH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SOURCE: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[x] += factor * sum_{heads of the group, t, s} weight[h, t, s] * grad[x + above - s, t]`.

    The same shapes as in `_overlap_add_kernel`; `heads` are grad's and weight's. On the tensor cores: for
    each tap the sum over s is a banded matrix `[rows, source rows]` times BLOCK_SOURCE rows of grad.
    """
    column_blocks = tl.cdiv(head_dim, BLOCK_D)
    row_blocks = tl.cdiv(out_rows, BLOCK_ROWS)
    dim = tl.program_id(0) % column_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    first = first_out + tl.program_id(0) // column_blocks % row_blocks * BLOCK_ROWS
    batch_head = (tl.program_id(0) // (column_blocks * row_blocks)).to(tl.int64)
    row = tl.arange(0, BLOCK_ROWS)
    source = tl.arange(0, BLOCK_SOURCE)
    summed = row[:, None] + (SUMMED_TAPS - 1) - source[None, :]  # [BLOCK_ROWS, BLOCK_SOURCE]
    band = (summed >= 0) & (summed < SUMMED_TAPS)
    source_row = first + above - (SUMMED_TAPS - 1) - first_row + source
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for member in tl.range(group):
        head = batch_head * group + member
        head_ptr = grad_ptr + head * rows * TAPS * PITCH
        for tap in tl.range(TAPS):
            weight = tl.load(
                weight_ptr
                + head % heads * stride_wh
                + tl.cast(tap, tl.int64) * stride_wt
                + summed.to(tl.int64) * stride_ws,
                mask=band,
                other=0.0,
            )
            grad = _load_rows(head_ptr + tap * PITCH, source_row, dim, TAPS * PITCH, 1, rows, head_dim)
            total = tl.dot(weight.to(tl.float32), grad, total, input_precision=PRECISION)
    end = first_out + out_rows
    _add_rows(out_ptr, total * factor, batch_head, first + row, dim, end, first_row, seq_len, head_dim)


@triton.jit
def _weight_gradient_kernel(
    grad_ptr, x_ptr, out_ptr,
    stride_xb, stride_xh, stride_xn, stride_xd,
    heads, group, first_row, rows, seq_len, above, head_dim, factor,
    TAPS: tl.constexpr, SUMMED_TAPS: tl.constexpr, PITCH: tl.constexpr, PROGRAM_ROWS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_SUMMED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SOURCE: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[t, s] = factor * sum_i grad[i, t] . x[i - above + s]` over PROGRAM_ROWS rows.

    grad `[B*Hq, rows, TAPS, PITCH]` holds the rows from `first_row` on, x `[B, H, N, D]` each head shared by
    `group`; out `[B*Hq, programs, TAPS, SUMMED_TAPS]`. BLOCK_ROWS rows of every tap times the rows of x around
    them. Every block adds to the same diagonals, so they are summed once, at the end.
    """
    programs = tl.cdiv(rows, PROGRAM_ROWS)
    batch_head = (tl.program_id(0) // programs).to(tl.int64)
    first = tl.program_id(0) % programs * PROGRAM_ROWS
    tap_row = tl.arange(0, BLOCK_TAPS * BLOCK_ROWS)
    tap = tap_row // BLOCK_ROWS
    row = tap_row % BLOCK_ROWS
    source = tl.arange(0, BLOCK_SOURCE)
    x_ptr += (batch_head // heads) * stride_xb + (batch_head % heads // group) * stride_xh
    grad_ptr += batch_head * rows * TAPS * PITCH
    products = tl.zeros([BLOCK_TAPS * BLOCK_ROWS, BLOCK_SOURCE], tl.float32)
    for start in tl.range(first, tl.minimum(first + PROGRAM_ROWS, rows), BLOCK_ROWS):
        # Rows of grad and taps lie one after the other: row i, tap t is row `i * TAPS + t`.
        grad_row = tl.where((tap < TAPS) & (start + row < rows), (start + row) * TAPS + tap, -1)
        x_row = first_row + start - above + source
        for column in tl.range(0, head_dim, BLOCK_D):
            dim = column + tl.arange(0, BLOCK_D)
            grad = _load_rows(grad_ptr, grad_row, dim, PITCH, 1, rows * TAPS, head_dim)
            x = _load_rows(x_ptr, x_row, dim, stride_xn, stride_xd, seq_len, head_dim).to(tl.float32)
            products = tl.dot(grad, x.T, products, input_precision=PRECISION)
    summed = tl.arange(0, BLOCK_SUMMED)
    # The diagonal of tap s starts s columns to the right: [BLOCK_TAPS * BLOCK_ROWS, BLOCK_SUMMED].
    column = tl.minimum(row[:, None] + summed[None, :], BLOCK_SOURCE - 1)
    diagonals = tl.gather(products, column, 1).reshape(BLOCK_TAPS, BLOCK_ROWS, BLOCK_SUMMED)
    tap = tl.arange(0, BLOCK_TAPS)
    out_ptr += (tl.program_id(0).to(tl.int64) * TAPS + tap[:, None]) * SUMMED_TAPS + summed[None, :]
    inside = (tap < TAPS)[:, None] & (summed < SUMMED_TAPS)[None, :]
    tl.store(out_ptr, tl.sum(diagonals, 1) * factor, mask=inside)


@triton.jit
def _add_rows(out_ptr, total, batch_head, row, dim, row_end, written, seq_len, head_dim):
    """`out[batch_head, row, dim] += total` before row_end, where rows from `written` on count as zero so far."""
    inside = ((row < row_end) & (row < seq_len))[:, None] & (dim < head_dim)[None, :]
    out_ptr += (batch_head * seq_len + row[:, None]) * head_dim + dim[None, :]
    total += tl.load(out_ptr, mask=inside & (row < written)[:, None], other=0.0)
    tl.store(out_ptr, total, mask=inside)


def add_overlapping(
    grad: Tensor, out: Tensor, signature: Hashable, *, taps: int, above: int, first_row: int = 0
) -> None:
    """Add the gradient of `overlapping_rows` to `out [B*H, N, D]` float32.

    `grad [B*Hq, rows, taps * pitch]` holds the rows from `first_row` on, in order of calls; heads are summed. Rows of
    out take part from `above` before the first of grad on.
    """
    heads, seq_len, head_dim = out.shape
    batch_heads, rows, depth = grad.shape
    first_out = max(0, first_row - above)
    out_rows = first_row + rows - first_out
    block_d = min(128, next_power_of_2(head_dim))
    launch(
        _overlap_add_kernel, cdiv(out_rows, 32) * heads * cdiv(head_dim, block_d), signature,
        grad, out, batch_heads // heads, first_row, rows, first_out, out_rows, seq_len, above, head_dim,
        TAPS=taps, PITCH=depth // taps, BLOCK_ROWS=32, BLOCK_D=block_d,
    )  # fmt: skip


def add_expanded(
    grad: Tensor, x: Tensor, weight: Tensor, out: Tensor, signature: Hashable, *,
    factor: float, above: int, first_row: int = 0,
) -> Tensor:  # fmt: skip
    """Add the gradient of `expand(x, weight, factor, above)` to `out [B*H, N, D]` float32.

    `grad` as in `add_overlapping`. Returns the gradient of `weight [Hq, taps, summed taps]`, float32.
    """
    batch, x_heads, seq_len, head_dim = x.shape
    heads, taps, summed_taps = weight.shape
    batch_heads, rows, depth = grad.shape
    first_out = max(0, first_row - above)
    out_rows = first_row + rows - first_out
    block_d = min(64, max(16, next_power_of_2(head_dim)))
    precision = dot_precision(x.dtype)
    launch(
        _expand_transposed_kernel, cdiv(out_rows, 32) * out.shape[0] * cdiv(head_dim, block_d), signature,
        grad, weight, out, *weight.stride(),
        heads, batch_heads // out.shape[0], first_row, rows, first_out, out_rows, seq_len, above, head_dim, factor,
        TAPS=taps, SUMMED_TAPS=summed_taps, PITCH=depth // taps, BLOCK_ROWS=32,
        BLOCK_SOURCE=next_power_of_2(32 + summed_taps - 1), BLOCK_D=block_d, PRECISION=precision,
    )  # fmt: skip
    program_rows = WEIGHT_ROWS if precision != "ieee" else 16 * max(1, FLOAT32_CHAIN // head_dim)
    programs = cdiv(rows, program_rows)
    block_taps, block_source = max(4, next_power_of_2(taps)), next_power_of_2(16 + summed_taps - 1)
    parts = empty(batch_heads, programs, taps, summed_taps, dtype=torch.float32, device=x.device)
    launch(
        _weight_gradient_kernel, programs * batch_heads, signature,
        grad, x, parts, *x.stride(),
        heads, heads // x_heads, first_row, rows, seq_len, above, head_dim, factor,
        TAPS=taps, SUMMED_TAPS=summed_taps, PITCH=depth // taps, PROGRAM_ROWS=program_rows,
        BLOCK_TAPS=block_taps, BLOCK_SUMMED=next_power_of_2(summed_taps), BLOCK_ROWS=16,
        BLOCK_SOURCE=block_source, BLOCK_D=32,
        PRECISION=precision, num_warps=8 if block_taps * block_source >= 1024 else 4,
    )  # fmt: skip
    return parts.unflatten(0, (batch, heads)).sum((0, 2))
