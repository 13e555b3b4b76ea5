"""Gradients through the causal band: the few scores next to the diagonal that are computed apart (see `prepare`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.backward_fold import WEIGHT_ROWS, _add_rows
from mta_kernels.conv_attention.triton.prepare import LN_2, LOG2_E, _load_rows, _near_scores_kernel, dot_precision


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
