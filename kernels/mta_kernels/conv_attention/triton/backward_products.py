"""What the backward makes of the gradients of the scores: products over a chunk of rows, and their small sums.

`X'` is the prepared form of x (see `prepare`): either rows of x side by side, `X'[i, t] = x[i - above + t]`,
or with the taps folded in, `X'[i, t] = factor * sum_s weight[h, t, s] * x[i - above + s]`. The gradient of
`X' [B*Hq, N, T * pitch]` goes back to x by a sum over overlapping rows, and to the weight by a correlation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mta_kernels.conv_attention.triton.prepare import (
    _load_rows,
    _near_scores_kernel,
    dot_precision,
)

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
# Rows and keys below the diagonal's next multiple of ALIGNED are written in every scratch, with zeros at its end.
ALIGNED = 128
# Rows that one program sums for the gradient of the weight.
WEIGHT_ROWS = 512


@triton.jit
def describe_rows(
    x_ptr, stride_h, stride_n, rows, columns,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """A descriptor of `x [heads, rows, columns]` whose rows start at multiples of ALIGNMENT elements."""
    return tl.make_tensor_descriptor(
        x_ptr, shape=[tl.num_programs(0), rows, columns],
        strides=[tl.multiple_of(stride_h, ALIGNMENT), tl.multiple_of(stride_n, ALIGNMENT), 1],
        block_shape=[1, BLOCK_ROWS, BLOCK_COLUMNS],
    )  # fmt: skip


@triton.jit
def _transposed_product_kernel(
    left_desc, right_desc, out_ptr, loss_scale_ptr,
    stride_lh, stride_ln, stride_rh, stride_rn,
    seq_len, first_row, rows, keys, written, columns, factor,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[j] += factor * sum_i left[i, j] * right[first_row + i]`, for BLOCK_M keys j and BLOCK_N columns.

    left `[B*Hq, rows, keys]`, right `[B*Hq, N, columns]`, out `[B*Hq, N, columns]` float32, of which the first
    `written` rows hold a sum already.
    """
    if not HOST_DESCRIPTORS:
        left_desc = describe_rows(left_desc, stride_lh, stride_ln, rows, keys, BLOCK_K, BLOCK_M, ALIGNMENT)
        right_desc = describe_rows(right_desc, stride_rh, stride_rn, seq_len, columns, BLOCK_K, BLOCK_N, ALIGNMENT)
    column_blocks = tl.cdiv(columns, BLOCK_N)
    key_blocks = tl.cdiv(keys, BLOCK_M)
    # Neighbours share the tiles of left, the larger operand.
    first_column = tl.program_id(0) % column_blocks * BLOCK_N
    first_key = tl.program_id(0) // column_blocks % key_blocks * BLOCK_M
    batch_head = tl.program_id(0) // (column_blocks * key_blocks)
    start = 0
    if CAUSAL:
        start = tl.maximum(first_key - first_row, 0) // BLOCK_K * BLOCK_K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for row in tl.range(start, rows, BLOCK_K):
        left = left_desc.load([batch_head, row, first_key]).reshape(BLOCK_K, BLOCK_M)
        right = right_desc.load([batch_head, first_row + row, first_column]).reshape(BLOCK_K, BLOCK_N)
        total = tl.dot(left.T, right, total, input_precision=PRECISION)
    total *= factor / tl.load(loss_scale_ptr + batch_head)
    key = first_key + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    inside = (key < keys)[:, None] & (column < columns)[None, :]
    out_ptr += (batch_head.to(tl.int64) * seq_len + key[:, None]) * columns + column[None, :]
    total += tl.load(out_ptr, mask=inside & (key < written)[:, None], other=0.0)
    tl.store(out_ptr, total, mask=inside)


