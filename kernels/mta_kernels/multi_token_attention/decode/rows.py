"""The kernels of a decode step between K and V: a few numbers a key, all heads in a program, since mixings cross heads.

A convolution of probabilities is a product of matrices without moving anything: 16 neighbouring keys need SPAN
neighbouring probabilities of each row, which a band of taps makes theirs. `a[16 m + n] = sum_y P[m, y] band[y, n]`,
with `P[m, y] = p[16 m - BEFORE + y]` and `band[y, n] = taps[y - n - BEFORE + pad]`, y below SPAN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mta_kernels.conv_attention.triton.decode_shares import _cache_rows, _finite
from mta_kernels.multi_token_attention.decode.keys import _share, _wide

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _mta_decode_logits_kernel(
    scores_ptr, pre_mix_ptr, post_conv_ptr, lengths_ptr, logits_ptr, max_ptr, sum_ptr, bands_ptr, v_ptr, table_ptr,
    stride_cb, stride_ch, stride_mo, stride_mi, stride_wh, stride_wa, stride_wb, stride_l,
    stride_lb, stride_lh, stride_ls, stride_ln, stride_vb, stride_vh, stride_vn, stride_vd, stride_tb, stride_tp,
    shares, kv_heads, splits,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, PAD: tl.constexpr, BEFORE: tl.constexpr, SPAN: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
    PRE_MIX: tl.constexpr, SPLIT_MIX: tl.constexpr, POST_CONV: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    PRECISION: tl.constexpr, AHEAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Logits of the newest row in a share of the keys, rounded, their maxima, and sums of exponentials below these.

    logits `[B, H, SLOTS, S]`, the row of position i in slot `i % SLOTS`; max and sum `[B, shares, H]`. Before there are
    scores, the bands of taps `[H, QUERY_TAPS, SPAN, 16]` of the next kernel. Memory has nothing to do from here until V
    is read: the first AHEAD values of each of its programs are asked for.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    if POST_CONV:
        for h in tl.range(tl.program_id(0), HEADS, tl.num_programs(0)):
            _store_bands(
                post_conv_ptr + _wide(h) * stride_wh, bands_ptr + _wide(h) * (QUERY_TAPS * SPAN * 16), stride_wa,
                stride_wb, QUERY_TAPS, KEY_TAPS, PAD, BEFORE, SPAN,
            )  # fmt: skip
    DTYPE: tl.constexpr = scores_ptr.dtype.element_ty
    head = tl.arange(0, BLOCK_H)
    if PRE_MIX:
        mix = _load_mix(pre_mix_ptr, stride_mo, stride_mi, HEADS, BLOCK_H)
        coarse = mix.to(DTYPE)
        fine = (mix - coarse.to(tl.float32)).to(DTYPE)
    batch = tl.program_id(0) // shares
    length = tl.load(lengths_ptr + batch.to(tl.int64) * stride_l).to(tl.int32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        if AHEAD > 0:
            if PAGE_SIZE > 0:
                table_ptr += batch.to(tl.int64) * stride_tb
            else:
                v_ptr += batch.to(tl.int64) * stride_vb
            _ask_for_values(
                v_ptr, table_ptr, length, tl.program_id(0) % shares, shares, kv_heads, splits, stride_vb, stride_vh,
                stride_vn, stride_vd, stride_tp, AHEAD, HEAD_DIM, PAGE_SIZE,
            )  # fmt: skip
    start, stop = _share(length, tl.program_id(0) % shares, shares)
    slot = tl.maximum(length - 1, 0) % SLOTS
    scores_ptr += batch.to(tl.int64) * stride_cb + head[:, None].to(tl.int64) * stride_ch
    logits_ptr += batch.to(tl.int64) * stride_lb + slot.to(tl.int64) * stride_ls
    logits_ptr += head[:, None].to(tl.int64) * stride_lh
    column = tl.arange(0, BLOCK_N)
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for first in tl.range(start, stop, BLOCK_N):
        key = (first + column)[None, :]
        groups = (first // 8 + column // 8)[None, :] * 8  # of keys that one load or store is for
        there = (head < HEADS)[:, None] & (groups < stop)
        scores = tl.load(scores_ptr + key, mask=there, other=0.0)
        if PRE_MIX:
            mixed = tl.dot(coarse, scores, input_precision=PRECISION)
            if SPLIT_MIX:
                mixed = tl.dot(fine, scores, mixed, input_precision=PRECISION)
            scores = mixed.to(DTYPE)
        if not WIDE:
            there = there & (key < stop)
        tl.store(logits_ptr + key.to(tl.int64) * stride_ln, scores, mask=there)
        logits = tl.where((head < HEADS)[:, None] & (key < stop), scores.to(tl.float32), float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        below = _finite(larger)
        total = total * tl.exp2((largest - below) * LOG2E)
        total += tl.sum(tl.exp2((logits - below[:, None]) * LOG2E), 1)
        largest = larger
    place = tl.program_id(0).to(tl.int64) * HEADS + head
    tl.store(max_ptr + place, largest, mask=head < HEADS)
    tl.store(sum_ptr + place, total, mask=head < HEADS)


@triton.jit
def _mta_decode_probabilities_kernel(
    logits_ptr, bands_ptr, post_mix_ptr, max_ptr, sum_ptr, lengths_ptr, logsumexp_ptr, seen_ptr, mixed_ptr,
    stride_mi, stride_mo, stride_l, stride_lb, stride_lh, stride_ls, stride_ln, stride_sb, stride_sh, stride_ss,
    stride_seen, stride_cb, stride_ch, shares, programs,
    QUERY_TAPS: tl.constexpr, BEFORE: tl.constexpr, SPAN: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_SHARES: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
    POST_CONV: tl.constexpr, POST_MIX: tl.constexpr, KEEPS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Probabilities of the newest row, convolved and mixed, in every `programs`-th tile of `16 * BLOCK_M` keys.

    mixed `[B, H, keys]`, zero from the length to the next multiple of 8. If KEEPS, logsumexp `[B, H, SLOTS]` and seen
    `[B]` are a state's: the first program of a sequence writes the newest row's, which none of this launch reads there.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = mixed_ptr.dtype.element_ty
    head = tl.arange(0, BLOCK_H)
    if POST_MIX:
        mix = _load_mix(post_mix_ptr, stride_mo, stride_mi, HEADS, BLOCK_H).to(DTYPE)
    batch = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    length = tl.load(lengths_ptr + batch.to(tl.int64) * stride_l).to(tl.int32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    logsumexp = _logsumexp(max_ptr, sum_ptr, batch, shares, HEADS, BLOCK_H, BLOCK_SHARES)
    logits_ptr += batch.to(tl.int64) * stride_lb
    logsumexp_ptr += batch.to(tl.int64) * stride_sb + _wide(head) * stride_sh
    mixed_ptr += batch.to(tl.int64) * stride_cb + head[:, None].to(tl.int64) * stride_ch
    slot = tl.maximum(length - 1, 0) % SLOTS
    if KEEPS and program == 0:
        tl.store(logsumexp_ptr + slot * stride_ss, logsumexp, mask=(head < HEADS) & (length > 0))
        tl.store(seen_ptr + batch.to(tl.int64) * stride_seen, length)

    BLOCK_N: tl.constexpr = 16 * BLOCK_M
    column = tl.arange(0, BLOCK_N)
    for first in tl.range(program * BLOCK_N, length, programs * BLOCK_N):
        key = (first + column)[None, :]
        groups = (first // 8 + column // 8)[None, :] * 8
        there = (head < HEADS)[:, None] & (groups < length)
        if POST_CONV:
            if (first >= BEFORE) & (first - BEFORE + BLOCK_N - 16 + SPAN <= length - QUERY_TAPS + 1):
                mixed = _convolved(
                    logits_ptr, logsumexp_ptr, logsumexp, bands_ptr, first, length, stride_lh, stride_ls, stride_ln,
                    stride_ss, QUERY_TAPS, BEFORE, SPAN, HEADS, BLOCK_H, BLOCK_M, SLOTS, WIDE, False, DTYPE, PRECISION,
                )  # fmt: skip
            else:
                mixed = _convolved(
                    logits_ptr, logsumexp_ptr, logsumexp, bands_ptr, first, length, stride_lh, stride_ls, stride_ln,
                    stride_ss, QUERY_TAPS, BEFORE, SPAN, HEADS, BLOCK_H, BLOCK_M, SLOTS, WIDE, True, DTYPE, PRECISION,
                )  # fmt: skip
        else:
            newest = logits_ptr + slot.to(tl.int64) * stride_ls + head[:, None].to(tl.int64) * stride_lh
            seen = there if WIDE else there & (key < length)
            logits = tl.load(newest + key.to(tl.int64) * stride_ln, mask=seen, other=float("-inf"))
            mixed = tl.exp2((logits.to(tl.float32) - logsumexp[:, None]) * LOG2E)
        mixed = tl.where(key < length, mixed, 0.0).to(DTYPE)
        if POST_MIX:
            mixed = tl.dot(mix, mixed, input_precision=PRECISION).to(DTYPE)
        tl.store(mixed_ptr + key, mixed, mask=there)


@triton.jit
def _convolved(
    logits_ptr, logsumexp_ptr, newest_logsumexp, bands_ptr, first, length, stride_lh, stride_ls, stride_ln, stride_ss,
    QUERY_TAPS: tl.constexpr, BEFORE: tl.constexpr, SPAN: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, EDGE: tl.constexpr, DTYPE,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The newest row of all heads' convolved probabilities, of the tile that begins at `first`: `[BLOCK_H, keys]`.

    Unless EDGE all rows see all keys that the tile's are convolved of.
    """
    head = tl.arange(0, BLOCK_H)
    block = tl.arange(0, BLOCK_M)[None, :, None]
    near = tl.arange(0, SPAN)[None, None, :]
    key = first - BEFORE + block * 16 + near
    groups = (first // 8 - BEFORE // 8 + block * 2 + near // 8) * 8  # of keys that one load is for
    of_head = (head < HEADS)[:, None, None]
    of_band = head[:, None, None] * (QUERY_TAPS * SPAN * 16) + tl.arange(0, SPAN)[None, :, None] * 16
    of_band += tl.arange(0, 16)[None, None, :]
    place = logits_ptr + head[:, None, None].to(tl.int64) * stride_lh + key.to(tl.int64) * stride_ln
    convolved = tl.zeros([BLOCK_H, BLOCK_M, 16], tl.float32)
    for a in tl.static_range(QUERY_TAPS):
        row = length - QUERY_TAPS + a
        slot = tl.maximum(row, 0) % SLOTS
        if a == QUERY_TAPS - 1:
            logsumexp = newest_logsumexp
        else:
            logsumexp = tl.load(logsumexp_ptr + slot * stride_ss, mask=(head < HEADS) & (row >= 0), other=0.0)
        seen = of_head
        if EDGE:
            seen = of_head & (groups >= 0) & (groups <= row)
            if not WIDE:
                seen = seen & (key >= 0) & (key <= row)
        logits = tl.load(place + slot.to(tl.int64) * stride_ls, mask=seen, other=float("-inf"))
        probabilities = tl.exp2(logits.to(tl.float32) * LOG2E - (logsumexp * LOG2E)[:, None, None])
        if EDGE and WIDE:
            probabilities = tl.where(key <= row, probabilities, 0.0)
        band = tl.load(bands_ptr + of_band + a * (SPAN * 16), mask=of_head, other=0.0)
        convolved = tl.dot(probabilities.to(DTYPE), band, convolved, input_precision=PRECISION)
    return convolved.reshape(BLOCK_H, BLOCK_M * 16)


@triton.jit
def _ask_for_values(
    v_ptr, table_ptr, length, program, programs, kv_heads, splits, stride_vb, stride_vh, stride_vn, stride_vd,
    stride_tp, AHEAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """A program's part of the first AHEAD values of every share of V of a sequence comes to the L2 cache."""
    LINE: tl.constexpr = 1024 // v_ptr.dtype.element_ty.primitive_bitwidth
    keys, _ = _share(length, 1, splits)  # of a share
    for chunk in tl.range(program, kv_heads * splits, programs):
        ahead = tl.arange(0, AHEAD)
        key = chunk % splits * keys + ahead
        wanted = (ahead < keys) & (key < length)
        rows = _cache_rows(table_ptr, key, wanted, stride_vb, stride_vn, stride_tp, PAGE_SIZE)
        place = v_ptr + (chunk // splits).to(tl.int64) * stride_vh + tl.where(wanted, rows, 0)
        for line in tl.static_range((HEAD_DIM + LINE - 1) // LINE):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place + line * LINE * stride_vd],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def _store_bands(
    taps_ptr, bands_ptr, stride_wa, stride_wb, QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, PAD: tl.constexpr,
    BEFORE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A head's bands of taps: `[QUERY_TAPS, SPAN, 16]`."""
    near = tl.arange(0, SPAN)[:, None]
    key = tl.arange(0, 16)[None, :]
    tap = near - key - (BEFORE - PAD)
    for a in tl.static_range(QUERY_TAPS):
        taps = tl.load(
            taps_ptr + a * stride_wa + tap.to(tl.int64) * stride_wb, mask=(tap >= 0) & (tap < KEY_TAPS), other=0.0
        )
        tl.store(bands_ptr + a * (SPAN * 16) + near * 16 + key, taps.to(bands_ptr.dtype.element_ty))


@triton.jit
def _logsumexp(max_ptr, sum_ptr, batch, shares, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_SHARES: tl.constexpr):
    """The newest row's, of each head, from what its shares have found; 0 without keys and where there is no head."""
    head = tl.arange(0, BLOCK_H)
    share = tl.arange(0, BLOCK_SHARES)
    found = (batch.to(tl.int64) * shares + share[:, None]) * HEADS + head[None, :]
    there = (share < shares)[:, None] & (head < HEADS)[None, :]
    maxima = tl.load(max_ptr + found, mask=there, other=float("-inf"))
    sums = tl.load(sum_ptr + found, mask=there, other=0.0)
    largest = _finite(tl.max(maxima, 0))
    total = tl.sum(sums * tl.exp2((maxima - largest[None, :]) * LOG2E), 0)
    return largest + tl.log2(tl.where(total > 0, total, 1.0)) / LOG2E


@triton.jit
def _load_mix(mix_ptr, stride_out, stride_in, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """A mixing as `[out, in]`, float32, zero where there is no head."""
    head = tl.arange(0, BLOCK_H)
    return tl.load(
        mix_ptr + head[:, None].to(tl.int64) * stride_out + head[None, :].to(tl.int64) * stride_in,
        mask=(head < HEADS)[:, None] & (head < HEADS)[None, :],
        other=0.0,
    ).to(tl.float32)
