"""The kernel of a decode step that runs beside the one that reads K: the older rows' part of the convolution."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mta_kernels.multi_token_attention.decode.rows import _add_row, _band_of_taps, _load_row, _wide


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

    AT_ONCE heads of a sequence have `programs`, which take tiles of `16 * BLOCK_M` keys in turn. logits and logsumexp
    are a state's.
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
