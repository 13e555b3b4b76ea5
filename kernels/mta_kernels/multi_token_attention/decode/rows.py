"""Rows of probabilities in the decode kernels, all heads in a program, since mixings cross heads.

A convolution of probabilities is a matrix product, without data movement: 16 neighbouring outputs read SPAN
neighbouring probabilities of a row, weighted by a band of taps. `a[16 m + n] = sum_y P[m, y] band[y, n]`,
with `P[m, y] = p[16 m - BEFORE + y]` and `band[y, n] = taps[y - n - BEFORE + pad]`, y below SPAN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mta_kernels.conv_attention.triton.decode_shares import _finite

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_row(
    logits_ptr, head, row, first, stride_lh, stride_ls, stride_ln, BLOCK_M: tl.constexpr, BEFORE: tl.constexpr,
    SPAN: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Logits of the row of position `row` that the outputs from `first` on read: `[heads, BLOCK_M, SPAN]`.

    logits are a sequence's, `[H, SLOTS, S]`. If WIDE, logits after the row's last key are undefined.
    """
    block = tl.arange(0, BLOCK_M)[None, :, None]
    near = tl.arange(0, SPAN)[None, None, :]
    key = first - BEFORE + block * 16 + near
    groups = (first // 8 - BEFORE // 8 + block * 2 + near // 8) * 8  # of keys that one load covers
    seen = (head < HEADS)[:, None, None] & (groups >= 0) & (groups <= row)
    if not WIDE:
        seen = seen & (key >= 0) & (key <= row)
    place = logits_ptr + _wide(tl.maximum(row, 0) % SLOTS) * stride_ls + key.to(tl.int64) * stride_ln
    return tl.load(place + head[:, None, None].to(tl.int64) * stride_lh, mask=seen, other=float("-inf"))


@triton.jit
def _add_row(
    convolved, logits, band, logsumexp, row, first, BEFORE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr
):
    """`convolved [heads, BLOCK_M, 16]` plus a row's part, from logits as `_load_row` returns them.

    logsumexp `[heads]` and band `[heads, SPAN, 16]` are the row's.
    """
    probabilities = tl.exp2((logits.to(tl.float32) - logsumexp[:, None, None]) * LOG2E)  # exact if both are large
    if WIDE:
        block = tl.arange(0, logits.shape[1])[None, :, None]
        near = tl.arange(0, logits.shape[2])[None, None, :]
        probabilities = tl.where(first - BEFORE + block * 16 + near <= row, probabilities, 0.0)
    return tl.dot(probabilities.to(logits.dtype), band, convolved, input_precision=PRECISION)


@triton.jit
def _band_of_taps(
    taps_ptr, head, stride_h, stride_b, KEY_TAPS: tl.constexpr, PAD: tl.constexpr, BEFORE: tl.constexpr,
    SPAN: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Bands of a row's taps: `[heads, SPAN, 16]`."""
    tap = tl.arange(0, SPAN)[None, :, None] - tl.arange(0, 16)[None, None, :] - (BEFORE - PAD)
    return tl.load(
        taps_ptr + head[:, None, None].to(tl.int64) * stride_h + tap.to(tl.int64) * stride_b,
        mask=(head < HEADS)[:, None, None] & (tap >= 0) & (tap < KEY_TAPS),
        other=0.0,
    )


@triton.jit
def _logsumexp(found_ptr, batch, slots, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_SLOTS: tl.constexpr):
    """The newest row's logsumexp of each head, from its shares' results; 0 without keys and past the heads."""
    head = tl.arange(0, BLOCK_H)[None, :]
    slot = tl.arange(0, BLOCK_SLOTS)[:, None]
    place = found_ptr + (batch.to(tl.int64) * slots + slot) * HEADS + head
    found = tl.load(place, mask=(slot < slots) & (head < HEADS), other=float("-inf"))
    largest = _finite(tl.max(found, 0))
    total = tl.sum(tl.exp2((found - largest[None, :]) * LOG2E), 0)
    return largest + tl.log2(tl.where(total != 0, total, 1.0)) / LOG2E  # NaN stays


@triton.jit
def _load_mix(mix_ptr, stride_out, stride_in, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """A mixing as `[out, in]`, float32, zero past the heads."""
    head = tl.arange(0, BLOCK_H)
    return tl.load(
        mix_ptr + head[:, None].to(tl.int64) * stride_out + head[None, :].to(tl.int64) * stride_in,
        mask=(head < HEADS)[:, None] & (head < HEADS)[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def _is_finite(x):
    """Whether x is finite: a mixing multiplies the heads of other groups by 0, and 0 * NaN is NaN."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def _takes_part(mix, spoiled):
    """Whether a head mixes, by `mix [out, in]`, a spoiled head: `[out]`."""
    return tl.max(tl.where(mix != 0, spoiled[None, :], 0.0), 1) > 0


@triton.jit
def _wide(x):
    """A number or a block of them as int64, for products with strides."""
    return x + tl.zeros([], tl.int64)
