"""The fused forward: plain flash attention over longer queries and keys (the expanded form).

`c[i, j] = Q'[i] . K'[j]` with rows of `DEPTH = min(cq, ck) * head_dim` numbers, online softmax, `out = p V`.
Scores within the causal band come ready from `prepare`; every other score is a product that needs no mask.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from mta_kernels.conv_attention.arguments import head_parts
from mta_kernels.conv_attention.triton.launch import (
    call_signature,
    cdiv,
    dependent_launches,
    describe_heads,
    describe_rows,
    launch,
    next_power_of_2,
    operand,
)
from mta_kernels.conv_attention.triton.prepare import (
    LN_2,
    NO_MARGINS,
    Margins,
    Prepared,
    dot_precision,
    prepare,
)
from mta_kernels.conv_attention.triton.tuning import Key, best_config
from mta_kernels.gpu_limits import capability, shared_memory_limit

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# On Hopper: bytes of expanded keys of the heads whose programs take turns, half of its L2; and the most columns of a
# tile at the diagonal, of whose products the mask throws away fewer the narrower it is.
KEYS_IN_L2, MASKED_COLUMNS = 24 * 2**20, 128


@triton.jit
def _conv_attention_fwd_kernel(
    q_desc, k_desc, v_desc, q_head_desc, k_head_desc, k_masked_desc, v_masked_desc,
    band_ptr, spans_ptr, out_ptr, logsumexp_ptr,
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
    v_desc `[B, Hkv, N, D]`, each shared by `v_group`, band `[B*Hq, M, BAND_PITCH]`, out `[B, Hq, M, D]` and
    logsumexp `[B, Hq, M]` (of the convolved scores, natural units) of contiguous rows.
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

    # Some heads at a time, whose keys stay in L2. Causal blocks near the end have the most keys: start with them.
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
                scores = _mask(scores, band_rows, query, inside, first_key, first_seen, seen_end, query_rows, key_rows,
                               CAUSAL, SPANS, BAND, BLOCK_N, True)  # fmt: skip
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, SUMS_IN_THREADS)
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            scores = _add_slice(scores, q_head, k_head_desc, k_head, first_key + BLOCK_N, 0, HEAD_DEPTH)
            accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None])
            scores = _add_slice(scores, q_tail, k_desc, k_head, first_key + BLOCK_N, HEAD_DEPTH, BLOCK_DEPTH)
        last_key = tl.maximum(end - 1, 0) // BLOCK_N * BLOCK_N
        v = v_desc.load([batch, v_head, last_key, 0]).reshape(BLOCK_N, BLOCK_D)
        scores = _mask(scores, band_rows, query, inside, last_key, first_seen, seen_end, query_rows, key_rows,
                       CAUSAL, SPANS, BAND, BLOCK_N, True)  # fmt: skip
        p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, SUMS_IN_THREADS)
        accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None])
        if end < 0:  # Never. What has one use is moved there: a second one keeps the loads of the queries outside.
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
                p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, SUMS_IN_THREADS)
                accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)
        # Flattened with the loop over slices, so that the copies run ahead over the end of a key block.
        for first_key in tl.range(unmasked_start, unmasked_end, BLOCK_N, flatten=True):
            scores = _score_tile(q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                                 DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, PRECISION)  # fmt: skip
            v = v_desc.load([batch, v_head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, SUMS_IN_THREADS)
            accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)
        for first_key in tl.range(masked_start, end, MASKED_N, num_stages=MASKED_STAGES):
            scores = _score_tile(q_desc, k_masked_desc, batch_head, k_head, first_query, first_key, one,
                                 DEPTH, BLOCK_M, MASKED_N, BLOCK_DEPTH, PRECISION)  # fmt: skip
            scores = _mask(scores, band_rows, query, inside, first_key, first_seen, seen_end, query_rows, key_rows,
                           CAUSAL, SPANS, BAND, MASKED_N, False)  # fmt: skip
            v = v_masked_desc.load([batch, v_head, first_key, 0]).reshape(MASKED_N, BLOCK_D)
            p, rescale, running_max, running_sum = _softmax(running_max, running_sum, scores, SUMS_IN_THREADS)
            accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)

    if SUMS_IN_THREADS:
        running_sum = tl.sum(running_sum, 1)
    if SPANS:  # rows that see no key give zeros
        running_max = tl.where(running_sum == 0.0, float("-inf"), running_max)
        running_sum = tl.where(running_sum == 0.0, 1.0, running_sum)
    out = (accumulator / running_sum[:, None]).to(out_ptr.dtype.element_ty)
    dim = tl.arange(0, BLOCK_D)
    head = batch_head % heads
    out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_ptrs = out_ptr + query.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptrs, out, mask=inside[:, None] & (dim < HEAD_DIM)[None, :])
    logsumexp_ptr += batch.to(tl.int64) * stride_lb + head * stride_lh + query
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
    """Convolved scores of a tile, in base-2 units: `[BLOCK_M, BLOCK_N]`, by slices of the depth."""
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
    """`scores` and the product of a slice of the queries with that of the keys."""
    if WIDTH > 0:
        k = k_desc.load([k_head, first_key, start]).reshape(scores.shape[1], WIDTH)
        scores = tl.dot(q, k.T, scores)
    return scores


@triton.jit
def _mask(
    scores, band_rows, query, inside, first_key, first_seen, seen_end, query_rows, key_rows,
    CAUSAL: tl.constexpr, SPANS: tl.constexpr, BAND: tl.constexpr, BLOCK_N: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """A tile of scores with those of the band in place, and -inf for keys that a query does not see.

    `band_rows [BLOCK_M]` points to the rows of the band. It is put in by diagonals: a number a row, spread over the
    columns, needs no change of layout. UNROLLED is for a loop that is to be pipelined, which can have no other within;
    tiles that fill the registers have no room for it.
    """
    key = first_key + tl.arange(0, BLOCK_N)
    if CAUSAL:
        last_column = query + (key_rows - query_rows) - first_key  # that a query sees
        if UNROLLED:
            for diagonal in tl.static_range(BAND):
                scores = _put_diagonal(scores, band_rows, inside, last_column, diagonal, BLOCK_N)
        else:
            for diagonal in tl.range(BAND, num_stages=1):
                scores = _put_diagonal(scores, band_rows, inside, last_column, diagonal, BLOCK_N)
        scores = tl.where(tl.arange(0, BLOCK_N)[None, :] <= last_column[:, None], scores, float("-inf"))
    elif SPANS:
        scores = tl.where(key[None, :] < seen_end[:, None], scores, float("-inf"))
    else:
        scores = tl.where((key < key_rows)[None, :], scores, float("-inf"))
    if SPANS:
        scores = tl.where(key[None, :] >= first_seen[:, None], scores, float("-inf"))
    return scores


@triton.jit
def _put_diagonal(scores, band_rows, inside, last_column, diagonal, BLOCK_N: tl.constexpr):
    near = tl.load(band_rows + diagonal, mask=inside, other=0.0)
    columns = tl.arange(0, BLOCK_N)[None, :]
    return tl.where(columns == (last_column - diagonal)[:, None], near[:, None], scores)


@triton.jit
def _softmax(running_max, running_sum, scores, SUMS_IN_THREADS: tl.constexpr):
    """Online softmax (arXiv 2205.14135) of one more tile of base-2 scores.

    Gives `p`, by what sums so far are rescaled, and the new running maximum and sum. SUMS_IN_THREADS keeps four sums a
    row, of the columns that one thread holds in the layout of a product: threads exchange no sums until the end.
    """
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    p = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(running_max - new_max)
    if SUMS_IN_THREADS:
        # A thread holds columns 2t and 2t + 1 of every 8.
        part = tl.sum(tl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 4, 2), 1), 2)
        running_sum = running_sum * rescale[:, None] + part
    else:
        running_sum = running_sum * rescale + tl.sum(p, 1)
    return p, rescale, new_max, running_sum


@dataclass(frozen=True)
class ForwardConfig:
    """Tile sizes of the forward.

    `num_stages` is the depth of the copy pipeline, `masked_stages` that of the few tiles at the diagonal where these
    have a loop of their own: not with queries in registers.
    """

    block_m: int
    block_n: int
    block_depth: int
    q_in_registers: bool
    num_warps: int
    num_stages: int
    masked_stages: int

    def shared_memory(self, depth: int, block_d: int, element_size: int) -> int:
        """Bytes of shared memory that a program needs, rounded up a little."""
        slices = -(-depth // self.block_depth)
        slice_bytes = self.block_depth * element_size
        values = self.block_n * block_d * element_size
        if self.q_in_registers:
            loading = self.block_m * slice_bytes * slices
            stage = self.block_n * slice_bytes * slices + values
            needed = max(loading, self.num_stages * stage)
        else:
            stage = (self.block_m + self.block_n) * slice_bytes
            if slices == 1:  # no inner loop: the values are in the pipeline too
                stage += values
            needed = values + max(self.num_stages, self.masked_stages) * stage
        return needed + 1024


def conv_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *,
    causal: bool, scale: float, pad: int, head_chunk: int = 0, spans: Tensor | None = None,
    margins: Margins = NO_MARGINS, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Conv attention of `q [B, Hq, M, D]`, `k, v [B, Hkv, N, D]`, `weight [Hq, cq, ck]`.

    The queries are the last M of N positions; the convolution sees zeros above their first row. `head_chunk` query
    heads are worked on at a time, all if 0: the scratch memory is theirs alone. `spans [2, N]` int32 limits row i
    to the keys from `spans[0, i]` to before `spans[1, i]`, both nondecreasing, for M = N; k and v should be zeros
    where the convolution reaches past a span. With `margins` q and k have rows besides, for the convolution alone.
    Returns out `[B, Hq, M, D]`, in the dtype of q unless told, and the logsumexp of each row of convolved scores,
    `[B, Hq, M]` float32.
    """
    shape = (*q.shape[:2], q.shape[2] - margins.queries)
    out = torch.empty(*shape, q.shape[3], dtype=out_dtype or q.dtype, device=q.device)
    logsumexp = torch.empty(shape, dtype=torch.float32, device=q.device)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "pad": pad, "spans": spans, "margins": margins}
    if head_chunk in (0, q.shape[1]):
        _forward_heads(q, k, v, weight, out, logsumexp, **options)
    else:
        for part, kv_part in head_parts(q.shape[1], k.shape[1], head_chunk):
            heads = (x[:, part] for x in (out, logsumexp))
            _forward_heads(q[:, part], k[:, kv_part], v[:, kv_part], weight[part], *heads, **options)
    return out, logsumexp


