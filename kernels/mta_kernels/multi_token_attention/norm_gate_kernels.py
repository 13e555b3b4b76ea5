"""Triton kernels of the normalisation and the gate after the output, forward and backward, a block of rows at a time.

`n = x / rms(x)`, `o = n * weight * factor` rounded to x's dtype, `y = o * sigmoid(z)`, and z is `o . gate + bias` (a
number a row) or `gate o + bias` (a number a dim). x is `[B, H, M, D]` of any strides; row r is (b, h, m), m fastest.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _norm_gate_kernel(
    x_ptr, weight_ptr, gate_ptr, bias_ptr, out_ptr,
    stride_xb, stride_xh, stride_xm, stride_xd, stride_ob, stride_oh, stride_om, stride_od,
    stride_w, stride_ge, stride_gd, stride_bias, heads, length, rows, eps, factor,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of BLOCK_ROWS rows. GATE is 0 without a gate, 1 for a number a row, 2 for a number a dim."""
    row, inside = _rows(BLOCK_ROWS, rows)
    dim = tl.arange(0, BLOCK_D)
    x_row = _row_offsets(row, heads, length, stride_xb, stride_xh, stride_xm)
    x = _load(x_ptr, x_row, inside, dim, stride_xd, HEAD_DIM).to(tl.float32)
    inverse = _inverse_rms(x, eps, HEAD_DIM, NORM)
    o = _normed(x, inverse, weight_ptr, dim, stride_w, factor, HEAD_DIM, NORM, x_ptr.dtype.element_ty)
    if GATE == 1:
        z = _gate_of_row(o, gate_ptr, bias_ptr, dim, stride_gd, HEAD_DIM, BIAS, x_ptr.dtype.element_ty)
        o = o * tl.sigmoid(z)[:, None]
    if GATE == 2:
        z = _gate_of_dims(
            x_ptr, x_row, inside, inverse, weight_ptr, gate_ptr, bias_ptr, stride_xd, stride_w, stride_ge, stride_gd,
            stride_bias, factor, HEAD_DIM, NORM, BIAS, BLOCK_D, BLOCK_K, PRECISION,
        )  # fmt: skip
        o = o * tl.sigmoid(z)
    out_row = _row_offsets(row, heads, length, stride_ob, stride_oh, stride_om)
    _store(out_ptr, out_row, inside, dim, stride_od, o, HEAD_DIM)


