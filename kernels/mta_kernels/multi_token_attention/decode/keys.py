"""The kernels of a decode step that read K: the newest row's scores of one KV head's query heads, convolved if asked.

Every KV head has programs of its own, which stream a share of its keys; heads meet in the next kernel. The taps fold
into the queries as in conv_attention's decode (decode_shares.py): only the newest keys, of which older rows see fewer,
need a mask, and each query head has a small program for them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from mta_kernels.conv_attention.triton.decode_shares import _cache_rows, _fold_taps, _load_rows, _newest_products


@triton.jit
def _mta_decode_scores_kernel(
    q_ptr, k_ptr, lengths_ptr, table_ptr, scores_ptr,
    stride_qb, stride_qh, stride_qw, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_l, stride_tb, stride_tp, stride_cb, stride_ch, kv_heads, window, splits, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores `[B, H, keys]` of the newest row in a share of the keys, for all query heads of a KV head."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    sequence = tl.program_id(0) // splits
    batch = sequence // kv_heads
    kv_head = sequence % kv_heads
    length = tl.load(lengths_ptr + batch.to(tl.int64) * stride_l).to(tl.int32)
    start, stop = _share(length, tl.program_id(0) % splits, splits)
    if PAGE_SIZE > 0:
        table_ptr += batch.to(tl.int64) * stride_tb
    else:
        k_ptr += batch.to(tl.int64) * stride_kb
    k_ptr += kv_head.to(tl.int64) * stride_kh
    row = tl.arange(0, ROWS)
    head = (kv_head * GROUP + row).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    q_ptr += batch.to(tl.int64) * stride_qb + _wide(window - 1) * stride_qw
    q = tl.load(
        q_ptr + head[:, None] * stride_qh + dim[None, :].to(tl.int64) * stride_qd,
        mask=(row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    scores_ptr += batch.to(tl.int64) * stride_cb + head[:, None] * stride_ch
    for first in tl.range(start, stop, BLOCK_N):
        key = first + column
        inside = key < stop
        rows = _cache_rows(table_ptr, key, inside, stride_kb, stride_kn, stride_tp, PAGE_SIZE)
        k = _load_rows(k_ptr, rows, dim, inside, stride_kd, HEAD_DIM)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * scale
        there = (row < GROUP)[:, None] & inside[None, :]
        tl.store(scores_ptr + key[None, :], scores.to(scores_ptr.dtype.element_ty), mask=there)


@triton.jit
def _mta_decode_convolved_kernel(
    q_ptr, k_ptr, weight_ptr, lengths_ptr, table_ptr, scores_ptr,
    stride_qb, stride_qh, stride_qw, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_wh, stride_wa, stride_wb, stride_l, stride_tb, stride_tp, stride_cb, stride_ch,
    kv_heads, window, splits, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PACK: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr, BLOCK_TAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_NEAR: tl.constexpr, SPLIT_WEIGHT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolved scores `[B, H, keys]` of the newest row: a share of the keys for HEADS query heads of a KV head.

    Or, in the first GROUP programs of a KV head, those of the newest keys of one query head.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
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
        r = _newest_products(
            q_ptr + head * stride_qh, k_ptr, weight_ptr + head * stride_wh, table_ptr, stride_qw, stride_qd, stride_kb,
            stride_kn, stride_kd, stride_wa, stride_wb, stride_tp, window, length, scale, QUERY_TAPS, KEY_TAPS,
            HEAD_DIM, PAGE_SIZE, BLOCK_TAPS, BLOCK_D, BLOCK_NEAR, PRECISION, 0,
        )  # fmt: skip
        near = tl.arange(0, BLOCK_NEAR)
        place = near[None, :] - PAD + tl.arange(0, r.shape[0])[:, None]
        known = (place >= 0) & (place < BLOCK_NEAR)
        moved = tl.where(known, tl.gather(r, tl.where(known, place, 0), 1), 0.0)
        key = length - BLOCK_NEAR + near
        there = (key >= newest) & (key < length)
        tl.store(scores_ptr + head * stride_ch + key, tl.sum(moved, 0).to(DTYPE), mask=there)
        return

    COLUMNS: tl.constexpr = BLOCK_N // PACK
    ROWS: tl.constexpr = HEADS * PACK * BLOCK_STEPS
    first_head = (program - GROUP) % head_blocks * HEADS
    start, stop = _share(newest, (program - GROUP) // head_blocks, splits)
    if start >= stop:
        return
    queries = ()
    for g in tl.static_range(PACK):
        queries += (_fold_taps(  # type: ignore[assignment]
            q_ptr, weight_ptr, kv_head * GROUP, first_head, g, stride_qh, stride_qw, stride_qd,
            stride_wh, stride_wa, stride_wb, window, scale, GROUP, HEADS, QUERY_TAPS, KEY_TAPS, HEAD_DIM,
            PACK, STEPS, BLOCK_STEPS, BLOCK_TAPS, BLOCK_D, SPLIT_WEIGHT, PRECISION, k_ptr.dtype.element_ty,
        ),)  # fmt: skip
    dim = tl.arange(0, BLOCK_D)
    column = tl.arange(0, COLUMNS)
    step = (tl.arange(0, ROWS) % BLOCK_STEPS)[:, None]
    # A tile finishes the scores of the columns that end STEPS - 1 before its own last one.
    source = (column[None, :] - (STEPS - 1) + step + COLUMNS) % COLUMNS
    is_new = column[None, :] <= COLUMNS - STEPS + step
    number = tl.arange(0, BLOCK_N)
    out_key = (number // PACK - (STEPS - 1)) * PACK + PAD + number % PACK
    head = first_head + tl.arange(0, HEADS)
    place = scores_ptr + (kv_head * GROUP + head).to(tl.int64)[:, None] * stride_ch
    carried = tl.zeros([ROWS, COLUMNS], tl.float32)
    last_key = stop - 1 - PAD + (KEY_TAPS - 1)
    first_column = start // PACK - (PAD + PACK - 1) // PACK
    end_column = (stop - 1 - PAD + PACK * STEPS) // PACK
    for tile in tl.range(first_column, end_column, COLUMNS):
        k_first = (tile + column) * PACK  # a column never straddles two pages, nor the first key
        inside = (k_first >= 0) & (k_first <= last_key)
        rows = _cache_rows(table_ptr, k_first, inside, stride_kb, stride_kn, stride_tp, PAGE_SIZE)
        r = tl.zeros([ROWS, COLUMNS], tl.float32)
        for g in tl.static_range(PACK):
            inside = (k_first >= 0) & (k_first + g <= last_key)
            k = _load_rows(k_ptr + tl.full([], g, tl.int64) * stride_kn, rows, dim, inside, stride_kd, HEAD_DIM)
            r = tl.dot(queries[g], k.T, r, input_precision=PRECISION)
        moved = tl.gather(tl.where(is_new, r, carried), source, 1)
        scores = tl.sum(moved.reshape(HEADS, PACK, BLOCK_STEPS, COLUMNS), 2)
        scores = scores.permute(0, 2, 1).reshape(HEADS, BLOCK_N)
        key = tile * PACK + out_key
        there = (head < GROUP)[:, None] & ((key >= start) & (key < stop))[None, :]
        tl.store(place + key[None, :], scores.to(DTYPE), mask=there)
        carried = r


@triton.jit
def _wide(x):
    """A number or a block of them as int64, for products with strides."""
    return x + tl.zeros([], tl.int64)


@triton.jit
def _share(length, split, splits):
    """The keys of a program: from the first to before the second, none if it is not above."""
    keys = (tl.cdiv(length, splits) + 15) // 16 * 16
    start = split * keys
    return start, tl.minimum(start + keys, length)