def _forward_heads(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, *,
    causal: bool, scale: float, pad: int, spans: Tensor | None, margins: Margins,
) -> None:  # fmt: skip
    """Write the results of some heads."""
    signature = call_signature(q, k, v, weight, spans, out, logsumexp, options=(causal, pad, margins))
    prepared = prepare(q, k, v, weight, causal=causal, scale=scale, pad=pad, signature=signature, margins=margins)
    limits: dict[str, Any] = {
        "depth": prepared.queries.shape[2],
        "element_size": q.element_size(),
        "compute_capability": capability(q.device),
    }
    candidates = forward_candidates(**limits, block_d=value_block(q), shared_memory=shared_memory_limit(q.device))
    key = Key.of(q.dtype, q.shape[3], weight.shape[1:], causal, k.shape[2])
    config = best_config("forward", key, candidates, q.device)
    launch_forward(prepared, out, logsumexp, causal, spans, config, signature)


def heads_at_once(prepared: Prepared, causal: bool) -> int:
    """Heads whose programs take turns: on Hopper, where causal, as many as L2 has room for their keys; else one."""
    keys = prepared.keys
    if not causal or capability(keys.device) != (9, 0):
        return 1
    head_bytes = keys.shape[1] * keys.shape[2] * keys.element_size()
    return min(prepared.queries.shape[0], max(1, KEYS_IN_L2 // head_bytes))


def launch_forward(
    prepared: Prepared, out: Tensor, logsumexp: Tensor, causal: bool, spans: Tensor | None, config: ForwardConfig,
    signature: Hashable,
) -> None:  # fmt: skip
    """Run the fused kernel on prepared inputs into `out [B, Hq, M, D]` and `logsumexp [B, Hq, M]`."""
    batch, heads, query_rows, head_dim = out.shape
    queries, keys, values = prepared.queries, prepared.keys, prepared.values
    block_d = value_block(values)
    host_descriptors = capability(values.device)[0] >= 9
    dependent, depth = dependent_launches(values), queries.shape[2]
    head_depth = (cdiv(depth, config.block_depth) - 1) * config.block_depth if config.q_in_registers else 0
    q_head, k_head = (
        operand(x, [1, rows, head_depth], host_descriptors) if head_depth else None
        for x, rows in ((queries, config.block_m), (keys, config.block_n))
    )
    masked_n = min(config.block_n, MASKED_COLUMNS) if host_descriptors else config.block_n
    k_masked, v_masked = (
        (None, None)
        if config.q_in_registers or not host_descriptors
        else (operand(keys, [1, masked_n, config.block_depth], True), operand(values, [1, 1, masked_n, block_d], True))
    )
    launch(
        _conv_attention_fwd_kernel, cdiv(query_rows, config.block_m) * batch * heads, signature,
        operand(queries, [1, config.block_m, config.block_depth], host_descriptors),
        operand(keys, [1, config.block_n, config.block_depth], host_descriptors),
        operand(values, [1, 1, config.block_n, block_d], host_descriptors),
        q_head, k_head, k_masked, v_masked,
        prepared.band, spans, out, logsumexp,
        *queries.stride()[:2], *keys.stride()[:2], *values.stride()[:3], *out.stride()[:2], *logsumexp.stride()[:2],
        heads, batch * heads // keys.shape[0], heads // values.shape[1], query_rows, values.shape[2],
        heads_at_once(prepared, causal), batch * heads, 1.0,
        HOST_DESCRIPTORS=host_descriptors, CAUSAL=causal, SPANS=spans is not None,
        BAND=prepared.band_width, BAND_PITCH=prepared.band.shape[-1], DEPTH=depth, HEAD_DIM=head_dim,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_DEPTH=config.block_depth,
        HEAD_DEPTH=head_depth, BLOCK_D=block_d,
        Q_IN_REGISTERS=config.q_in_registers, MASKED_STAGES=config.masked_stages, MASKED_N=masked_n,
        SUMS_IN_THREADS=capability(values.device)[0] == 9 and not config.q_in_registers,
        ALIGNMENT=16 // values.element_size(), PRECISION=dot_precision(values.dtype),
        DEPENDENT_LAUNCH=dependent, num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=dependent,
    )  # fmt: skip


@functools.cache
def forward_candidates(
    *, depth: int, block_d: int, element_size: int, compute_capability: tuple[int, int], shared_memory: int
) -> tuple[ForwardConfig, ...]:
    """Tile sizes that fit in `shared_memory` bytes a program on a GPU of this capability, the best guess first."""
    configs = []
    if element_size == 4:
        if block_d <= 128:
            configs.append(ForwardConfig(64, 32, 32, False, 4, 2, 2))
        configs.append(ForwardConfig(32, 32, 32, False, 4, 2, 2))
    elif compute_capability[0] >= 9:
        slices = -(-depth // 128)
        if compute_capability[0] == 9 and slices <= (3 if block_d <= 64 else 2 if block_d <= 128 else 0):
            # Two programs an SM.
            configs.append(ForwardConfig(64, 64, 128, True, 4, 3 if slices == 1 else 2, 1))
        if compute_capability[0] == 9 and block_d <= 128:
            configs.append(ForwardConfig(128, 256, 64, False, 8, 3, 2))
        if compute_capability[0] != 10 or block_d <= 128:  # sm_100: accumulators of 256 columns fill the tensor memory
            configs += [ForwardConfig(128, 128, 64, False, 8, stages, 2) for stages in (4, 5, 3)]
    if element_size == 2:
        configs += [
            ForwardConfig(128, 64 if block_d <= 128 else 32, 64, False, 8, 3, 2),
            ForwardConfig(64, 64 if block_d <= 128 else 32, 64, False, 4, 2, 2),
            ForwardConfig(64, 32, 32, False, 4, 2, 2),
        ]
    fitting = tuple(c for c in configs if c.shared_memory(depth, block_d, element_size) <= shared_memory)
    if not fitting:
        raise ValueError(
            f"the smallest tiles for depth {depth} and head_dim up to {block_d} need more than "
            f"the {shared_memory} bytes of shared memory of this GPU; backend='reference' needs none"
        )
    return fitting


def value_block(v: Tensor) -> int:
    """Columns of a tile of values: head_dim as a power of two, and 128 bytes at least.

    Triton 3.6 reads narrower, differently swizzled tiles wrongly on Hopper when the loop is not pipelined.
    """
    return max(128 // v.element_size(), next_power_of_2(v.shape[3]))