@triton.jit
def _norm_gate_backward_kernel(
    x_ptr, grad_ptr, weight_ptr, gate_ptr, bias_ptr, dx_ptr, partial_ptr,
    stride_xb, stride_xh, stride_xm, stride_xd, stride_gb, stride_gh, stride_gm, stride_gd,
    stride_db, stride_dh, stride_dm, stride_dd, stride_w, stride_gate, heads, length, rows, eps, factor,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and this program's sums of the weights' gradients: partial `[3, BLOCK_D, programs]`, float32.

    They are of the norm's weight, of the gate, and, in the first number of the third row, of its bias. GATE is 0 or 1.
    """
    dim = tl.arange(0, BLOCK_D)
    # Sums stay per row of a block, and rows are summed once at the end, because that synchronises the warps.
    d_weight = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    d_gate = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    d_bias = tl.zeros([BLOCK_ROWS], tl.float32)
    step = tl.num_programs(0) * BLOCK_ROWS
    for first in tl.range(tl.program_id(0) * BLOCK_ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside = row < rows
        x_row = _row_offsets(row, heads, length, stride_xb, stride_xh, stride_xm)
        grad_row = _row_offsets(row, heads, length, stride_gb, stride_gh, stride_gm)
        x = _load(x_ptr, x_row, inside, dim, stride_xd, HEAD_DIM).to(tl.float32)
        grad = _load(grad_ptr, grad_row, inside, dim, stride_gd, HEAD_DIM).to(tl.float32)
        # Rows past the end: without an eps they would be zero over zero, and make the sums over rows NaN.
        inverse = tl.where(inside, _inverse_rms(x, eps, HEAD_DIM, NORM), 0.0)
        d_o = grad
        if GATE == 1:
            o = _normed(x, inverse, weight_ptr, dim, stride_w, factor, HEAD_DIM, NORM, x_ptr.dtype.element_ty)
            z = _gate_of_row(o, gate_ptr, bias_ptr, dim, stride_gate, HEAD_DIM, BIAS, x_ptr.dtype.element_ty)
            opened = tl.sigmoid(z)
            d_z = tl.sum(grad * o, 1) * opened * tl.sigmoid(-z)  # zero in rows past the end
            gate = _vector(gate_ptr, dim, stride_gate, HEAD_DIM).to(x_ptr.dtype.element_ty).to(tl.float32)
            d_o = grad * opened[:, None] + d_z[:, None] * gate[None, :]
            d_gate += d_z[:, None] * o
            d_bias += d_z
        if NORM:
            normed = x * inverse[:, None]
            scaled = d_o * factor
            d_weight += scaled * normed
            d_normed = scaled * _vector(weight_ptr, dim, stride_w, HEAD_DIM)[None, :]
            along = tl.sum(d_normed * normed, 1) / HEAD_DIM
            d_o = (d_normed - normed * along[:, None]) * inverse[:, None]
        dx_row = _row_offsets(row, heads, length, stride_db, stride_dh, stride_dm)
        _store(dx_ptr, dx_row, inside, dim, stride_dd, d_o, HEAD_DIM)
    programs = tl.num_programs(0)
    place = partial_ptr + tl.program_id(0) + dim * programs
    tl.store(place, tl.sum(d_weight, 0))
    tl.store(place + BLOCK_D * programs, tl.sum(d_gate, 0))
    tl.store(place + 2 * BLOCK_D * programs, tl.where(dim == 0, tl.sum(d_bias, 0), 0.0))


@triton.jit
def _gate_of_dims_backward_kernel(
    x_ptr, grad_ptr, weight_ptr, gate_ptr, bias_ptr, o_ptr, dz_ptr, direct_ptr,
    stride_xb, stride_xh, stride_xm, stride_xd, stride_gb, stride_gh, stride_gm, stride_grad,
    stride_w, stride_ge, stride_gd, stride_bias, heads, length, rows, eps, factor,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The operands of the products of a gate a dim, `[rows, D]` contiguous in x's dtype.

    These are o, dz, and `grad * sigmoid(z)`, the part of o's gradient that bypasses the gate.
    """
    row, inside = _rows(BLOCK_ROWS, rows)
    dim = tl.arange(0, BLOCK_D)
    x_row = _row_offsets(row, heads, length, stride_xb, stride_xh, stride_xm)
    x = _load(x_ptr, x_row, inside, dim, stride_xd, HEAD_DIM).to(tl.float32)
    grad_row = _row_offsets(row, heads, length, stride_gb, stride_gh, stride_gm)
    grad = _load(grad_ptr, grad_row, inside, dim, stride_grad, HEAD_DIM).to(tl.float32)
    inverse = _inverse_rms(x, eps, HEAD_DIM, NORM)
    o = _normed(x, inverse, weight_ptr, dim, stride_w, factor, HEAD_DIM, NORM, x_ptr.dtype.element_ty)
    z = _gate_of_dims(
        x_ptr, x_row, inside, inverse, weight_ptr, gate_ptr, bias_ptr, stride_xd, stride_w, stride_ge, stride_gd,
        stride_bias, factor, HEAD_DIM, NORM, BIAS, BLOCK_D, BLOCK_K, PRECISION,
    )  # fmt: skip
    opened = tl.sigmoid(z)
    place = row.to(tl.int64) * HEAD_DIM
    _store(o_ptr, place, inside, dim, 1, o, HEAD_DIM)
    # The derivative has the closed part as sigmoid(-z): 1 - sigmoid(z) keeps no digits where a gate is all but open.
    _store(dz_ptr, place, inside, dim, 1, grad * o * opened * tl.sigmoid(-z), HEAD_DIM)
    _store(direct_ptr, place, inside, dim, 1, grad * opened, HEAD_DIM)


@triton.jit
def _rows(BLOCK_ROWS: tl.constexpr, rows):
    """The rows of this program, and which of them exist."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, row < rows


@triton.jit
def _row_offsets(row, heads, length, stride_b, stride_h, stride_m):
    """The offset of each row of a `[B, H, M, D]` tensor, in elements."""
    batch_head = row // length
    offsets = (batch_head // heads).to(tl.int64) * stride_b + (batch_head % heads).to(tl.int64) * stride_h
    return offsets + (row % length).to(tl.int64) * stride_m


@triton.jit
def _load(x_ptr, row, inside, dim, stride_d, HEAD_DIM: tl.constexpr):
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(x_ptr + row[:, None] + dim[None, :].to(tl.int64) * stride_d, mask=mask, other=0.0)


@triton.jit
def _store(x_ptr, row, inside, dim, stride_d, x, HEAD_DIM: tl.constexpr):
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(x_ptr + row[:, None] + dim[None, :].to(tl.int64) * stride_d, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _vector(x_ptr, dim, stride, HEAD_DIM: tl.constexpr):
    """A number a dim, float32, zero past the head dim."""
    return tl.load(x_ptr + dim.to(tl.int64) * stride, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)


@triton.jit
def _inverse_rms(x, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """`1 / sqrt(mean(x^2) + eps)` of each row; 1 without a norm."""
    inverse = tl.full([x.shape[0]], 1.0, tl.float32)
    if NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
    return inverse


@triton.jit
def _normed(x, inverse, weight_ptr, dim, stride_w, factor, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, DTYPE):
    """o in float32, rounded to DTYPE as the original is."""
    if NORM:
        weight = _vector(weight_ptr, dim, stride_w, HEAD_DIM) * factor
        x = (x * inverse[:, None] * weight[None, :]).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _gate_of_row(o, gate_ptr, bias_ptr, dim, stride_gd, HEAD_DIM: tl.constexpr, BIAS: tl.constexpr, DTYPE):
    """z of each row, with the linear layer's parameters rounded to DTYPE."""
    gate = _vector(gate_ptr, dim, stride_gd, HEAD_DIM).to(DTYPE).to(tl.float32)
    z = tl.sum(o * gate[None, :], 1)
    if BIAS:
        z += tl.load(bias_ptr).to(DTYPE).to(tl.float32)
    return z


@triton.jit
def _gate_of_dims(
    x_ptr, x_row, inside, inverse, weight_ptr, gate_ptr, bias_ptr, stride_xd, stride_w, stride_ge, stride_gd,
    stride_bias, factor, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z `[rows, BLOCK_D]`: o, recomputed BLOCK_K dims at a time, times the gate."""
    out_dim = tl.arange(0, BLOCK_D)
    z = tl.zeros([x_row.shape[0], BLOCK_D], tl.float32)
    for first in tl.range(0, HEAD_DIM, BLOCK_K):
        dim = first + tl.arange(0, BLOCK_K)
        x = _load(x_ptr, x_row, inside, dim, stride_xd, HEAD_DIM)
        o = _normed(x.to(tl.float32), inverse, weight_ptr, dim, stride_w, factor, HEAD_DIM, NORM, x.dtype)
        gate = tl.load(
            gate_ptr + out_dim[None, :].to(tl.int64) * stride_ge + dim[:, None].to(tl.int64) * stride_gd,
            mask=(out_dim < HEAD_DIM)[None, :] & (dim < HEAD_DIM)[:, None],
            other=0.0,
        )
        z = tl.dot(o.to(x.dtype), gate.to(x.dtype), z, input_precision=PRECISION)
    if BIAS:
        z += _vector(bias_ptr, out_dim, stride_bias, HEAD_DIM).to(x_ptr.dtype.element_ty).to(tl.float32)[None, :]
    return z
