"""The kernels of a decode step that read K: logits of the newest row, and their logsumexp.

Mixings need all heads at a key. With a convolution before the mixing, each program streams a share of one KV head's
keys, and a second, small kernel mixes the heads. The taps fold into the queries as in conv_attention's decode
(decode_shares.py). Older rows see fewer of the newest keys, so only these need a mask: each query head has a small
program for them. Without a convolution a program takes a tile of keys through all heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mta_kernels.conv_attention.triton.decode_shares import (
    _cache_rows,
    _column_scores,
    _diagonals,
    _finite,
    _folded_queries,
    _load_rows,
    _newest_scores,
    _share,
)
from mta_kernels.multi_token_attention.decode.rows import LOG2E, _is_finite, _load_mix, _takes_part, _wide


@triton.jit
def _mta_decode_convolved_kernel(
    q_ptr, k_ptr, weight_ptr, lengths_ptr, table_ptr, scores_ptr,
    stride_qb, stride_qh, stride_qw, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_wh, stride_wa, stride_wb, stride_l, stride_tb, stride_tp, stride_cb, stride_ch,
    kv_heads, window, splits, scale,
    GROUP: tl.constexpr, AT_ONCE: tl.constexpr, QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PACK: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr, BLOCK_TAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_NEAR: tl.constexpr, SPLIT_WEIGHT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolved scores `[B, H, keys]` of the newest row: a share of the keys for AT_ONCE query heads of a KV head.

    In the first GROUP programs of a KV head, the scores of the newest keys of one query head instead.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    head_blocks: tl.constexpr = (GROUP + AT_ONCE - 1) // AT_ONCE
    programs = GROUP + splits * head_blocks
    sequence = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    batch = sequence // kv_heads
    kv_head = sequence % kv_heads
    length = tl.load(lengths_ptr + batch.to(tl.int64) * stride_l).to(tl.int32)
    newest = tl.maximum(length - (QUERY_TAPS - 1) - (KEY_TAPS - 1 - PAD), 0)  # from here on a mask is needed
    if PAGE_SIZE > 0:
        table_ptr += batch.to(tl.int64) * stride_tb
    else:
        k_ptr += batch.to(tl.int64) * stride_kb
    k_ptr += kv_head.to(tl.int64) * stride_kh
    q_ptr += batch.to(tl.int64) * stride_qb
    scores_ptr += batch.to(tl.int64) * stride_cb
    DTYPE: tl.constexpr = scores_ptr.dtype.element_ty

    if program < GROUP:
        head = (kv_head * GROUP + program).to(tl.int64)
        scores = _newest_scores(
            q_ptr + head * stride_qh, k_ptr, weight_ptr + head * stride_wh, table_ptr, stride_qw, stride_qd, stride_kb,
            stride_kn, stride_kd, stride_wa, stride_wb, stride_tp, window, length, scale, QUERY_TAPS, KEY_TAPS, PAD,
            HEAD_DIM, PAGE_SIZE, BLOCK_TAPS, BLOCK_D, BLOCK_NEAR, PRECISION,
        )  # fmt: skip
        key = length - BLOCK_NEAR + tl.arange(0, BLOCK_NEAR)
        there = (key >= newest) & (key < length)
        tl.store(scores_ptr + head * stride_ch + key, scores.to(DTYPE), mask=there)
        return

    COLUMNS: tl.constexpr = BLOCK_N // PACK
    ROWS: tl.constexpr = AT_ONCE * PACK * BLOCK_STEPS
    first_head = (program - GROUP) % head_blocks * AT_ONCE
    start, stop = _share(newest, (program - GROUP) // head_blocks, splits)
    if start >= stop:
        return
    queries, unit = _folded_queries(
        q_ptr, weight_ptr, kv_head * GROUP, first_head, stride_qh, stride_qw, stride_qd, stride_wh, stride_wa,
        stride_wb, window, scale, GROUP, AT_ONCE, QUERY_TAPS, KEY_TAPS, HEAD_DIM, PACK, STEPS,
        BLOCK_STEPS, BLOCK_TAPS, BLOCK_D, SPLIT_WEIGHT, PRECISION,
    )  # fmt: skip
    source, is_new = _diagonals(ROWS, COLUMNS, STEPS, BLOCK_STEPS)
    number = tl.arange(0, BLOCK_N)
    out_key = (number // PACK - (STEPS - 1)) * PACK + PAD + number % PACK
    head = first_head + tl.arange(0, AT_ONCE)
    place = scores_ptr + (kv_head * GROUP + head).to(tl.int64)[:, None] * stride_ch
    carried = tl.zeros([ROWS, COLUMNS], tl.float32)
    last_key = stop - 1 - PAD + (KEY_TAPS - 1)
    first_column = start // PACK - (PAD + PACK - 1) // PACK
    end_column = (stop - 1 - PAD + PACK * STEPS) // PACK
    for tile in tl.range(first_column, end_column, COLUMNS):
        r, scores = _column_scores(
            tile, carried, queries, source, is_new, k_ptr, table_ptr, batch, kv_head, last_key, stride_kb, stride_kn,
            stride_kd, stride_tp, AT_ONCE, HEAD_DIM, PAGE_SIZE, PACK, BLOCK_STEPS, BLOCK_D, PRECISION, False,
        )  # fmt: skip
        scores = scores.permute(0, 2, 1).reshape(AT_ONCE, BLOCK_N)
        key = tile * PACK + out_key
        there = (head < GROUP)[:, None] & ((key >= start) & (key < stop))[None, :]
        if k_ptr.dtype.element_ty == tl.float16:
            scores *= unit[:, None]
        tl.store(place + key[None, :], scores.to(DTYPE), mask=there)
        carried = r


@triton.jit
def _mta_decode_logits_kernel(
    q_ptr, k_ptr, pre_mix_ptr, lengths_ptr, table_ptr, scores_ptr, logits_ptr, found_ptr,
    stride_qb, stride_qh, stride_qw, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_mo, stride_mi, stride_l, stride_tb, stride_tp, stride_cb, stride_ch,
    stride_lb, stride_lh, stride_ls, stride_ln, window, scale, programs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, PRE_CONV: tl.constexpr, PRE_MIX: tl.constexpr,
    SPLIT_MIX: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of the newest row in every `programs`-th tile of keys, and their logsumexp, found `[B, programs, H]`.

    logits `[B, H, SLOTS, S]`, with the row of position i in slot `i % SLOTS`. Scores `[B, H, keys]` come from an
    earlier kernel if they are convolved, else from K. If WIDE, logits may be written up to the next multiple of 8 keys.
    """
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    batch = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    length = tl.load(lengths_ptr + batch * stride_l).to(tl.int32)
    if PAGE_SIZE > 0:
        table_ptr += batch * stride_tb
    else:
        k_ptr += batch * stride_kb
    q_ptr += batch * stride_qb + _wide(window - 1) * stride_qw
    logits_ptr += batch * stride_lb + (tl.maximum(length - 1, 0) % SLOTS).to(tl.int64) * stride_ls
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    place = scores_ptr + batch * stride_cb + head[:, None].to(tl.int64) * stride_ch
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    spoiled = tl.zeros([BLOCK_H], tl.float32)
    mix = tl.zeros([BLOCK_H, BLOCK_H], tl.float32)
    if PRE_MIX:
        mix = _load_mix(pre_mix_ptr, stride_mo, stride_mi, HEADS, BLOCK_H)
    if PRE_CONV and DEPENDENT_LAUNCH:
        gdc_wait()
    for first in tl.range(program * BLOCK_N, length, programs * BLOCK_N, num_stages=1):
        column = tl.arange(0, BLOCK_N)
        key = first + column
        inside = key < length
        groups = (first // 8 + column // 8) * 8  # of keys that one load or store covers
        in_groups = (head < HEADS)[:, None] & (groups < length)[None, :]
        if PRE_CONV:
            scores = tl.load(place + key[None, :], mask=in_groups, other=0.0)
        else:
            q = tl.load(
                q_ptr + head[:, None].to(tl.int64) * stride_qh + dim[None, :].to(tl.int64) * stride_qd,
                mask=(head < HEADS)[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            rows = _cache_rows(table_ptr, key, inside, stride_kb, stride_kn, stride_tp, PAGE_SIZE)
            scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
            for kv_head in tl.range(0, HEADS // GROUP):
                k = _load_rows(k_ptr + _wide(kv_head) * stride_kh, rows, dim, inside, stride_kd, HEAD_DIM)
                # A tensor core multiplies 16 rows in any case: the rows of other KV heads are discarded.
                products = tl.dot(q, k.T, input_precision=PRECISION)
                scores = tl.where((head // GROUP == kv_head)[:, None], products, scores)
            scores *= scale
        if PRE_MIX:
            coarse, coarse_scores = mix.to(DTYPE), scores.to(DTYPE)
            finite = _is_finite(coarse_scores)
            spoiled = tl.maximum(spoiled, tl.max(tl.where(finite | ~inside[None, :], 0.0, 1.0), 1))
            scores, coarse_scores = tl.where(finite, scores, 0.0), tl.where(finite, coarse_scores, 0.0).to(DTYPE)
            mixed = tl.dot(coarse, coarse_scores, input_precision=PRECISION)
            if scores.dtype != DTYPE:
                fine_scores = (scores - coarse_scores.to(tl.float32)).to(DTYPE)
                mixed = tl.dot(coarse, fine_scores, mixed, input_precision=PRECISION)
            if SPLIT_MIX:
                fine = (mix - coarse.to(tl.float32)).to(DTYPE)
                mixed = tl.dot(fine, coarse_scores, mixed, input_precision=PRECISION)
            scores = mixed
        rounded = scores.to(DTYPE)
        seen = (head < HEADS)[:, None] & inside[None, :]
        to = logits_ptr + head[:, None].to(tl.int64) * stride_lh + key[None, :].to(tl.int64) * stride_ln
        tl.store(to, rounded, mask=in_groups if WIDE else seen)
        logits = tl.where(seen, rounded.to(tl.float32), float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        below = _finite(larger)
        total = total * tl.exp2((largest - below) * LOG2E) + tl.sum(tl.exp2((logits - below[:, None]) * LOG2E), 1)
        largest = larger
    found = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)) / LOG2E, float("-inf"))
    if PRE_MIX:
        found = tl.where(_takes_part(mix, spoiled), float("nan"), found)
    tl.store(found_ptr + (batch * programs + program) * HEADS + head, found, mask=head < HEADS)
