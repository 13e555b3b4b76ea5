"""The Triton kernels of a decode step: logits of the newest row from K, its output from V, and a merge.

A program of the first two takes a share of one sequence's keys for all heads, since the mixings cross heads. The first
reads K and writes the newest row's logits, the second reads these and V. With few heads a product fills 16 rows anyway:
all heads' rows are one block, and a KV head's product adds to its own rows by zeros in all others.

A convolution's product with the query taps gives `r[b, key]`, and `c[j] = sum_b r[b, j - pad + b]` adds along the
diagonals: a tile of BLOCK_N keys finishes `BLOCK_N - (key taps - 1)` of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mta_kernels.conv_attention.triton.decode_shares import _cache_rows, _finite, _load_rows

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _mta_decode_logits_kernel(
    q_ptr, k_ptr, pre_conv_ptr, pre_mix_ptr, lengths_ptr, table_ptr, logits_ptr, max_ptr, sum_ptr,
    stride_qb, stride_qh, stride_qw, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_wh, stride_wa, stride_wb, stride_mo, stride_mi, stride_l, stride_tb, stride_tp,
    stride_lb, stride_lh, stride_ls, stride_ln, window, splits, scale,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, PAD: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, PRE_CONV: tl.constexpr,
    PRE_MIX: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    PRECISION_OF_TAPS: tl.constexpr, PRECISION_OF_MIX: tl.constexpr,
):  # fmt: skip
    """Logits of the newest row in a share of the keys, rounded, their maxima, and sums of exponentials below these.

    logits `[B, H, SLOTS, S]`, the row of position i in slot `i % SLOTS`; max and sum `[B, splits, H]`.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    batch = tl.program_id(0) // splits
    length = tl.load(lengths_ptr + batch.to(tl.int64) * stride_l).to(tl.int32)
    start, stop = _share(length, tl.program_id(0) % splits, splits)
    q_ptr += batch.to(tl.int64) * stride_qb
    if PAGE_SIZE > 0:
        table_ptr += batch.to(tl.int64) * stride_tb
    else:
        k_ptr += batch.to(tl.int64) * stride_kb
    slot = tl.maximum(length - 1, 0) % SLOTS
    logits_ptr += batch.to(tl.int64) * stride_lb + slot.to(tl.int64) * stride_ls

    NEW: tl.constexpr = BLOCK_N - (KEY_TAPS - 1)
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if PRE_MIX:
        mix = _load_mix(pre_mix_ptr, stride_mo, stride_mi, HEADS, BLOCK_H)
    for first in range(start, stop, NEW):
        key = first - PAD + column
        inside = (key >= 0) & (key < length)
        rows = _cache_rows(table_ptr, key, inside, stride_kb, stride_kn, stride_tp, PAGE_SIZE)
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        if PRE_CONV:
            for h in tl.range(0, HEADS, num_stages=STAGES):
                k_head = k_ptr + _wide(h // GROUP) * stride_kh
                k = _load_rows(k_head, rows, dim, inside, stride_kd, HEAD_DIM)
                convolved = _convolved_scores(
                    q_ptr + _wide(h) * stride_qh, pre_conv_ptr + _wide(h) * stride_wh, k, key, dim, column, stride_qw,
                    stride_qd, stride_wa, stride_wb, window, length, scale, QUERY_TAPS, KEY_TAPS, HEAD_DIM, BLOCK_A,
                    BLOCK_B, BLOCK_N, PRECISION, PRECISION_OF_TAPS,
                )  # fmt: skip
                scores += tl.where((head == h)[:, None], convolved[None, :], 0.0)
        else:
            for kv_head in tl.range(0, HEADS // GROUP, num_stages=STAGES):
                k = _load_rows(k_ptr + _wide(kv_head) * stride_kh, rows, dim, inside, stride_kd, HEAD_DIM)
                q = tl.load(
                    q_ptr + (_wide(head) * stride_qh + _wide(window - 1) * stride_qw)[:, None]
                    + dim[None, :].to(tl.int64) * stride_qd,
                    mask=(head // GROUP == kv_head)[:, None] & (head < HEADS)[:, None] & (dim < HEAD_DIM)[None, :],
                    other=0.0,
                )  # fmt: skip
                scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
        if not PRE_CONV:
            scores *= scale
        if PRE_MIX:
            scores = tl.dot(mix, scores, input_precision=PRECISION_OF_MIX)
        rounded = scores.to(logits_ptr.dtype.element_ty)
        new = (column < NEW) & (first + column < stop)
        there = (head < HEADS)[:, None] & new[None, :]
        place = head[:, None].to(tl.int64) * stride_lh + (first + column)[None, :].to(tl.int64) * stride_ln
        tl.store(logits_ptr + place, rounded, mask=there)
        logits = tl.where(there, rounded.to(tl.float32), float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        below = _finite(larger)
        total = total * tl.exp2((largest - below) * LOG2E)
        total += tl.sum(tl.exp2((logits - below[:, None]) * LOG2E), 1)
        largest = larger
    place = tl.program_id(0).to(tl.int64) * HEADS + head
    tl.store(max_ptr + place, largest, mask=head < HEADS)
    tl.store(sum_ptr + place, total, mask=head < HEADS)


@triton.jit
def _mta_decode_values_kernel(
    v_ptr, post_conv_ptr, post_mix_ptr, lengths_ptr, table_ptr, logits_ptr, max_ptr, sum_ptr, logsumexp_ptr, seen_ptr,
    partial_ptr,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_wh, stride_wa, stride_wb, stride_mi, stride_mo,
    stride_l, stride_tb, stride_tp, stride_lb, stride_lh, stride_ls, stride_ln, stride_sb, stride_sh, stride_ss,
    stride_seen, splits,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, PAD: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, POST_CONV: tl.constexpr,
    POST_MIX: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    KEEPS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Partial outputs of a share of the keys, whose sum over shares is the output: partial `[B, splits, H, D]`.

    If KEEPS, logsumexp `[B, H, SLOTS]` and seen `[B]` are a state's: the first share of a sequence writes the newest
    row's, which no program of this launch reads there.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    length = tl.load(lengths_ptr + batch.to(tl.int64) * stride_l).to(tl.int32)
    start, stop = _share(length, split, splits)
    if PAGE_SIZE > 0:
        table_ptr += batch.to(tl.int64) * stride_tb
    else:
        v_ptr += batch.to(tl.int64) * stride_vb
    logits_ptr += batch.to(tl.int64) * stride_lb
    logsumexp_ptr += batch.to(tl.int64) * stride_sb
    slot = tl.maximum(length - 1, 0) % SLOTS

    head = tl.arange(0, BLOCK_H)
    share = tl.arange(0, BLOCK_SPLITS)
    found = (batch.to(tl.int64) * splits + share[:, None]) * HEADS + head[None, :]
    there = (share < splits)[:, None] & (head < HEADS)[None, :]
    maxima = tl.load(max_ptr + found, mask=there, other=float("-inf"))
    sums = tl.load(sum_ptr + found, mask=there, other=0.0)
    largest = _finite(tl.max(maxima, 0))
    total = tl.sum(sums * tl.exp2((maxima - largest[None, :]) * LOG2E), 0)
    logsumexp = largest + tl.log2(tl.where(total > 0, total, 1.0)) / LOG2E
    if KEEPS and split == 0:
        kept = (head < HEADS) & (length > 0)
        tl.store(logsumexp_ptr + _wide(head) * stride_sh + slot * stride_ss, logsumexp, mask=kept)
        tl.store(seen_ptr + batch.to(tl.int64) * stride_seen, length)

    DTYPE: tl.constexpr = v_ptr.dtype.element_ty
    NEW: tl.constexpr = BLOCK_N - (KEY_TAPS - 1)
    dim = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    accumulator = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if POST_MIX:
        mix = _load_mix(post_mix_ptr, stride_mo, stride_mi, HEADS, BLOCK_H).to(DTYPE)
    for first in range(start, stop, NEW):
        key = first + column
        new = (column < NEW) & (key < stop)
        if POST_CONV:
            mixed = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
            for h in tl.range(0, HEADS):
                convolved = _convolved_probabilities(
                    post_conv_ptr + _wide(h) * stride_wh, logits_ptr + _wide(h) * stride_lh,
                    logsumexp_ptr + _wide(h) * stride_sh, tl.sum(tl.where(head == h, logsumexp, 0.0), 0),
                    first - PAD + column, column, length, stride_wa, stride_wb, stride_ls, stride_ln, stride_ss,
                    QUERY_TAPS, KEY_TAPS, SLOTS, BLOCK_A, BLOCK_B, BLOCK_N, DTYPE, PRECISION,
                )  # fmt: skip
                mixed += tl.where((head == h)[:, None], convolved[None, :], 0.0)
        else:
            newest = _wide(head[:, None]) * stride_lh + _wide(slot) * stride_ls
            logits = tl.load(
                logits_ptr + newest + key[None, :].to(tl.int64) * stride_ln,
                mask=(head < HEADS)[:, None] & new[None, :],
                other=float("-inf"),
            )
            mixed = tl.exp2((logits.to(tl.float32) - logsumexp[:, None]) * LOG2E)
        mixed = tl.where(new[None, :], mixed, 0.0).to(DTYPE)
        if POST_MIX:
            mixed = tl.dot(mix, mixed, input_precision=PRECISION).to(DTYPE)
        rows = _cache_rows(table_ptr, key, new, stride_vb, stride_vn, stride_tp, PAGE_SIZE)
        for kv_head in tl.range(0, HEADS // GROUP, num_stages=STAGES):
            v = _load_rows(v_ptr + _wide(kv_head) * stride_vh, rows, dim, new, stride_vd, HEAD_DIM)
            own = tl.where((head // GROUP == kv_head)[:, None], mixed, 0.0)
            accumulator = tl.dot(own.to(DTYPE), v, accumulator, input_precision=PRECISION)
    place = (tl.program_id(0).to(tl.int64) * HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(partial_ptr + place, accumulator, mask=(head < HEADS)[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit
def _mta_decode_merge_kernel(
    partial_ptr, out_ptr, splits, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """out `[B, H, D]`: the sum of the shares' partial outputs, in their order."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
    DIM_BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    batch_head = (tl.program_id(0) // DIM_BLOCKS).to(tl.int64)
    dim = tl.program_id(0) % DIM_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    first_row = batch_head // HEADS * splits * HEADS + batch_head % HEADS
    out = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for first in tl.range(0, splits, CHUNK):
        share = first + tl.arange(0, CHUNK)
        out += tl.load(
            partial_ptr + (first_row + share[:, None] * HEADS) * HEAD_DIM + dim[None, :],
            mask=(share < splits)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
    merged = tl.sum(out, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + batch_head * HEAD_DIM + dim, merged, mask=dim < HEAD_DIM)


@triton.jit
def _wide(x):
    """A number or a block of them as int64, for products with strides."""
    return x + tl.zeros([], tl.int64)


@triton.jit
def _share(length, split, splits):
    """The keys of a program: from the first to before the second, none if these are equal."""
    keys = (tl.cdiv(length, splits) + 15) // 16 * 16
    start = tl.minimum(split * keys, length)
    return start, tl.minimum(start + keys, length)


@triton.jit
def _load_mix(mix_ptr, stride_out, stride_in, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """A mixing as `[out, in]`, float32, zero where there is no head."""
    head = tl.arange(0, BLOCK_H)
    return tl.load(
        mix_ptr + head[:, None].to(tl.int64) * stride_out + head[None, :].to(tl.int64) * stride_in,
        mask=(head < HEADS)[:, None] & (head < HEADS)[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def _load_taps(
    taps_ptr, stride_wa, stride_wb, QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """A head's taps as `[key tap, query tap]`, zero where there is none."""
    query_tap = tl.arange(0, BLOCK_A)
    key_tap = tl.arange(0, BLOCK_B)
    return tl.load(
        taps_ptr + query_tap[None, :].to(tl.int64) * stride_wa + key_tap[:, None].to(tl.int64) * stride_wb,
        mask=(query_tap < QUERY_TAPS)[None, :] & (key_tap < KEY_TAPS)[:, None],
        other=0.0,
    )


@triton.jit
def _convolved_scores(
    q_ptr, taps_ptr, k, key, dim, column, stride_qw, stride_qd, stride_wa, stride_wb, window, length, scale,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    PRECISION_OF_TAPS: tl.constexpr,
):  # fmt: skip
    """The newest row of a head's convolved scores; number i is of key `key[i] + PAD`: `[BLOCK_N]`."""
    tap = tl.arange(0, BLOCK_A)
    row = length - QUERY_TAPS + tap
    used = (tap < QUERY_TAPS) & (row >= 0)
    held = tap + (window - QUERY_TAPS)  # not below 0 where a row is not
    q = tl.load(
        q_ptr + held[:, None].to(tl.int64) * stride_qw + dim[None, :].to(tl.int64) * stride_qd,
        mask=used[:, None] & (held >= 0)[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )  # fmt: skip
    scores = tl.dot(q, k.T, input_precision=PRECISION) * scale
    scores = tl.where(used[:, None] & (key[None, :] <= row[:, None]) & (key >= 0)[None, :], scores, 0.0)
    taps = _load_taps(taps_ptr, stride_wa, stride_wb, QUERY_TAPS, KEY_TAPS, BLOCK_A, BLOCK_B)
    products = tl.dot(taps.to(tl.float32), scores, input_precision=PRECISION_OF_TAPS)
    return _along_diagonals(products, column, KEY_TAPS, BLOCK_B, BLOCK_N)


@triton.jit
def _convolved_probabilities(
    taps_ptr, logits_ptr, logsumexp_ptr, newest_logsumexp, key, column, length, stride_wa, stride_wb, stride_ls,
    stride_ln, stride_ss, QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE, PRECISION: tl.constexpr,
):  # fmt: skip
    """The newest row of a head's convolved probabilities; number i is of key `key[i] + PAD`: `[BLOCK_N]`."""
    tap = tl.arange(0, BLOCK_A)
    row = length - QUERY_TAPS + tap
    used = (tap < QUERY_TAPS) & (row >= 0)
    slot = tl.where(used, row, 0) % SLOTS
    visible = used[:, None] & (key[None, :] <= row[:, None]) & (key >= 0)[None, :]
    logits = tl.load(
        logits_ptr + slot[:, None].to(tl.int64) * stride_ls + key[None, :].to(tl.int64) * stride_ln,
        mask=visible,
        other=float("-inf"),
    )
    older = tl.load(logsumexp_ptr + slot * stride_ss, mask=used & (row < length - 1), other=0.0)
    logsumexp = tl.where(row == length - 1, newest_logsumexp, older)
    probabilities = tl.exp2((logits.to(tl.float32) - logsumexp[:, None]) * LOG2E)
    taps = _load_taps(taps_ptr, stride_wa, stride_wb, QUERY_TAPS, KEY_TAPS, BLOCK_A, BLOCK_B)
    products = tl.dot(taps.to(DTYPE), probabilities.to(DTYPE), input_precision=PRECISION)
    return _along_diagonals(products, column, KEY_TAPS, BLOCK_B, BLOCK_N)


@triton.jit
def _along_diagonals(products, column, KEY_TAPS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """`sum_b products[b, i + b]`, for the first `BLOCK_N - (KEY_TAPS - 1)` columns i; the others have no meaning."""
    key_tap = tl.arange(0, BLOCK_B)
    source = (column[None, :] + key_tap[:, None]) % BLOCK_N
    moved = tl.gather(products, source, 1)
    return tl.sum(tl.where((key_tap < KEY_TAPS)[:, None], moved, 0.0), 0)
