"""The kernel of the fused forward: plain flash attention over longer queries and keys (the expanded form).

`c[i, j] = unit * Q'[i] . K'[j]` with rows of `DEPTH = min(cq, ck) * head_dim` numbers, online softmax, `out = p V`.
Scores within the causal band come ready from `prepare`; every other score is a product that needs no mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from mta_kernels.conv_attention.triton.launch import describe_heads, describe_rows
from mta_kernels.conv_attention.triton.prepare import LN_2

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _conv_attention_fwd_kernel(
    q_desc, k_desc, v_desc, q_head_desc, k_head_desc, k_masked_desc, v_masked_desc,
    units_ptr, band_ptr, spans_ptr, out_ptr, logsumexp_ptr,
    stride_qh, stride_qn, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_lb, stride_lh,
    heads, k_group, v_group, query_rows, key_rows, heads_at_once, all_heads, one,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr,
    BAND: tl.constexpr, BAND_PITCH: tl.constexpr, DEPTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DEPTH: tl.constexpr, HEAD_DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr, Q_IN_REGISTERS: tl.constexpr, MASKED_STAGES: tl.constexpr, MASKED_N: tl.constexpr,
    SUMS_IN_THREADS: tl.constexpr,
    ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, which are among the last M = query_rows of N = key_rows positions.

    q_desc `[B*Hq, M, DEPTH]`, k_desc `[B*H, N, DEPTH]` each shared by `k_group` query heads,
    v_desc `[B, Hkv, N, D]`, each shared by `v_group`, units `[B*Hq]` or None, band `[B*Hq, M, BAND_PITCH]`, out
    `[B, Hq, M, D]` and logsumexp `[B, Hq, M]` (of the convolved scores, natural units) of contiguous rows.
    They are descriptors made on the host, for the copy engine, or pointers where a GPU has none. q_head_desc and
    k_head_desc describe wider slices: the HEAD_DEPTH columns before the last BLOCK_DEPTH ones; k_masked_desc and
    v_masked_desc the tiles of MASKED_N keys at the diagonal.
    SPANS limits row i to the keys from `spans[0, i]` to before `spans[1, i]`, both nondecreasing, spans `[2, N]`.
    Q_IN_REGISTERS loads the queries once, in two slices; otherwise slices of BLOCK_DEPTH columns are read again for
    every key block. `one` is 1.0.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
    if not HOST_DESCRIPTORS:
        # Every row starts at a multiple of 16 bytes: 8 elements of 16 bits or 4 of 32.
        q_desc = describe_rows(q_desc, stride_qh, stride_qn, query_rows, DEPTH, BLOCK_M, BLOCK_DEPTH, ALIGNMENT)
        k_desc = describe_rows(k_desc, stride_kh, stride_kn, key_rows, DEPTH, BLOCK_N, BLOCK_DEPTH, ALIGNMENT)
        v_desc = describe_heads(v_desc, stride_vb, stride_vh, stride_vn, heads // v_group, key_rows, HEAD_DIM,
                                BLOCK_N, BLOCK_D, ALIGNMENT)  # fmt: skip
        k_masked_desc, v_masked_desc = k_desc, v_desc

    # The keys of `heads_at_once` heads stay in L2. Causal blocks near the end have the most keys:
    # start with them.
    query_blocks = tl.cdiv(query_rows, BLOCK_M)
    first_head = tl.program_id(0) // (heads_at_once * query_blocks) * heads_at_once
    heads_now = tl.minimum(heads_at_once, all_heads - first_head)
    program = tl.program_id(0) - first_head * query_blocks
    batch_head = first_head + program % heads_now
    first_query = (query_blocks - 1 - program // heads_now) * BLOCK_M
    query = first_query + tl.arange(0, BLOCK_M)
    inside = query < query_rows
    k_head = batch_head // k_group
    batch = batch_head // heads
    v_head = batch_head % heads // v_group

    unit = 1.0  # of scores, and of their maxima
    if units_ptr is not None:
        unit = tl.load(units_ptr + batch_head)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Finite: rows that saw no key yet need no case of their own.
    running_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    running_sum = tl.zeros([BLOCK_M, 4] if SUMS_IN_THREADS else [BLOCK_M], tl.float32)
    start, unmasked_start, unmasked_end, end = key_range(
        spans_ptr, first_query, query_rows, key_rows, CAUSAL, SPANS, BAND, BLOCK_M, BLOCK_N
    )
    masked_start = tl.maximum(unmasked_start, unmasked_end) if SPANS else unmasked_end
    band_rows = band_ptr + (batch_head.to(tl.int64) * query_rows + query) * BAND_PITCH
    first_seen, seen_end = tl.zeros([BLOCK_M], tl.int32), tl.zeros([BLOCK_M], tl.int32)
    if SPANS:
        first_seen = tl.load(spans_ptr + query, mask=inside, other=0)
        seen_end = tl.load(spans_ptr + key_rows + query, mask=inside, other=0)
    if Q_IN_REGISTERS:
        if HEAD_DEPTH > 0:
            q_head = _in_registers(q_head_desc, batch_head, first_query, 0, one, HEAD_DEPTH, BLOCK_M)
        else:
            q_head = 0
        q_tail = _in_registers(q_desc, batch_head, first_query, HEAD_DEPTH, one, BLOCK_DEPTH, BLOCK_M)
        # Softmax of a tile, then the scores of the next: their keys are copied meanwhile. Its values are multiplied
        # between the two slices of the depth. The tile before the first one has no weight.
        scores = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
        for first_key in tl.range(start - BLOCK_N, end - BLOCK_N, BLOCK_N):
            v = v_desc.load([batch, v_head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
            masked = first_key >= masked_start
            if SPANS:
                masked = masked | (first_key < unmasked_start)
            if masked:
                scores = _mask(scores, unit, band_rows, query, inside, first_key, first_seen, seen_end, query_rows,
                               key_rows, CAUSAL, SPANS, BAND, BLOCK_N, True)  # fmt: skip
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, unit, SUMS_IN_THREADS)
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            scores = _add_slice(scores, q_head, k_head_desc, k_head, first_key + BLOCK_N, 0, HEAD_DEPTH)
            accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None])
            scores = _add_slice(scores, q_tail, k_desc, k_head, first_key + BLOCK_N, HEAD_DEPTH, BLOCK_DEPTH)
        last_key = tl.maximum(end - 1, 0) // BLOCK_N * BLOCK_N
        v = v_desc.load([batch, v_head, last_key, 0]).reshape(BLOCK_N, BLOCK_D)
        scores = _mask(scores, unit, band_rows, query, inside, last_key, first_seen, seen_end, query_rows, key_rows,
                       CAUSAL, SPANS, BAND, BLOCK_N, True)  # fmt: skip
        p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, unit, SUMS_IN_THREADS)
        accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None])
        if end < 0:  # Never. With one use the compiler would move the loads of the queries into the loop.
            scores = _add_slice(scores, q_head, k_head_desc, k_head, end, 0, HEAD_DEPTH)
            scores = _add_slice(scores, q_tail, k_desc, k_head, end, HEAD_DEPTH, BLOCK_DEPTH)
            running_max = tl.max(scores, 1)
    else:
        if SPANS:
            for first_key in tl.range(start, unmasked_start, BLOCK_N, num_stages=MASKED_STAGES):
                scores = _score_tile(q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                                     DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, PRECISION)  # fmt: skip
                key = first_key + tl.arange(0, BLOCK_N)
                scores = tl.where(key[None, :] >= first_seen[:, None], scores, float("-inf"))
                v = v_desc.load([batch, v_head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
                p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, unit, SUMS_IN_THREADS)
                accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)
        # Flattened with the loop over slices, so that the copies run ahead over the end of a key block.
        for first_key in tl.range(unmasked_start, unmasked_end, BLOCK_N, flatten=True):
            scores = _score_tile(q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                                 DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, PRECISION)  # fmt: skip
            v = v_desc.load([batch, v_head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, unit, SUMS_IN_THREADS)
            accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)
        for first_key in tl.range(masked_start, end, MASKED_N, num_stages=MASKED_STAGES):
            scores = _score_tile(q_desc, k_masked_desc, batch_head, k_head, first_query, first_key, one,
                                 DEPTH, BLOCK_M, MASKED_N, BLOCK_DEPTH, PRECISION)  # fmt: skip
            scores = _mask(scores, unit, band_rows, query, inside, first_key, first_seen, seen_end, query_rows,
                           key_rows, CAUSAL, SPANS, BAND, MASKED_N, False)  # fmt: skip
            v = v_masked_desc.load([batch, v_head, first_key, 0]).reshape(MASKED_N, BLOCK_D)
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, unit, SUMS_IN_THREADS)
            accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)

    out_ptr += batch.to(tl.int64) * stride_ob + (batch_head % heads).to(tl.int64) * stride_oh
    logsumexp_ptr += batch.to(tl.int64) * stride_lb + batch_head % heads * stride_lh + query
    running_max *= unit
    if SUMS_IN_THREADS:
        running_sum = tl.sum(running_sum, 1)
    if SPANS:  # rows that see no key give zeros
        running_max = tl.where(running_sum == 0.0, float("-inf"), running_max)
        running_sum = tl.where(running_sum == 0.0, 1.0, running_sum)
    out = (accumulator / running_sum[:, None]).to(out_ptr.dtype.element_ty)
    dim = tl.arange(0, BLOCK_D)
    out_ptrs = out_ptr + query.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptrs, out, mask=inside[:, None] & (dim < HEAD_DIM)[None, :])
    tl.store(logsumexp_ptr, (running_max + tl.log2(running_sum)) * LN_2, mask=inside)


@triton.jit
def key_range(
    spans_ptr, first_query, query_rows, key_rows,
    CAUSAL: tl.constexpr, SPANS: tl.constexpr, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys that BLOCK_M queries see: the first, and those between which all of them see all: `start <= ..., end`.

    Returns start, unmasked_start, unmasked_end, end: multiples of BLOCK_N but for the end. Where the middle two
    cross there is no tile that all see, and tiles from the larger of them on may need every mask.
    """
    first_position = first_query + (key_rows - query_rows)
    last_query = tl.minimum(first_query + BLOCK_M, query_rows) - 1
    start = 0
    unmasked_start = 0
    if CAUSAL:
        unmasked_end = tl.maximum(first_position - BAND + 1, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(first_position + BLOCK_M, key_rows)
    else:
        unmasked_end = key_rows // BLOCK_N * BLOCK_N
        end = key_rows
    if SPANS:
        start = tl.load(spans_ptr + first_query) // BLOCK_N * BLOCK_N
        if not CAUSAL:
            unmasked_end = tl.load(spans_ptr + key_rows + first_query) // BLOCK_N * BLOCK_N
            end = tl.load(spans_ptr + key_rows + last_query)
        all_seen = tl.cdiv(tl.load(spans_ptr + last_query), BLOCK_N) * BLOCK_N
        unmasked_start = tl.minimum(all_seen, tl.maximum(unmasked_end, start))
    return start, unmasked_start, unmasked_end, end


@triton.jit
def _score_tile(
    q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
    DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolved scores of a tile, in units of its head: `[BLOCK_M, BLOCK_N]`, by slices of the depth."""
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, DEPTH, BLOCK_DEPTH):
        q = q_desc.load([batch_head, first_query, start]).reshape(BLOCK_M, BLOCK_DEPTH)
        k = k_desc.load([k_head, first_key, start]).reshape(BLOCK_N, BLOCK_DEPTH)
        if PRECISION == "ieee":
            # Sums of short sums round less than one long sum; `one` keeps the compiler from merging them.
            scores += tl.dot(q, k.T, input_precision=PRECISION) * one
        else:
            scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
    return scores


@triton.jit
def _in_registers(q_desc, batch_head, first_query, start, one, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """A slice of the queries, `[BLOCK_M, WIDTH]`."""
    q = q_desc.load([batch_head, first_query, start]).reshape(BLOCK_M, WIDTH)
    # An operand that comes from arithmetic stays in registers; a plain load is read from shared memory.
    return (q.to(tl.float32) * one).to(q.dtype)


@triton.jit
def _add_slice(scores, q, k_desc, k_head, first_key, start, WIDTH: tl.constexpr):
    """`scores` plus the product of a slice of the queries with the same slice of the keys."""
    if WIDTH > 0:
        k = k_desc.load([k_head, first_key, start]).reshape(scores.shape[1], WIDTH)
        scores = tl.dot(q, k.T, scores)
    return scores


@triton.jit
def _mask(
    scores, unit, band_rows, query, inside, first_key, first_seen, seen_end, query_rows, key_rows,
    CAUSAL: tl.constexpr, SPANS: tl.constexpr, BAND: tl.constexpr, BLOCK_N: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """A tile of scores with the band's scores in place, and -inf for keys that a query does not see.

    `band_rows [BLOCK_M]` points to the rows of the band. It is inserted by diagonals: a number a row, spread over the
    columns, needs no change of layout. UNROLLED is for a pipelined loop, which cannot contain another loop; tiles that
    fill the registers have no room for it.
    """
    key = first_key + tl.arange(0, BLOCK_N)
    if CAUSAL:
        last_column = query + (key_rows - query_rows) - first_key  # that a query sees
        down = 1.0 / unit  # the band's scores are in base-2 units
        if UNROLLED:
            for diagonal in tl.static_range(BAND):
                scores = _put_diagonal(scores, down, band_rows, inside, last_column, diagonal, BLOCK_N)
        else:
            for diagonal in tl.range(BAND, num_stages=1):
                scores = _put_diagonal(scores, down, band_rows, inside, last_column, diagonal, BLOCK_N)
        scores = tl.where(tl.arange(0, BLOCK_N)[None, :] <= last_column[:, None], scores, float("-inf"))
    elif SPANS:
        scores = tl.where(key[None, :] < seen_end[:, None], scores, float("-inf"))
    else:
        scores = tl.where((key < key_rows)[None, :], scores, float("-inf"))
    if SPANS:
        scores = tl.where(key[None, :] >= first_seen[:, None], scores, float("-inf"))
    return scores


@triton.jit
def _put_diagonal(scores, down, band_rows, inside, last_column, diagonal, BLOCK_N: tl.constexpr):
    near = tl.load(band_rows + diagonal, mask=inside, other=0.0) * down
    columns = tl.arange(0, BLOCK_N)[None, :]
    return tl.where(columns == (last_column - diagonal)[:, None], near[:, None], scores)


@triton.jit
def _softmax(running_max, running_sum, scores, unit, SUMS_IN_THREADS: tl.constexpr):
    """Online softmax (arXiv 2205.14135) of one more tile of scores, in base 2 when they are multiplied by `unit`.

    Returns `p`, the factor that rescales earlier sums, and the new running maximum and sum. SUMS_IN_THREADS keeps four
    sums a row, of the columns that one thread holds in the layout of a product: threads exchange no sums until the end.
    """
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    p = tl.exp2((scores - new_max[:, None]) * unit)
    rescale = tl.exp2((running_max - new_max) * unit)
    if SUMS_IN_THREADS:
        # A thread holds columns 2t and 2t + 1 of every 8.
        part = tl.sum(tl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 4, 2), 1), 2)
        running_sum = running_sum * rescale[:, None] + part
    else:
        running_sum = running_sum * rescale + tl.sum(p, 1)
    return p, rescale, new_max, running_sum
