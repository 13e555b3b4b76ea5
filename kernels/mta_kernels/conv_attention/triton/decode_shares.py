"""The kernel of decode: a share of the keys for one new query a sequence, its result combined with others by decode.py.

With one query the taps fold into it: `c[j] = sum_b qt[b] . k[j - pad + b]`, `qt[b] = sum_a weight[a, b] q_window[a]`.
A column of products stands for PACK consecutive keys, `r[(p, e), u] = sum_g qt[PACK*e + g - p] . k[PACK*u + g]`, so
`c[PACK*v + pad + p] = sum_e r[(p, e), v + e]`: about PACK times fewer numbers to move along the diagonal than with
`r[b, y] = qt[b] . k[y]`, while the rows `(p, e)` fill the 16 rows that a tensor core multiplies anyway.

Only the small program of a query head's newest keys (the tail) needs a mask on scores. Everything is in base-2 units:
`factor = scale * log2(e)`. docs/design/triton-decode.md lists what the copy engine reads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from mta_kernels.conv_attention.triton.prepare import power_of_two_above, scale_taps


@triton.jit
def _conv_attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, weight_ptr, lengths_ptr, table_ptr, partial_ptr, max_ptr, sum_ptr,
    stride_qb, stride_qh, stride_qw, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_wh, stride_wa, stride_wb, stride_l, stride_tb, stride_tp,
    kv_heads, window, splits, factor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PACK: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr, BLOCK_TAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_NEAR: tl.constexpr, SPLIT_WEIGHT: tl.constexpr, UNIT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, NEWEST_LAST: tl.constexpr,
):  # fmt: skip
    """One program: a share of the keys for HEADS query heads of a KV head, or the newest keys of one query head.

    lengths `[B]`; q `[B, Hq, window, D]`; k, v `[B, Hkv, S, D]`, or `[pages, Hkv, PAGE_SIZE, D]` with table
    `[B, max_pages]` if PAGE_SIZE > 0; their first three strides count UNIT elements. Slot `split` of partial
    `[B, Hq, splits + 1, D]`, max and sum `[B, Hq, splits + 1]` is a share's, the last slot is the newest keys'.
    If BULK, k_desc `[B, Hkv, PACK, S // PACK, D]` and v_desc `[B, Hkv, S, D]` describe the same k and v.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()  # programs of the merge may start, and wait
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    programs = GROUP + splits * head_blocks  # of one KV head; the first GROUP of them are the newest keys'
    sequence = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    if NEWEST_LAST:  # they come after the shares of all
        newest = tl.program_id(0) - tl.num_programs(0) // programs * (programs - GROUP)
        sequence = tl.where(newest < 0, tl.program_id(0) // (programs - GROUP), newest // GROUP)
        program = tl.where(newest < 0, GROUP + tl.program_id(0) % (programs - GROUP), newest % GROUP)
    batch = sequence // kv_heads
    kv_head = sequence % kv_heads
    length = tl.load(lengths_ptr + batch.to(tl.int64) * stride_l).to(tl.int32)
    tail_start = tl.maximum(length - (QUERY_TAPS - 1) - (KEY_TAPS - 1 - PAD), 0)  # the newest keys, after the shares

    unit = tl.full([], UNIT, tl.int64)
    stride_kb, stride_kh, stride_kn = unit * stride_kb, unit * stride_kh, unit * stride_kn
    stride_vb, stride_vh, stride_vn = unit * stride_vb, unit * stride_vh, unit * stride_vn
    if PAGE_SIZE > 0:
        table_ptr += batch.to(tl.int64) * stride_tb
    else:
        k_ptr += batch.to(tl.int64) * stride_kb
        v_ptr += batch.to(tl.int64) * stride_vb
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    q_ptr += batch.to(tl.int64) * stride_qb
    dim = tl.arange(0, BLOCK_D)

    if program < GROUP:
        head = kv_head * GROUP + program
        slot = (batch * kv_heads * GROUP + head).to(tl.int64) * (splits + 1) + splits
        scores = _newest_scores(
            q_ptr + head.to(tl.int64) * stride_qh, k_ptr, weight_ptr + head.to(tl.int64) * stride_wh, table_ptr,
            stride_qw, stride_qd, stride_kb, stride_kn, stride_kd, stride_wa, stride_wb, stride_tp, window, length,
            factor, QUERY_TAPS, KEY_TAPS, PAD, HEAD_DIM, PAGE_SIZE, BLOCK_TAPS, BLOCK_D, BLOCK_NEAR, PRECISION,
        )  # fmt: skip
        key = length - BLOCK_NEAR + tl.arange(0, BLOCK_NEAR)
        inside = (key >= tail_start) & (key < length)
        scores = tl.where(inside, scores, float("-inf"))
        newest_max = tl.max(scores, 0)
        p = tl.exp2(scores - _finite(newest_max))
        rows = _cache_rows(table_ptr, key, inside, stride_vb, stride_vn, stride_tp, PAGE_SIZE)
        v = _load_rows(v_ptr, rows, dim, inside, stride_vd, HEAD_DIM)  # [BLOCK_NEAR, BLOCK_D]
        tl.store(partial_ptr + slot * HEAD_DIM + dim, tl.sum(p[:, None] * v.to(tl.float32), 0), mask=dim < HEAD_DIM)
        tl.store(max_ptr + slot, newest_max)
        tl.store(sum_ptr + slot, tl.sum(p, 0))
        return

    COLUMNS: tl.constexpr = BLOCK_N // PACK
    ROWS: tl.constexpr = HEADS * PACK * BLOCK_STEPS
    OUT_ROWS: tl.constexpr = max(16, HEADS)  # every head's probabilities repeated to fill the tensor core
    first_head = (program - GROUP) % head_blocks * HEADS  # programs that read the same keys run side by side
    split = (program - GROUP) // head_blocks
    start, stop = _share(tail_start, split, splits)
    first_column = start // PACK - (PAD + PACK - 1) // PACK

    accumulator = tl.zeros([OUT_ROWS, BLOCK_D], tl.float32)
    running_max = tl.full([HEADS], float("-inf"), tl.float32)
    running_sum = tl.zeros([HEADS, BLOCK_N], tl.float32)  # added up over the keys at the end alone
    if start < stop:
        queries, score_unit = _folded_queries(
            q_ptr, weight_ptr, kv_head * GROUP, first_head, stride_qh, stride_qw, stride_qd, stride_wh, stride_wa,
            stride_wb, window, factor, GROUP, HEADS, QUERY_TAPS, KEY_TAPS, HEAD_DIM, PACK,
            STEPS, BLOCK_STEPS, BLOCK_TAPS, BLOCK_D, SPLIT_WEIGHT, PRECISION,
        )  # fmt: skip
        source, is_new = _diagonals(ROWS, COLUMNS, STEPS, BLOCK_STEPS)
        out_key = (tl.arange(0, BLOCK_N) % COLUMNS - (STEPS - 1)) * PACK + PAD + tl.arange(0, BLOCK_N) // COLUMNS
        carried = tl.zeros([ROWS, COLUMNS], tl.float32)
        last_key = stop - 1 - PAD + (KEY_TAPS - 1)
        end_column = (stop - 1 - PAD + PACK * STEPS) // PACK  # past the last that a score of the share needs
        of_share = (queries, score_unit, batch, kv_head, start, stop, last_key, source, is_new, out_key)
        strides = (stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd, stride_tp)
        masked_column = first_column  # where tiles begin that may hold rows past the end of the sequence
        if BULK:
            masked_column += (length - first_column * PACK) // BLOCK_N * COLUMNS
            for tile in tl.range(first_column, tl.minimum(masked_column, end_column), COLUMNS):
                carried, accumulator, running_max, running_sum = _add_tile(
                    tile, carried, accumulator, running_max, running_sum, k_desc, v_desc, table_ptr, strides, of_share,
                    HEADS, PAD, HEAD_DIM, PAGE_SIZE, PACK, STEPS, BLOCK_STEPS, BLOCK_D, PRECISION, True,
                )  # fmt: skip
        for tile in tl.range(masked_column, end_column, COLUMNS, num_stages=1 if BULK else None):
            carried, accumulator, running_max, running_sum = _add_tile(
                tile, carried, accumulator, running_max, running_sum, k_ptr, v_ptr, table_ptr, strides, of_share,
                HEADS, PAD, HEAD_DIM, PAGE_SIZE, PACK, STEPS, BLOCK_STEPS, BLOCK_D, PRECISION, False,
            )  # fmt: skip

    head = first_head + tl.arange(0, HEADS)
    slot = (batch * kv_heads * GROUP + kv_head * GROUP + head).to(tl.int64) * (splits + 1) + split
    tl.store(max_ptr + slot, running_max, mask=head < GROUP)
    tl.store(sum_ptr + slot, tl.sum(running_sum, 1), mask=head < GROUP)
    REPEAT: tl.constexpr = OUT_ROWS // HEADS  # of whose rows the first is kept
    out_row = tl.arange(0, OUT_ROWS)
    head = first_head + out_row // REPEAT
    slot = (batch * kv_heads * GROUP + kv_head * GROUP + head).to(tl.int64) * (splits + 1) + split
    wanted = (out_row % REPEAT == 0) & (head < GROUP)
    tl.store(
        partial_ptr + slot[:, None] * HEAD_DIM + dim[None, :],
        accumulator,
        mask=wanted[:, None] & (dim < HEAD_DIM)[None, :],
    )


@triton.jit
def _share(length, split, splits):
    """The range of a program's keys, empty if the second number is not above the first."""
    keys = (tl.cdiv(length, splits) + 15) // 16 * 16
    start = split * keys
    return start, tl.minimum(start + keys, length)


@triton.jit
def _diagonals(ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, BLOCK_STEPS: tl.constexpr):
    """For `_column_scores`, `[ROWS, COLUMNS]`: the column that a sum takes, and whether it is of the newer tile."""
    column = tl.arange(0, COLUMNS)
    step = (tl.arange(0, ROWS) % BLOCK_STEPS)[:, None]
    return (column[None, :] - (STEPS - 1) + step + COLUMNS) % COLUMNS, column[None, :] <= COLUMNS - STEPS + step


@triton.jit
def _column_scores(
    tile, carried, queries, source, is_new, k, table_ptr, batch, kv_head, last_key, stride_kb, stride_kn, stride_kd,
    stride_tp,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PACK: tl.constexpr,
    BLOCK_STEPS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Products r of a tile of columns, and the scores that they complete: `[HEADS, PACK, COLUMNS]`.

    Those are of the columns that end STEPS - 1 before the tile's last one. `carried` is r of the tile before. k is a
    descriptor if BULK, of rows that may all be multiplied, and else points to a head's first row.
    """
    ROWS: tl.constexpr = carried.shape[0]
    COLUMNS: tl.constexpr = carried.shape[1]
    dim = tl.arange(0, BLOCK_D)
    r = tl.zeros([ROWS, COLUMNS], tl.float32)
    if BULK:
        for g in tl.static_range(PACK):
            k_tile = k.load([batch, kv_head, g, tile, 0]).reshape(COLUMNS, BLOCK_D)
            r = tl.dot(queries[g], k_tile.T, r, input_precision=PRECISION)
    else:
        key = (tile + tl.arange(0, COLUMNS)) * PACK  # a column never straddles two pages, nor the first key
        inside = (key >= 0) & (key <= last_key)
        rows = _cache_rows(table_ptr, key, inside, stride_kb, stride_kn, stride_tp, PAGE_SIZE)
        for g in tl.static_range(PACK):
            inside = (key >= 0) & (key + g <= last_key)
            k_tile = _load_rows(
                k + tl.full([], g, tl.int64) * stride_kn, rows, dim, inside, stride_kd, HEAD_DIM
            )  # [COLUMNS, BLOCK_D]
            r = tl.dot(queries[g], k_tile.T, r, input_precision=PRECISION)
    moved = tl.gather(tl.where(is_new, r, carried), source, 1)
    return r, tl.sum(moved.reshape(HEADS, PACK, BLOCK_STEPS, COLUMNS), 2)


@triton.jit
def _add_tile(
    tile, carried, accumulator, running_max, running_sum, k, v, table_ptr, strides, of_share,
    HEADS: tl.constexpr, PAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PACK: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_STEPS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    """The sums of a share with the tile of columns from `tile` on: carried, accumulator, running_max, running_sum.

    k and v are descriptors if BULK, of rows that may all be multiplied, and else pointers to a head's first row.
    """
    queries, score_unit, batch, kv_head, start, stop, last_key, source, is_new, out_key = of_share
    stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd, stride_tp = strides
    COLUMNS: tl.constexpr = carried.shape[1]
    BLOCK_N: tl.constexpr = COLUMNS * PACK
    OUT_ROWS: tl.constexpr = accumulator.shape[0]
    dim = tl.arange(0, BLOCK_D)
    r, scores = _column_scores(
        tile, carried, queries, source, is_new, k, table_ptr, batch, kv_head, last_key, stride_kb, stride_kn,
        stride_kd, stride_tp, HEADS, HEAD_DIM, PAGE_SIZE, PACK, BLOCK_STEPS, BLOCK_D, PRECISION, BULK,
    )  # fmt: skip
    scores = scores.reshape(HEADS, BLOCK_N)
    key = tile * PACK + out_key
    inside = (key >= start) & (key < stop)
    if BULK:
        v_tile = v.load([batch, kv_head, (tile - (STEPS - 1)) * PACK + PAD, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        rows = _cache_rows(table_ptr, key, inside, stride_vb, stride_vn, stride_tp, PAGE_SIZE)
        v_tile = _load_rows(v, rows, dim, inside, stride_vd, HEAD_DIM)  # [BLOCK_N, BLOCK_D]
    if v_tile.dtype == tl.float16:
        scores *= score_unit[:, None]
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    reference = _finite(new_max)
    p = tl.exp2(scores - reference[:, None])  # [HEADS, BLOCK_N]
    rescale = tl.exp2(running_max - reference)
    running_sum = running_sum * rescale[:, None] + p
    accumulator *= _repeat_rows(rescale[:, None], OUT_ROWS)
    if BULK:  # from the order of the scores to the order of the keys
        p = p.reshape(HEADS, PACK, COLUMNS).permute(0, 2, 1).reshape(HEADS, BLOCK_N)
    p = _repeat_rows(p, OUT_ROWS).to(v_tile.dtype)
    return r, tl.dot(p, v_tile, accumulator, input_precision=PRECISION), new_max, running_sum


@triton.jit
def _newest_scores(
    q_ptr, k_ptr, weight_ptr, table_ptr,
    stride_qw, stride_qd, stride_kb, stride_kn, stride_kd, stride_wa, stride_wb, stride_tp, window, length, factor,
    QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr, PAD: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_TAPS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A head's scores of the last BLOCK_NEAR keys: sums along the diagonals of r.

    `r[b, y] = factor * sum_a weight[a, b] * s[a, y]`, with s zero where query a may not see key y.
    """
    dim = tl.arange(0, BLOCK_D)
    tap = tl.arange(0, BLOCK_TAPS)
    KEY_ROWS: tl.constexpr = 16 if KEY_TAPS <= 16 else 32
    key_tap = tl.arange(0, KEY_ROWS)
    key = length - BLOCK_NEAR + tl.arange(0, BLOCK_NEAR)
    held = tap + (window - QUERY_TAPS)  # where the window holds this tap's query
    known = (tap < QUERY_TAPS) & (held >= 0)
    q = tl.load(
        q_ptr + held[:, None].to(tl.int64) * stride_qw + dim[None, :].to(tl.int64) * stride_qd,
        mask=known[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_TAPS, BLOCK_D]
    inside = (key >= 0) & (key < length)
    rows = _cache_rows(table_ptr, key, inside, stride_kb, stride_kn, stride_tp, PAGE_SIZE)
    k = _load_rows(k_ptr, rows, dim, inside, stride_kd, HEAD_DIM)  # [BLOCK_NEAR, BLOCK_D]
    scores = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_TAPS, BLOCK_NEAR]
    visible = (key >= 0)[None, :] & (key[None, :] <= length - QUERY_TAPS + tap[:, None]) & known[:, None]
    scores = tl.where(visible, scores * factor, 0.0)
    weight = tl.load(
        weight_ptr + key_tap[:, None].to(tl.int64) * stride_wb + tap[None, :].to(tl.int64) * stride_wa,
        mask=(key_tap < KEY_TAPS)[:, None] & (tap < QUERY_TAPS)[None, :],
        other=0.0,
    )
    r = tl.dot(weight.to(tl.float32), scores, input_precision="ieee")  # [key taps, BLOCK_NEAR]
    source = tl.arange(0, BLOCK_NEAR)[None, :] - PAD + tl.arange(0, r.shape[0])[:, None]
    known = (source >= 0) & (source < BLOCK_NEAR)
    moved = tl.gather(r, tl.where(known, source, 0), 1)
    return tl.sum(tl.where(known, moved, 0.0), 0)


@triton.jit
def _folded_queries(
    q_ptr, weight_ptr, kv_first_head, first_head, stride_qh, stride_qw, stride_qd, stride_wh, stride_wa, stride_wb,
    window, factor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERY_TAPS: tl.constexpr, KEY_TAPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PACK: tl.constexpr, STEPS: tl.constexpr, BLOCK_STEPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT_WEIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The folded queries, PACK tiles of `[rows, BLOCK_D]`, and each head's unit: in fp16 a power of two, else one.

    Row (h, p, e) of tile g: `factor * sum_a weight[h, a, PACK*e + g - p] * q_window[h, a]`. It is one product of a
    block-diagonal matrix of weights with the windows of all heads, one below the other. In its units a head's largest
    number is between 2^14 and 2^15.
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    folded = ()
    for g in tl.static_range(PACK):
        row = tl.arange(0, HEADS * PACK * BLOCK_STEPS)
        row_head = first_head + row // (PACK * BLOCK_STEPS)
        step = row % BLOCK_STEPS
        key_tap = step * PACK + g - row // BLOCK_STEPS % PACK
        depth = tl.arange(0, HEADS * BLOCK_TAPS)
        head = first_head + depth // BLOCK_TAPS
        tap = depth % BLOCK_TAPS
        dim = tl.arange(0, BLOCK_D)
        held = tap + (window - QUERY_TAPS)  # where the window holds this tap's query
        used = (head < GROUP) & (tap < QUERY_TAPS) & (held >= 0)
        q = tl.load(
            q_ptr + ((kv_first_head + head).to(tl.int64) * stride_qh + held.to(tl.int64) * stride_qw)[:, None]
            + dim[None, :].to(tl.int64) * stride_qd,
            mask=used[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )  # fmt: skip
        if HEADS > 1:  # the product has all of these heads' queries, and 0 * NaN is NaN
            finite = tl.abs(q.to(tl.float32)) < float("inf")
            spoiled = tl.max(tl.where(finite, 0.0, 1.0), 1)
            spoiled = tl.max(tl.where(row_head[:, None] == head[None, :], spoiled[None, :], 0.0), 1)
            q = tl.where(finite, q, 0.0).to(q.dtype)
        has_tap = (step < STEPS) & (key_tap >= 0) & (key_tap < KEY_TAPS)
        weight = tl.load(
            weight_ptr
            + ((kv_first_head + row_head).to(tl.int64) * stride_wh + key_tap.to(tl.int64) * stride_wb)[:, None]
            + tap[None, :].to(tl.int64) * stride_wa,
            mask=has_tap[:, None] & used[None, :] & (row_head[:, None] == head[None, :]),
            other=0.0,
        )  # fmt: skip
        unit = factor
        if SPLIT_WEIGHT and q.dtype == tl.float16:
            weight, unit = scale_taps(weight, tl.sum(tl.abs(weight.to(tl.float32)), 1)[:, None], factor)
        coarse = weight.to(q.dtype)
        products = tl.dot(coarse, q, input_precision=PRECISION)
        if SPLIT_WEIGHT:
            products = tl.dot((weight - coarse.to(weight.dtype)).to(q.dtype), q, products, input_precision=PRECISION)
        if HEADS > 1:
            products = tl.where(spoiled[:, None] > 0, float("nan"), products)
        folded += (products * unit,)
    ROWS: tl.constexpr = folded[0].shape[0]  # type: ignore[misc]
    units = tl.full([HEADS], 1.0, tl.float32)
    scale = 1.0
    if dtype == tl.float16:
        largest = tl.max(tl.abs(folded[0]), 1)  # type: ignore[misc]
        for g in tl.static_range(1, len(folded)):
            largest = tl.maximum(largest, tl.max(tl.abs(folded[g]), 1))
        largest = tl.max(largest.reshape(HEADS, ROWS // HEADS), 1)
        units = power_of_two_above(tl.minimum(tl.maximum(largest, 2.0**-80), 2.0**100)) * 2.0**-15
        scale = _repeat_rows(1.0 / units[:, None], ROWS)
    tiles = ()
    for g in tl.static_range(len(folded)):
        tiles += ((folded[g] * scale).to(dtype),)
    return tiles, units


@triton.jit
def _cache_rows(table_ptr, key, inside, stride_b, stride_n, stride_tp, PAGE_SIZE: tl.constexpr):
    """Where row `key` of a head's cache begins, in elements; reads no entry of the table that is not `inside`."""
    if PAGE_SIZE > 0:
        page = tl.load(table_ptr + (key // PAGE_SIZE).to(tl.int64) * stride_tp, mask=inside, other=0).to(tl.int64)
        rows = page * stride_b + (key % PAGE_SIZE).to(tl.int64) * stride_n
    else:
        rows = key.to(tl.int64) * stride_n
    return rows


@triton.jit
def _load_rows(x_ptr, rows, dim, inside, stride_d, HEAD_DIM: tl.constexpr):
    """Rows that begin at `rows`, zero where not `inside`: `[len(rows), len(dim)]`. Never reads outside."""
    mask = inside[:, None]
    if dim.shape[0] != HEAD_DIM:
        mask = mask & (dim < HEAD_DIM)[None, :]
    return tl.load(x_ptr + rows[:, None] + dim[None, :].to(tl.int64) * stride_d, mask=mask, other=0.0)


@triton.jit
def _finite(maximum):
    """A maximum to subtract from scores; 0 where there was no score, so that 2^(-inf - 0) is 0 and not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _repeat_rows(x, ROWS: tl.constexpr):
    """Every row of x several times in turn: `[ROWS, columns]`."""
    HEADS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    return tl.broadcast_to(x[:, None, :], [HEADS, ROWS // HEADS, COLUMNS]).reshape(ROWS, COLUMNS)
