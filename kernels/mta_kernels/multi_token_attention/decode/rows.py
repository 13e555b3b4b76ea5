"""Rows of probabilities in the decode kernels, all heads in a program, since mixings cross heads.

A convolution of probabilities is a matrix product, without data movement: 16 neighbouring outputs read SPAN
neighbouring probabilities of a row, weighted by a band of taps. `a[16 m + n] = sum_y P[m, y] band[y, n]`,
with `P[m, y] = p[16 m - BEFORE + y]` and `band[y, n] = taps[y - n - BEFORE + pad]`, y below SPAN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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


@triton.jit
def _mta_decode_early_kernel(
    taps_ptr, logits_ptr, logsumexp_ptr, lengths_ptr, older_ptr,
    stride_ph, stride_pa, stride_pb, stride_lb, stride_lh, stride_ls, stride_ln, stride_sb, stride_sh, stride_ss,
    stride_l, stride_ob, stride_oh, programs,
    HEADS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr, POST_QUERY_TAPS: tl.constexpr,
    POST_KEY_TAPS: tl.constexpr, POST_PAD: tl.constexpr, BEFORE: tl.constexpr, SPAN: tl.constexpr,
    SLOTS: tl.constexpr, WIDE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of the older rows in the newest row's convolved probabilities, older `[B, H, keys]`.

    It runs beside the kernel that reads K. AT_ONCE heads of a sequence have `programs`, which take tiles of
    `16 * BLOCK_M` keys in turn. logits and logsumexp are a state's.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    batch = (tl.program_id(0) // (programs * BLOCKS)).to(tl.int64)
    head = tl.program_id(0) // programs % BLOCKS * AT_ONCE + tl.arange(0, AT_ONCE)
    there = (head < HEADS)[:, None, None]
    length = tl.load(lengths_ptr + batch * stride_l).to(tl.int32)
    logits_ptr += batch * stride_lb
    logsumexp_ptr += batch * stride_sb + head.to(tl.int64) * stride_sh
    place = older_ptr + batch * stride_ob + head[:, None, None].to(tl.int64) * stride_oh
    bands = ()
    logsumexp = ()
    for a in tl.static_range(POST_QUERY_TAPS - 1):
        row = length - POST_QUERY_TAPS + a
        bands += (_band_of_taps(  # type: ignore[assignment]
            taps_ptr + _wide(a) * stride_pa, head, stride_ph, stride_pb, POST_KEY_TAPS, POST_PAD, BEFORE, SPAN, HEADS
        ).to(logits_ptr.dtype.element_ty),)  # fmt: skip
        logsumexp += (tl.load(  # type: ignore[assignment]
            logsumexp_ptr + _wide(tl.maximum(row, 0) % SLOTS) * stride_ss, mask=(head < HEADS) & (row >= 0), other=0.0
        ),)  # fmt: skip
    step = programs * (16 * BLOCK_M)
    for first in tl.range(tl.program_id(0) % programs * (16 * BLOCK_M), length, step, num_stages=1):
        rows = ()  # all loads are in flight before the first is used
        for a in tl.static_range(POST_QUERY_TAPS - 1):
            rows += (_load_row(  # type: ignore[assignment]
                logits_ptr, head, length - POST_QUERY_TAPS + a, first, stride_lh, stride_ls, stride_ln, BLOCK_M,
                BEFORE, SPAN, HEADS, SLOTS, WIDE,
            ),)  # fmt: skip
        older = tl.zeros([AT_ONCE, BLOCK_M, 16], tl.float32)
        for a in tl.static_range(POST_QUERY_TAPS - 1):
            older = _add_row(
                older, rows[a], bands[a], logsumexp[a], length - POST_QUERY_TAPS + a, first, BEFORE, WIDE, PRECISION
            )
        key = first + tl.arange(0, BLOCK_M)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        tl.store(place + key, older, mask=there & (key // 16 * 16 < length))
    if DEPENDENT_LAUNCH:
        gdc_wait()  # a kernel that waits for this one also waits for the one beside it