@triton.jit
def _row_product_kernel(
    left_desc, right_desc, out_ptr, loss_scale_ptr,
    stride_lh, stride_ln, stride_rh, stride_rn,
    right_group, seq_len, first_row, rows, keys, columns, factor,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[i] = factor * sum_j left[i, j] * right[j]`, for BLOCK_M rows i and BLOCK_N columns.

    left `[B*Hq, rows, keys]`, right `[B*H, N, columns]` each shared by `right_group` heads of left,
    out `[B*Hq, rows, columns]` float32.
    """
    if not HOST_DESCRIPTORS:
        left_desc = describe_rows(left_desc, stride_lh, stride_ln, rows, keys, BLOCK_M, BLOCK_K, ALIGNMENT)
        right_desc = describe_rows(right_desc, stride_rh, stride_rn, seq_len, columns, BLOCK_K, BLOCK_N, ALIGNMENT)
    column_blocks = tl.cdiv(columns, BLOCK_N)
    row_blocks = tl.cdiv(rows, BLOCK_M)
    first_column = tl.program_id(0) % column_blocks * BLOCK_N
    start = tl.program_id(0) // column_blocks % row_blocks * BLOCK_M
    batch_head = tl.program_id(0) // (column_blocks * row_blocks)
    right_head = batch_head // right_group
    end = keys
    if CAUSAL:
        end = tl.minimum(first_row + start + BLOCK_M, keys)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for key in tl.range(0, end, BLOCK_K):
        left = left_desc.load([batch_head, start, key]).reshape(BLOCK_M, BLOCK_K)
        right = right_desc.load([right_head, key, first_column]).reshape(BLOCK_K, BLOCK_N)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    total *= factor / tl.load(loss_scale_ptr + batch_head)
    row = start + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    out_ptr += (batch_head.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    tl.store(out_ptr, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


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
    row_blocks = tl.cdiv(out_rows, BLOCK_ROWS)
    batch_head = (tl.program_id(0) // row_blocks).to(tl.int64)
    row = first_out + tl.program_id(0) % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
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

    The same shapes as in `_overlap_add_kernel`; `heads` are those of grad and weight. On the tensor cores: for
    each tap the sum over s is a banded matrix `[rows, source rows]` times BLOCK_SOURCE rows of grad.
    """
    row_blocks = tl.cdiv(out_rows, BLOCK_ROWS)
    batch_head = (tl.program_id(0) // row_blocks).to(tl.int64)
    first = first_out + tl.program_id(0) % row_blocks * BLOCK_ROWS
    row = tl.arange(0, BLOCK_ROWS)
    source = tl.arange(0, BLOCK_SOURCE)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    summed = row[:, None] + (SUMMED_TAPS - 1) - source[None, :]  # [BLOCK_ROWS, BLOCK_SOURCE]
    band = (summed >= 0) & (summed < SUMMED_TAPS)
    source_row = first + above - (SUMMED_TAPS - 1) - first_row + source
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for member in tl.range(group):
        head = batch_head * group + member
        head_ptr = grad_ptr + head * rows * TAPS * PITCH
        for tap in tl.range(TAPS):
            weight = tl.load(
                weight_ptr + head % heads * stride_wh + tap * stride_wt + summed * stride_ws, mask=band, other=0.0
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
    them: every block adds to the same diagonals, so they are summed once, at the end.
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
def _band_gradients_kernel(
    grad_ptr, v_ptr, band_ptr, logsumexp_ptr, delta_ptr, loss_scale_ptr, p_ptr, band_grad_ptr,
    stride_gb, stride_gh, stride_gn, stride_gd, stride_vb, stride_vh, stride_vn, stride_vd,
    heads, group, seq_len, head_dim,
    BAND: tl.constexpr, PITCH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P and dC (in base-2 units) of query i and key `i - d` for `0 <= d < BAND`: `[B*Hq, N, PITCH]` both.

    grad `[B, Hq, N, D]`, v `[B, Hkv, N, D]`, band `[B*Hq, N, PITCH]`, logsumexp and delta `[B*Hq, N]`, delta
    multiplied by loss_scale `[B*Hq]`. A program multiplies BLOCK_Q rows of grad with the BLOCK_K values that end
    at the last of them, and keeps the diagonals next to the main one.
    """
    blocks = tl.cdiv(seq_len, BLOCK_Q)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    head = batch_head % heads
    first = tl.program_id(0) % blocks * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    key = first + BLOCK_Q - BLOCK_K + tl.arange(0, BLOCK_K)
    grad_ptr += (batch_head // heads) * stride_gb + head * stride_gh
    v_ptr += (batch_head // heads) * stride_vb + (head // group) * stride_vh
    dp = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in tl.range(0, head_dim, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        grad = _load_rows(grad_ptr, query, dim, stride_gn, stride_gd, seq_len, head_dim)  # [BLOCK_Q, BLOCK_D]
        v = _load_rows(v_ptr, key, dim, stride_vn, stride_vd, seq_len, head_dim)  # [BLOCK_K, BLOCK_D]
        dp = tl.dot(grad, v.T, dp, input_precision=PRECISION)
    back = query[:, None] - key[None, :]  # [BLOCK_Q, BLOCK_K]
    inside = query < seq_len
    in_band = (back >= 0) & (back < BAND) & (key >= 0)[None, :] & inside[:, None]
    row = batch_head * seq_len + query
    logsumexp = tl.load(logsumexp_ptr + row, mask=inside, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + row, mask=inside, other=0.0) / tl.load(loss_scale_ptr + batch_head)
    in_strip = row[:, None] * PITCH + back
    p = tl.exp2(tl.load(band_ptr + in_strip, mask=in_band, other=0.0) - logsumexp[:, None])
    tl.store(p_ptr + in_strip, p, mask=in_band)
    tl.store(band_grad_ptr + in_strip, p * (dp - delta[:, None]) * LN_2, mask=in_band)


@triton.jit
def _band_transposed_kernel(
    band_grad_ptr, weight_ptr, near_grad_ptr,
    stride_wh, stride_wa, stride_wb, heads, seq_len, pad,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, BAND: tl.constexpr,
    NEAR_PITCH: tl.constexpr, BAND_PITCH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`near_grad[x, e] = sum_{a, d} band_grad[x + (cq-1) - a, d] * weight[h, a, d - (cq-1-a) + pad - e]`.

    The gradient of `_band_kernel`: band_grad `[B*H, N, BAND_PITCH]`, near_grad `[B*H, N, NEAR_PITCH]`.
    """
    blocks = tl.cdiv(seq_len, BLOCK_Q)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    query = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    back = tl.arange(0, NEAR_PITCH)
    band_grad_ptr += batch_head * seq_len * BAND_PITCH
    weight_ptr += (batch_head % heads) * stride_wh
    total = tl.zeros([BLOCK_Q, NEAR_PITCH], tl.float32)
    for start in tl.range(0, QUERY_TAPS * BAND_PITCH, BLOCK_DEPTH):
        tap = (start + tl.arange(0, BLOCK_DEPTH)) // BAND_PITCH
        diagonal = (start + tl.arange(0, BLOCK_DEPTH)) % BAND_PITCH
        row = query[:, None] + (QUERY_TAPS - 1) - tap[None, :]  # [BLOCK_Q, BLOCK_DEPTH]
        # The others were never written: they count as zero.
        known = (row < seq_len) & (diagonal[None, :] <= row) & ((diagonal < BAND) & (tap < QUERY_TAPS))[None, :]
        grad = tl.load(band_grad_ptr + row.to(tl.int64) * BAND_PITCH + diagonal[None, :], mask=known, other=0.0)
        key_tap = (diagonal - (QUERY_TAPS - 1 - tap) + pad)[:, None] - back[None, :]
        weight = tl.load(
            weight_ptr + tap[:, None] * stride_wa + key_tap * stride_wb,
            mask=(key_tap >= 0) & (key_tap < KEY_TAPS) & (tap < QUERY_TAPS)[:, None],
            other=0.0,
        )  # [BLOCK_DEPTH, NEAR_PITCH]
        total = tl.dot(grad, weight.to(tl.float32), total, input_precision=PRECISION)
    near_grad_ptr += (batch_head * seq_len + query[:, None]) * NEAR_PITCH + back[None, :]
    tl.store(near_grad_ptr, total, mask=(query < seq_len)[:, None])


@triton.jit
def _near_transposed_kernel(
    near_grad_ptr, x_ptr, out_ptr,
    stride_xb, stride_xh, stride_xn, stride_xd,
    heads, group, x_group, seq_len, head_dim, factor,
    WIDTH: tl.constexpr, PITCH: tl.constexpr, TO_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SOURCE: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient of `near[x, e] = factor * q[x] . k[x - e]`, `near_grad [B*Hq, N, PITCH]`, to one of them.

    `out[x] += factor * sum_e near_grad[x, e] * k[x - e]`, or TO_KEYS
    `out[y] += factor * sum_{heads of the group, e} near_grad[y + e, e] * q[y + e]`; out `[B*H, N, D]` float32.
    x is k, each head shared by `x_group`, or q; `heads` are those of near_grad.
    """
    blocks = tl.cdiv(seq_len, BLOCK_ROWS)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK_ROWS
    row = first + tl.arange(0, BLOCK_ROWS)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for member in tl.range(group):
        head = batch_head * group + member
        grad_ptr = near_grad_ptr + (head * seq_len + first) * PITCH
        head_ptr = x_ptr + (head // heads) * stride_xb + (head % heads // x_group) * stride_xh
        for offset in tl.range(0, BLOCK_ROWS + WIDTH - 1, BLOCK_SOURCE):
            if TO_KEYS:
                source = first + offset + tl.arange(0, BLOCK_SOURCE)
                query = source[None, :]
                back = query - row[:, None]  # [BLOCK_ROWS, BLOCK_SOURCE]
            else:
                source = first + BLOCK_ROWS - BLOCK_SOURCE - offset + tl.arange(0, BLOCK_SOURCE)
                query = row[:, None]
                back = query - source[None, :]  # [BLOCK_ROWS, BLOCK_SOURCE]
            known = (back >= 0) & (back < WIDTH) & (query < seq_len) & (back <= query)
            grad = tl.load(grad_ptr + (query - first) * PITCH + back, mask=known, other=0.0)
            x = _load_rows(head_ptr, source, dim, stride_xn, stride_xd, seq_len, head_dim)  # [BLOCK_SOURCE, BLOCK_D]
            total = tl.dot(grad, x.to(tl.float32), total, input_precision=PRECISION)
    _add_rows(out_ptr, total * factor, batch_head, row, dim, seq_len, seq_len, seq_len, head_dim)


@triton.jit
def _band_weight_gradient_kernel(
    band_grad_ptr, near_ptr, out_ptr,
    seq_len, pad,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, WIDTH: tl.constexpr, BAND: tl.constexpr,
    NEAR_PITCH: tl.constexpr, BAND_PITCH: tl.constexpr, PROGRAM_ROWS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[a, b] = sum_{i, d} band_grad[i, d] * near[i - (cq-1) + a, d - (cq-1-a) + pad - b]` over PROGRAM_ROWS rows.

    One program a tap a; out `[B*H, programs, cq, ck]`. `products[d, e]` are summed over the rows first.
    """
    programs = tl.cdiv(seq_len, PROGRAM_ROWS)
    batch_head = (tl.program_id(0) // programs).to(tl.int64)
    first = tl.program_id(0) % programs * PROGRAM_ROWS
    tap = tl.program_id(1)
    band_grad_ptr += batch_head * seq_len * BAND_PITCH
    near_ptr += batch_head * seq_len * NEAR_PITCH
    diagonal = tl.arange(0, BAND_PITCH)
    back = tl.arange(0, NEAR_PITCH)
    products = tl.zeros([BAND_PITCH, NEAR_PITCH], tl.float32)
    for start in tl.range(first, tl.minimum(first + PROGRAM_ROWS, seq_len), BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        # Keys before the first one were never written, in either strip.
        known = (diagonal[None, :] <= row[:, None]) & (diagonal < BAND)[None, :] & (row < seq_len)[:, None]
        grad = tl.load(
            band_grad_ptr + row[:, None].to(tl.int64) * BAND_PITCH + diagonal[None, :], mask=known, other=0.0
        )  # [BLOCK_ROWS, BAND_PITCH]
        near_row = row - (QUERY_TAPS - 1) + tap
        known = (back[None, :] <= near_row[:, None]) & (back < WIDTH)[None, :] & (near_row < seq_len)[:, None]
        near = tl.load(
            near_ptr + near_row[:, None].to(tl.int64) * NEAR_PITCH + back[None, :], mask=known, other=0.0
        )  # [BLOCK_ROWS, NEAR_PITCH]
        products = tl.dot(grad.T, near, products, input_precision=PRECISION)
    key_tap = tl.arange(0, BLOCK_TAPS)
    back = (diagonal - (QUERY_TAPS - 1 - tap) + pad)[:, None] - key_tap[None, :]  # [BAND_PITCH, BLOCK_TAPS]
    known = (back >= 0) & (back < NEAR_PITCH)
    diagonals = tl.where(known, tl.gather(products, tl.where(known, back, 0), 1), 0.0)
    out_ptr += (tl.program_id(0).to(tl.int64) * QUERY_TAPS + tap) * KEY_TAPS + key_tap
    tl.store(out_ptr, tl.sum(diagonals, 0), mask=key_tap < KEY_TAPS)


@triton.jit
def _add_rows(out_ptr, total, batch_head, row, dim, row_end, written, seq_len, head_dim):
    """`out[batch_head, row, dim] += total` before row_end, where rows from `written` on count as zero so far."""
    inside = ((row < row_end) & (row < seq_len))[:, None] & (dim < head_dim)[None, :]
    out_ptr += (batch_head * seq_len + row[:, None]) * head_dim + dim[None, :]
    total += tl.load(out_ptr, mask=inside & (row < written)[:, None], other=0.0)
    tl.store(out_ptr, total, mask=inside)


def add_transposed_product(
    left: Tensor, right: Tensor, out: Tensor, loss_scale: Tensor, *,
    factor: float, first_row: int, causal: bool, host_descriptors: bool,
) -> None:  # fmt: skip
    """`out[j] += factor / loss_scale * sum_i left[i, j] * right[first_row + i]`.

    left `[B*Hq, rows, keys]`, right `[B*Hq, N, columns]`, out `[B*Hq, N, columns]` float32; what out holds is
    counted where the rows before `first_row` wrote it.
    """
    batch_heads, rows, keys = left.shape
    columns = out.shape[2]
    block_m, block_n, block_k, options = product_blocks(left, columns)
    grid = (triton.cdiv(columns, block_n) * triton.cdiv(keys, block_m) * batch_heads,)
    _transposed_product_kernel[grid](
        operand(left, [1, block_k, block_m], host_descriptors),
        operand(right, [1, block_k, block_n], host_descriptors), out, loss_scale,
        *left.stride()[:2], *right.stride()[:2],
        out.shape[1], first_row, rows, keys, first_row if causal or first_row == 0 else keys, columns, factor,
        HOST_DESCRIPTORS=host_descriptors, CAUSAL=causal, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        ALIGNMENT=16 // left.element_size(), PRECISION=dot_precision(left.dtype), **options,
    )  # fmt: skip


def row_product(
    left: Tensor, right: Tensor, loss_scale: Tensor, *,
    factor: float, first_row: int, causal: bool, host_descriptors: bool,
) -> Tensor:  # fmt: skip
    """`factor / loss_scale * sum_j left[i, j] * right[j]`: `[B*Hq, rows, columns]` float32.

    left `[B*Hq, rows, keys]` starts at query `first_row`; right `[B*H, N, columns]`, where H divides Hq.
    """
    batch_heads, rows, keys = left.shape
    columns = right.shape[2]
    block_m, block_n, block_k, options = product_blocks(left, columns)
    out = torch.empty(batch_heads, rows, columns, dtype=torch.float32, device=left.device)
    _row_product_kernel[(triton.cdiv(columns, block_n) * triton.cdiv(rows, block_m) * batch_heads,)](
        operand(left, [1, block_m, block_k], host_descriptors),
        operand(right, [1, block_k, block_n], host_descriptors), out, loss_scale,
        *left.stride()[:2], *right.stride()[:2],
        batch_heads // right.shape[0], right.shape[1], first_row, rows, keys, columns, factor,
        HOST_DESCRIPTORS=host_descriptors, CAUSAL=causal, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        ALIGNMENT=16 // left.element_size(), PRECISION=dot_precision(left.dtype), **options,
    )  # fmt: skip
    return out


def product_blocks(left: Tensor, columns: int) -> tuple[int, int, int, dict[str, int]]:
    """Rows, columns and depth of a tile of the products, and launch options. All of them divide ALIGNED."""
    if left.element_size() == 4:
        return 64, 64, 32, {"num_warps": 4, "num_stages": 2}
    return 128, 64 if columns <= 64 else 128, 64, {"num_warps": 8, "num_stages": 3}


def operand(x: Tensor, block: list[int], host_descriptors: bool) -> Tensor | TensorDescriptor:
    """x as a kernel takes it: a descriptor for the copy engine, or the tensor where a GPU has none."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block) if host_descriptors else x


def add_overlapping(grad: Tensor, out: Tensor, *, taps: int, above: int, first_row: int = 0) -> None:
    """Add the gradient of `overlapping_rows` to `out [B*H, N, D]` float32.

    `grad [B*Hq, rows, taps * pitch]` holds the rows from `first_row` on, in order of calls; heads are summed.
    """
    heads, seq_len, head_dim = out.shape
    batch_heads, rows, depth = grad.shape
    first_out = max(0, first_row - above)
    out_rows = first_row + rows - first_out
    block_d = min(128, triton.next_power_of_2(head_dim))
    _overlap_add_kernel[(triton.cdiv(out_rows, 32) * heads, triton.cdiv(head_dim, block_d))](
        grad, out, batch_heads // heads, first_row, rows, first_out, out_rows, seq_len, above, head_dim,
        TAPS=taps, PITCH=depth // taps, BLOCK_ROWS=32, BLOCK_D=block_d,
    )  # fmt: skip


def add_expanded(
    grad: Tensor, x: Tensor, weight: Tensor, out: Tensor, *, factor: float, above: int, first_row: int = 0
) -> Tensor:
    """Add the gradient of `expand(x, weight, factor, above)` to `out [B*H, N, D]` float32.

    `grad` as in `add_overlapping`. Returns the gradient of `weight [Hq, taps, summed taps]`, float32.
    """
    batch, x_heads, seq_len, head_dim = x.shape
    heads, taps, summed_taps = weight.shape
    batch_heads, rows, depth = grad.shape
    first_out = max(0, first_row - above)
    out_rows = first_row + rows - first_out
    block_d = min(64, max(16, triton.next_power_of_2(head_dim)))
    precision = dot_precision(x.dtype)
    _expand_transposed_kernel[(triton.cdiv(out_rows, 32) * out.shape[0], triton.cdiv(head_dim, block_d))](
        grad, weight, out, *weight.stride(),
        heads, batch_heads // out.shape[0], first_row, rows, first_out, out_rows, seq_len, above, head_dim, factor,
        TAPS=taps, SUMMED_TAPS=summed_taps, PITCH=depth // taps, BLOCK_ROWS=32,
        BLOCK_SOURCE=triton.next_power_of_2(32 + summed_taps - 1), BLOCK_D=block_d, PRECISION=precision,
    )  # fmt: skip
    programs = triton.cdiv(rows, WEIGHT_ROWS)
    block_taps, block_source = max(4, triton.next_power_of_2(taps)), triton.next_power_of_2(16 + summed_taps - 1)
    parts = torch.empty(batch_heads, programs, taps, summed_taps, dtype=torch.float32, device=x.device)
    _weight_gradient_kernel[(programs * batch_heads,)](
        grad, x, parts, *x.stride(),
        heads, heads // x_heads, first_row, rows, seq_len, above, head_dim, factor,
        TAPS=taps, SUMMED_TAPS=summed_taps, PITCH=depth // taps, PROGRAM_ROWS=WEIGHT_ROWS,
        BLOCK_TAPS=block_taps, BLOCK_SUMMED=triton.next_power_of_2(summed_taps), BLOCK_ROWS=16,
        BLOCK_SOURCE=block_source, BLOCK_D=32,
        PRECISION=precision, num_warps=8 if block_taps * block_source >= 1024 else 4,
    )  # fmt: skip
    return parts.unflatten(0, (batch, heads)).sum((0, 2))


def add_band(
    band: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, grad_out: Tensor,
    logsumexp: Tensor, delta: Tensor, loss_scale: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *,
    factor: float, pad: int, width: int,
) -> Tensor:  # fmt: skip
    """Add what the scores of `causal_band` contribute to the gradients; returns that of the weight, float32.

    `band [B*Hq, N, pitch]` float32, of which the first `width` columns count, up to the first key;
    `dq, dv [B*Hq, N, D]` and `dk [B*Hkv, N, D]` float32.
    """
    batch, heads, seq_len, head_dim = q.shape
    query_taps, key_taps = weight.shape[1:]
    near_width = query_taps + key_taps - 2
    near_pitch, band_pitch = max(16, triton.next_power_of_2(near_width)), band.shape[2]
    group, precision = heads // k.shape[1], dot_precision(q.dtype)

    def strip(pitch: int) -> Tensor:
        return torch.empty(batch * heads, seq_len, pitch, dtype=torch.float32, device=q.device)

    def strip_blocks(width: int) -> dict[str, int]:
        block_q = max(16, triton.next_power_of_2(width - 1))  # the keys reach back width - 1
        sizes = {"BLOCK_D": 32 if q.element_size() == 4 else 64, "BLOCK_Q": block_q, "BLOCK_K": 2 * block_q}
        return sizes | {"num_warps": block_q // 8}

    p, band_grad, near, near_grad = strip(band_pitch), strip(band_pitch), strip(near_pitch), strip(near_pitch)
    blocks = strip_blocks(width)
    _band_gradients_kernel[(triton.cdiv(seq_len, blocks["BLOCK_Q"]) * batch * heads,)](
        grad_out, v, band, logsumexp, delta, loss_scale, p, band_grad, *grad_out.stride(), *v.stride(),
        heads, group, seq_len, head_dim, BAND=width, PITCH=band_pitch, PRECISION=precision, **blocks,
    )  # fmt: skip
    blocks = strip_blocks(near_width)
    _near_scores_kernel[(triton.cdiv(seq_len, blocks["BLOCK_Q"]) * batch * heads,)](
        q, k, near, *q.stride(), *k.stride(), heads, group, seq_len, head_dim, factor,
        WIDTH=near_width, PITCH=near_pitch, PRECISION=precision, **blocks,
    )  # fmt: skip
    taps: dict[str, Any] = {"QUERY_TAPS": query_taps, "KEY_TAPS": key_taps, "BAND": width}
    taps |= {"NEAR_PITCH": near_pitch, "BAND_PITCH": band_pitch, "PRECISION": precision}
    _band_transposed_kernel[(triton.cdiv(seq_len, 64) * batch * heads,)](
        band_grad, weight, near_grad, *weight.stride(), heads, seq_len, pad,
        BLOCK_Q=64, BLOCK_DEPTH=min(64, triton.next_power_of_2(query_taps * band_pitch)), **taps,
    )  # fmt: skip
    add_strip_products(near_grad, k, dq, factor=factor, width=near_width, to_keys=False)
    add_strip_products(near_grad, q, dk, factor=factor, width=near_width, to_keys=True)
    add_strip_products(p, grad_out, dv, factor=1.0, width=width, to_keys=True)
    programs = triton.cdiv(seq_len, WEIGHT_ROWS)
    parts = torch.empty(batch * heads, programs, query_taps, key_taps, dtype=torch.float32, device=q.device)
    _band_weight_gradient_kernel[(programs * batch * heads, query_taps)](
        band_grad, near, parts, seq_len, pad, WIDTH=near_width, PROGRAM_ROWS=WEIGHT_ROWS,
        BLOCK_TAPS=triton.next_power_of_2(key_taps), BLOCK_ROWS=32, **taps,
    )  # fmt: skip
    return parts.unflatten(0, (batch, heads)).sum((0, 2))


def add_strip_products(strip: Tensor, x: Tensor, out: Tensor, *, factor: float, width: int, to_keys: bool) -> None:
    """`out[i] += factor * sum_e strip[i, e] * x[i - e]`; to_keys, the sum of `strip[i + e, e] * x[i + e]`.

    `strip [B*Hq, N, pitch]` float32, of which the first `width` columns count, up to the first key;
    `x [B, H, N, D]`, `out [B*H, N, D]` float32, where the heads of strip are summed if there are more.
    """
    batch, x_heads, seq_len, head_dim = x.shape
    heads = strip.shape[0] // batch
    block_d = min(64, max(16, triton.next_power_of_2(head_dim)))
    _near_transposed_kernel[(triton.cdiv(seq_len, 32) * out.shape[0], triton.cdiv(head_dim, block_d))](
        strip, x, out, *x.stride(),
        heads, strip.shape[0] // out.shape[0], heads // x_heads, seq_len, head_dim, factor,
        WIDTH=width, PITCH=strip.shape[2], TO_KEYS=to_keys, BLOCK_ROWS=32,
        BLOCK_SOURCE=32, BLOCK_D=block_d, PRECISION=dot_precision(x.dtype),
    )  # fmt: skip
