"""Gradients through the causal band: the few scores next to the diagonal that are computed apart (see `prepare`)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.triton.backward_fold import WEIGHT_ROWS, _add_rows
from mta_kernels.conv_attention.triton.backward_scores import _probability
from mta_kernels.conv_attention.triton.launch import cdiv, launch, next_power_of_2
from mta_kernels.conv_attention.triton.prepare import LN_2, LOG2_E, _load_rows, _near_scores_kernel, dot_precision


@triton.jit
def _band_gradients_kernel(
    grad_ptr, v_ptr, band_ptr, logsumexp_ptr, delta_ptr, loss_scale_ptr, spans_ptr, p_ptr, band_grad_ptr,
    stride_gb, stride_gh, stride_gn, stride_gd, stride_vb, stride_vh, stride_vn, stride_vd,
    heads, group, query_rows, key_rows, head_dim,
    SPANS: tl.constexpr, BAND: tl.constexpr, PITCH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P and dC (in base-2 units) of the query at position i and key `i - d`, `0 <= d < BAND`: `[B*Hq, M, PITCH]` both.

    grad `[B, Hq, M, D]`, v `[B, Hkv, N, D]`, band `[B*Hq, M, PITCH]`, logsumexp and delta `[B*Hq, M]`, delta
    multiplied by loss_scale, `[B*Hq]` or with SPANS `[Hq, M]`; zero before the first key of a span. A program
    multiplies BLOCK_Q rows of grad with the BLOCK_K values that end at the last of them, and keeps the diagonals next
    to the main one.
    """
    blocks = tl.cdiv(query_rows, BLOCK_Q)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    head = batch_head % heads
    query = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    first = tl.program_id(0) % blocks * BLOCK_Q + (key_rows - query_rows)
    key = first + BLOCK_Q - BLOCK_K + tl.arange(0, BLOCK_K)
    grad_ptr += (batch_head // heads) * stride_gb + head * stride_gh
    v_ptr += (batch_head // heads) * stride_vb + (head // group) * stride_vh
    dp = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in tl.range(0, head_dim, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        grad = _load_rows(grad_ptr, query, dim, stride_gn, stride_gd, query_rows, head_dim)  # [BLOCK_Q, BLOCK_D]
        v = _load_rows(v_ptr, key, dim, stride_vn, stride_vd, key_rows, head_dim)  # [BLOCK_K, BLOCK_D]
        dp = tl.dot(grad, v.T, dp, input_precision=PRECISION)
    back = (first + tl.arange(0, BLOCK_Q))[:, None] - key[None, :]  # [BLOCK_Q, BLOCK_K]
    inside = query < query_rows
    in_band = (back >= 0) & (back < BAND) & (key >= 0)[None, :] & inside[:, None]
    row = batch_head * query_rows + query
    logsumexp = tl.load(logsumexp_ptr + row, mask=inside, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
    if SPANS:
        delta /= tl.load(loss_scale_ptr + row, mask=inside, other=1.0)
    else:
        delta /= tl.load(loss_scale_ptr + batch_head)
    in_strip = row[:, None] * PITCH + back
    p = _probability(tl.load(band_ptr + in_strip, mask=in_band, other=0.0) - logsumexp[:, None])
    if SPANS:
        seen = key[None, :] >= tl.load(spans_ptr + query, mask=inside, other=0)[:, None]
        p, dp = tl.where(seen, p, 0.0), tl.where(seen, dp, 0.0)
    tl.store(p_ptr + in_strip, p, mask=in_band)
    tl.store(band_grad_ptr + in_strip, p * (dp - delta[:, None]) * LN_2, mask=in_band)


@triton.jit
def _band_transposed_kernel(
    band_grad_ptr, weight_ptr, near_grad_ptr,
    stride_wh, stride_wa, stride_wb, heads, query_rows, key_rows, pad,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, BAND: tl.constexpr,
    NEAR_PITCH: tl.constexpr, BAND_PITCH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`near_grad[x, e] = sum_{a, d} band_grad[x + (cq-1) - a, d] * weight[h, a, d - (cq-1-a) + pad - e]`.

    The gradient of `_band_kernel`: band_grad `[B*Hq, M, BAND_PITCH]`, near_grad `[B*Hq, M, NEAR_PITCH]`.
    """
    blocks = tl.cdiv(query_rows, BLOCK_Q)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    query = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    back = tl.arange(0, NEAR_PITCH)
    band_grad_ptr += batch_head * query_rows * BAND_PITCH
    weight_ptr += (batch_head % heads) * stride_wh
    total = tl.zeros([BLOCK_Q, NEAR_PITCH], tl.float32)
    for start in tl.range(0, QUERY_TAPS * BAND_PITCH, BLOCK_DEPTH):
        tap = (start + tl.arange(0, BLOCK_DEPTH)) // BAND_PITCH
        diagonal = (start + tl.arange(0, BLOCK_DEPTH)) % BAND_PITCH
        row = query[:, None] + (QUERY_TAPS - 1) - tap[None, :]  # [BLOCK_Q, BLOCK_DEPTH]
        # The others were never written: they count as zero.
        known = (row < query_rows) & (diagonal[None, :] <= row + (key_rows - query_rows))
        known = known & ((diagonal < BAND) & (tap < QUERY_TAPS))[None, :]
        grad = tl.load(band_grad_ptr + row.to(tl.int64) * BAND_PITCH + diagonal[None, :], mask=known, other=0.0)
        key_tap = (diagonal - (QUERY_TAPS - 1 - tap) + pad)[:, None] - back[None, :]
        weight = tl.load(
            weight_ptr + tap[:, None].to(tl.int64) * stride_wa + key_tap.to(tl.int64) * stride_wb,
            mask=(key_tap >= 0) & (key_tap < KEY_TAPS) & (tap < QUERY_TAPS)[:, None],
            other=0.0,
        )  # [BLOCK_DEPTH, NEAR_PITCH]
        total = tl.dot(grad, weight.to(tl.float32), total, input_precision=PRECISION)
    near_grad_ptr += (batch_head * query_rows + query[:, None]) * NEAR_PITCH + back[None, :]
    tl.store(near_grad_ptr, total, mask=(query < query_rows)[:, None])


@triton.jit
def _near_transposed_kernel(
    near_grad_ptr, x_ptr, out_ptr,
    stride_xb, stride_xh, stride_xn, stride_xd,
    heads, group, x_group, query_rows, key_rows, head_dim, factor,
    WIDTH: tl.constexpr, PITCH: tl.constexpr, TO_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SOURCE: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient of `near[x, e] = factor * q[x] . k[x - e]`, `near_grad [B*Hq, M, PITCH]`, to one of them.

    `out[x] += factor * sum_e near_grad[x, e] * k[x - e]`, out `[B*Hq, M, D]` float32, or TO_KEYS
    `out[y] += factor * sum_{heads of the group, e} near_grad[y + e, e] * q[y + e]`, out `[B*H, N, D]`.
    x is k, each head shared by `x_group`, or q; `heads` are near_grad's.
    """
    offset = key_rows - query_rows  # of the position of a query from its row
    rows = key_rows if TO_KEYS else query_rows
    source_rows = query_rows if TO_KEYS else key_rows
    column_blocks = tl.cdiv(head_dim, BLOCK_D)
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    dim = tl.program_id(0) % column_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.program_id(0) // column_blocks % blocks * BLOCK_ROWS
    batch_head = (tl.program_id(0) // (column_blocks * blocks)).to(tl.int64)
    row = first + tl.arange(0, BLOCK_ROWS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for member in tl.range(group):
        head = batch_head * group + member
        grad_ptr = near_grad_ptr + head * query_rows * PITCH
        head_ptr = x_ptr + (head // heads) * stride_xb + (head % heads // x_group) * stride_xh
        for step in tl.range(0, BLOCK_ROWS + WIDTH - 1, BLOCK_SOURCE):
            if TO_KEYS:
                source = first - offset + step + tl.arange(0, BLOCK_SOURCE)
                query = source[None, :]
                back = query + offset - row[:, None]  # [BLOCK_ROWS, BLOCK_SOURCE]
            else:
                source = first + offset + BLOCK_ROWS - BLOCK_SOURCE - step + tl.arange(0, BLOCK_SOURCE)
                query = row[:, None]
                back = query + offset - source[None, :]  # [BLOCK_ROWS, BLOCK_SOURCE]
            known = (back >= 0) & (back < WIDTH) & (query >= 0) & (query < query_rows) & (back <= query + offset)
            grad = tl.load(grad_ptr + query.to(tl.int64) * PITCH + back, mask=known, other=0.0)
            x = _load_rows(head_ptr, source, dim, stride_xn, stride_xd, source_rows, head_dim)
            total = tl.dot(grad, x.to(tl.float32), total, input_precision=PRECISION)
    _add_rows(out_ptr, total * factor, batch_head, row, dim, rows, rows, rows, head_dim)


@triton.jit
def _band_weight_gradient_kernel(
    band_grad_ptr, near_ptr, out_ptr,
    query_rows, key_rows, pad,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, WIDTH: tl.constexpr, BAND: tl.constexpr,
    NEAR_PITCH: tl.constexpr, BAND_PITCH: tl.constexpr, PROGRAM_ROWS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out[a, b] = sum_{i, d} band_grad[i, d] * near[i - (cq-1) + a, d - (cq-1-a) + pad - b]` over PROGRAM_ROWS rows.

    One program a tap a; out `[B*Hq, programs, cq, ck]`. `products[d, e]` are summed over the rows first.
    """
    offset = key_rows - query_rows  # of the position of a query from its row
    programs = tl.cdiv(query_rows, PROGRAM_ROWS)
    tap = tl.program_id(0) % QUERY_TAPS
    part = tl.program_id(0) // QUERY_TAPS
    batch_head = (part // programs).to(tl.int64)
    first = part % programs * PROGRAM_ROWS
    band_grad_ptr += batch_head * query_rows * BAND_PITCH
    near_ptr += batch_head * query_rows * NEAR_PITCH
    diagonal = tl.arange(0, BAND_PITCH)
    back = tl.arange(0, NEAR_PITCH)
    products = tl.zeros([BAND_PITCH, NEAR_PITCH], tl.float32)
    for start in tl.range(first, tl.minimum(first + PROGRAM_ROWS, query_rows), BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        # Keys before the first one were never written, in either strip.
        known = (diagonal[None, :] <= row[:, None] + offset) & (diagonal < BAND)[None, :] & (row < query_rows)[:, None]
        grad = tl.load(
            band_grad_ptr + row[:, None].to(tl.int64) * BAND_PITCH + diagonal[None, :], mask=known, other=0.0
        )  # [BLOCK_ROWS, BAND_PITCH]
        near_row = row - (QUERY_TAPS - 1) + tap
        known = (back[None, :] <= near_row[:, None] + offset) & (back < WIDTH)[None, :]
        known = known & ((near_row >= 0) & (near_row < query_rows))[:, None]
        near = tl.load(
            near_ptr + near_row[:, None].to(tl.int64) * NEAR_PITCH + back[None, :], mask=known, other=0.0
        )  # [BLOCK_ROWS, NEAR_PITCH]
        products = tl.dot(grad.T, near, products, input_precision=PRECISION)
    key_tap = tl.arange(0, BLOCK_TAPS)
    back = (diagonal - (QUERY_TAPS - 1 - tap) + pad)[:, None] - key_tap[None, :]  # [BAND_PITCH, BLOCK_TAPS]
    known = (back >= 0) & (back < NEAR_PITCH)
    diagonals = tl.where(known, tl.gather(products, tl.where(known, back, 0), 1), 0.0)
    out_ptr += tl.program_id(0).to(tl.int64) * KEY_TAPS + key_tap
    tl.store(out_ptr, tl.sum(diagonals, 0), mask=key_tap < KEY_TAPS)


def add_band(
    band: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, grad_out: Tensor,
    logsumexp: Tensor, delta: Tensor, loss_scale: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    signature: Hashable, *, factor: float, pad: int, width: int, spans: Tensor | None,
) -> Tensor:  # fmt: skip
    """Add what the scores of the causal band contribute to the gradients; returns the weight's, float32.

    `band [B*Hq, M, pitch]` float32, of which the first `width` columns count, up to the first key;
    `dq [B*Hq, M, D]`, `dv [B*Hq, N, D]` and `dk [B*Hkv, N, D]` float32.
    """
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    query_taps, key_taps = weight.shape[1:]
    near_width = query_taps + key_taps - 2
    near_pitch, band_pitch = max(16, next_power_of_2(near_width)), band.shape[2]
    group, precision = heads // kv_heads, dot_precision(q.dtype)

    def strip(pitch: int) -> Tensor:
        return empty(batch * heads, query_rows, pitch, dtype=torch.float32, device=q.device)

    def strip_blocks(width: int) -> dict[str, Any]:
        block_q = max(16, next_power_of_2(width - 1))  # the keys reach back width - 1
        sizes = {"BLOCK_D": 32 if q.element_size() == 4 else 64, "BLOCK_Q": block_q, "BLOCK_K": 2 * block_q}
        return sizes | {"PRECISION": precision, "num_warps": block_q // 8}

    p, band_grad = strip(band_pitch), strip(band_pitch)
    near, near_grad = strip(near_pitch), strip(near_pitch)
    blocks = strip_blocks(width)
    launch(
        _band_gradients_kernel, cdiv(query_rows, blocks["BLOCK_Q"]) * batch * heads, signature,
        grad_out, v, band, logsumexp, delta, loss_scale, spans, p, band_grad, *grad_out.stride(), *v.stride(),
        heads, group, query_rows, key_rows, head_dim, SPANS=spans is not None, BAND=width, PITCH=band_pitch, **blocks,
    )  # fmt: skip
    blocks = strip_blocks(near_width)
    launch(
        _near_scores_kernel, cdiv(query_rows, blocks["BLOCK_Q"]) * batch * heads, signature,
        q, k, near, *q.stride(), *k.stride(), heads, group, query_rows, key_rows, head_dim, factor,
        WIDTH=near_width, PITCH=near_pitch, DEPENDENT_LAUNCH=False, **blocks,
    )  # fmt: skip
    taps: dict[str, Any] = {"QUERY_TAPS": query_taps, "KEY_TAPS": key_taps}
    pitches: dict[str, Any] = {"BAND": width, "NEAR_PITCH": near_pitch, "BAND_PITCH": band_pitch}
    launch(
        _band_transposed_kernel, cdiv(query_rows, 64) * batch * heads, signature,
        band_grad, weight, near_grad, *weight.stride(), heads, query_rows, key_rows, pad,
        **taps, **pitches, BLOCK_Q=64, BLOCK_DEPTH=min(64, next_power_of_2(query_taps * band_pitch)),
        PRECISION=precision,
    )  # fmt: skip
    add_strip_products(near_grad, k, dq, (signature, "dq"), factor=factor, width=near_width, to_keys=False)
    add_strip_products(near_grad, q, dk, (signature, "dk"), factor=factor, width=near_width, to_keys=True)
    add_strip_products(p, grad_out, dv, (signature, "dv"), factor=1.0, width=width, to_keys=True)
    programs = cdiv(query_rows, WEIGHT_ROWS)
    parts = empty(batch * heads, programs, query_taps, key_taps, dtype=torch.float32, device=q.device)
    launch(
        _band_weight_gradient_kernel, programs * batch * heads * query_taps, signature,
        band_grad, near, parts, query_rows, key_rows, pad, WIDTH=near_width, PROGRAM_ROWS=WEIGHT_ROWS,
        BLOCK_TAPS=next_power_of_2(key_taps), BLOCK_ROWS=32, PRECISION=precision, **taps, **pitches,
    )  # fmt: skip
    return parts.unflatten(0, (batch, heads)).sum((0, 2))


def add_strip_products(
    strip: Tensor, x: Tensor, out: Tensor, signature: Hashable, *, factor: float, width: int, to_keys: bool
) -> None:
    """`out[i] += factor * sum_e strip[i, e] * x[i - e]`; to_keys, the sum of `strip[i + e, e] * x[i + e]`.

    i counts positions; `strip [B*Hq, M, pitch]` float32, of which the first `width` columns count, up to the first
    key. `x [B, H, N, D]` and `out [B*H, M, D]` float32, or to_keys M rows of x and N of out, where the heads of
    strip are summed if there are more.
    """
    batch, x_heads, x_rows, head_dim = x.shape
    heads, query_rows = strip.shape[0] // batch, strip.shape[1]
    key_rows = out.shape[1] if to_keys else x_rows
    block_d = min(64, max(16, next_power_of_2(head_dim)))
    launch(
        _near_transposed_kernel, cdiv(out.shape[1], 32) * out.shape[0] * cdiv(head_dim, block_d),
        signature,
        strip, x, out, *x.stride(),
        heads, strip.shape[0] // out.shape[0], heads // x_heads, query_rows, key_rows, head_dim, factor,
        WIDTH=width, PITCH=strip.shape[2], TO_KEYS=to_keys, BLOCK_ROWS=32,
        BLOCK_SOURCE=32, BLOCK_D=block_d, PRECISION=dot_precision(x.dtype),
    )  # fmt: skip
