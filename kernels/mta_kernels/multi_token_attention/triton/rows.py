"""Rows of stored scores, all heads at a time: mixes heads, normalises, and mixes again, in place.

A program takes rows in turn, with two passes each: for the row's maximum and sum, and to write. A tile is C keys of all
heads, keys first, so that one matrix product's result is the next one's operand in place. Maxima and sums are kept
apart for each of LANES keys until a row's end: threads synchronise once a row.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.launch import call_signature, launch, next_power_of_2
from mta_kernels.conv_attention.triton.prepare import LN_2, LOG2_E, dot_precision
from mta_kernels.gpu_limits import sm_count
from mta_kernels.multi_token_attention.triton.chunks import Chunk, seen_keys, stored_end, stored_from

# Keys of a tile times heads, programs an SM, warps, pipeline stages: for the forward.
FORWARD = {"tile": 4096, "programs": 4, "num_warps": 4, "stages": 3}
# A logsumexp up to this is rounded by at most 3e-5 of a probability, little compared to the rounding to 16 bits.
COARSE = tl.constexpr(2.0**10)
SEGMENTS = tl.constexpr(128)  # sums of a row that are read at a time
LOWEST = tl.constexpr(-1e38)  # below every logit, and finite: unseen keys cause no NaN


@triton.jit
def load_mix(mix_ptr, heads, stride_from, stride_to, HEADS: tl.constexpr):
    """`[HEADS, HEADS]`, zero past the heads; the first index is the input head."""
    head = tl.arange(0, HEADS)
    inside = (head < heads)[:, None] & (head < heads)[None, :]
    return tl.load(mix_ptr + head[:, None] * stride_from + head[None, :] * stride_to, mask=inside, other=0.0)


@triton.jit
def load_keys(row_ptr, key, start, end, heads, HEADS: tl.constexpr):
    """`[HEADS, keys]` of `row_ptr [HEADS, 1]`: whole groups of 8 keys that overlap start to end."""
    inside = (key >= start // 8 * 8) & (key < (end + 7) // 8 * 8)
    head = tl.arange(0, HEADS)
    return tl.load(row_ptr + key[None, :], mask=(head < heads)[:, None] & inside[None, :], other=0.0)


@triton.jit
def mixed(x, mix, MIX: tl.constexpr, PRECISION: tl.constexpr):
    """`[keys, HEADS]` in float32, mixed if there is a mixing, from `x [HEADS, keys]`."""
    if MIX:
        return tl.dot(tl.trans(x), mix, input_precision=PRECISION)
    return tl.trans(x).to(tl.float32)


@triton.jit
def store_keys(row_ptr, key, x, start, end, heads, HEADS: tl.constexpr):
    """`x [keys, HEADS]` to `row_ptr [HEADS, 1]`, the keys from start to end, multiples of 8."""
    head = tl.arange(0, HEADS)
    inside = (head < heads)[:, None] & ((key >= start) & (key < end))[None, :]
    tl.store(row_ptr + key[None, :], tl.trans(x.to(row_ptr.dtype.element_ty)), mask=inside)


@triton.jit
def store_zeros(row_ptr, start, end, heads, HEADS: tl.constexpr, C: tl.constexpr):
    """Zeros from key start to end, multiples of 8, of `row_ptr [HEADS, 1]`."""
    for first in range(start, end, C):
        key = first + tl.arange(0, C)
        store_keys(row_ptr, key, tl.zeros([C, HEADS], tl.float32), start, end, heads, HEADS)


@triton.jit
def row_statistics(row_ptr, pre, start, end, heads, MIX: tl.constexpr, HEADS: tl.constexpr,
                   C: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The maximum of a row's logits and the sum of `exp(logit - maximum)`: `[HEADS]` each."""
    highest = tl.full([LANES, HEADS], LOWEST, tl.float32)
    total = tl.zeros([LANES, HEADS], tl.float32)
    for first in tl.range(start // C * C, end, C, num_stages=STAGES):
        key = first + tl.arange(0, C)
        scores = load_keys(row_ptr, key, start, end, heads, HEADS)
        logits = mixed(scores, pre, MIX, PRECISION)  # [C, HEADS]
        logits = tl.where(((key >= start) & (key < end))[:, None], logits, -float("inf"))
        logits = tl.reshape(logits, [C // LANES, LANES, HEADS])
        higher = tl.maximum(highest, tl.max(logits, 0))
        total *= tl.exp2((highest - higher) * LOG2_E)
        total += tl.sum(tl.exp2((logits - higher[None, :, :]) * LOG2_E), 0)
        highest = higher
    maximum = tl.max(highest, 0)
    return maximum, tl.sum(total * tl.exp2((highest - maximum[None, :]) * LOG2_E), 0)


@triton.jit(do_not_specialize=["rows", "first_position", "first_row", "query_rows", "key_rows", "above", "total_rows",
                               "stride_sb", "stride_sh", "stride_sn", "stride_ss", "segment_keys"])  # fmt: skip
def _mix_rows_kernel(
    scores_ptr, out_ptr, pre_ptr, post_ptr, logsumexp_ptr, corrections_ptr, sums_ptr, documents_ptr,
    stride_pre_out, stride_pre_in, stride_post_in, stride_post_out, stride_lb, stride_lh, stride_ln,
    stride_sb, stride_sh, stride_sn, stride_ss,
    heads, rows, pitch, first_position, first_row, query_rows, key_rows, above, total_rows, segment_keys,
    PRE: tl.constexpr, POST: tl.constexpr, CORRECT: tl.constexpr, SUMMED: tl.constexpr, CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, CONVOLVED: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out = post(softmax(pre(scores)))` of rows of `scores [B, H, rows, pitch]`, and the logsumexp of `pre(scores)`.

    Writes the logsumexp into logsumexp `[B, H, M]` of all queries, except for the first `above` rows. With CORRECT,
    corrections `[2, B, H, rows]` receive the logsumexp's rounding error, and the sums of probabilities as stored. With
    SUMMED, rows whose given logsumexp is within COARSE in all heads are stored already, with sums `[B, H, rows,
    segments]` of `segment_keys` keys each. The kernel writes only their corrections.
    """
    dtype = scores_ptr.dtype.element_ty
    pitch = tl.multiple_of(pitch, 8)
    head = tl.arange(0, HEADS)
    pre, post = 0, 0
    if PRE:
        pre = load_mix(pre_ptr, heads, stride_pre_in, stride_pre_out, HEADS).to(dtype)
    if POST:
        post = load_mix(post_ptr, heads, stride_post_in, stride_post_out, HEADS).to(dtype)
    for index in range(tl.program_id(0), total_rows, tl.num_programs(0)):
        batch = (index // rows).to(tl.int64)
        row = index % rows
        place = ((batch * heads + head[:, None]) * rows + row) * pitch  # [HEADS, 1]
        row_ptr, out_row_ptr = scores_ptr + place, out_ptr + place
        start, end = seen_keys(row, first_position, first_row, query_rows, key_rows, documents_ptr, CAUSAL, DOCUMENTS)
        first_stored = stored_from(row, first_position, documents_ptr, DOCUMENTS, CONVOLVED)
        end_stored = stored_end(row, first_position, pitch, CAUSAL, CONVOLVED)
        logsumexp_row = logsumexp_ptr + batch * stride_lb + head * stride_lh + (first_row + row) * stride_ln
        corrections_row = corrections_ptr + (batch * heads + head) * rows + row
        computed: tl.constexpr = True
        if SUMMED:
            given = tl.load(logsumexp_row, mask=(head < heads) & (end > start), other=0.0)
            computed = tl.max(tl.abs(given), 0) > COARSE
            sums_row = sums_ptr + batch * stride_sb + head[:, None] * stride_sh + row.to(tl.int64) * stride_sn
            stored = tl.zeros([HEADS], tl.float32)
            for first in range(0, tl.cdiv(end, segment_keys), SEGMENTS):
                segment = first + tl.arange(0, SEGMENTS)
                there = (head < heads)[:, None] & (segment * segment_keys < end)[None, :]
                stored += tl.sum(tl.load(sums_row + segment[None, :] * stride_ss, mask=there, other=0.0), 1)
        if computed:
            maximum, total = row_statistics(row_ptr, pre, start, end, heads, PRE, HEADS, C, LANES, STAGES, PRECISION)
            total = tl.where(end > start, total, 1.0)
            factor = 1.0 / total
            inside = (head < heads) & (end > start) & (row >= above)
            log_total = tl.log2(total) * LN_2
            logsumexp = maximum + log_total
            tl.store(logsumexp_row, logsumexp, mask=inside)
            if CORRECT:
                tl.store(corrections_row, log_total - (logsumexp - maximum), mask=head < heads)
            first_tile = start // C * C
            if first_stored < first_tile:
                store_zeros(out_row_ptr, first_stored, first_tile, heads, HEADS, C)
            summed = tl.zeros([LANES, HEADS], tl.float32)
            for first in tl.range(first_tile, end, C, num_stages=STAGES):
                key = first + tl.arange(0, C)
                scores = load_keys(row_ptr, key, start, end, heads, HEADS)
                logits = mixed(scores, pre, PRE, PRECISION)  # [C, HEADS]
                p = tl.exp2(tl.minimum((logits - maximum[None, :]) * LOG2_E, 0.0, propagate_nan=tl.PropagateNan.ALL))
                p = tl.where(((key >= start) & (key < end))[:, None], p * factor[None, :], 0.0)
                if POST:
                    p = tl.dot(p.to(dtype), post, input_precision=PRECISION)
                if CORRECT:
                    p = p.to(dtype)
                    summed += tl.sum(tl.reshape(p.to(tl.float32), [C // LANES, LANES, HEADS]), 0)
                store_keys(out_row_ptr, key, p, first_stored, end_stored, heads, HEADS)
            if CORRECT:
                tl.store(corrections_row + heads * total_rows, tl.sum(summed, 0), mask=head < heads)
            store_zeros(out_row_ptr, (tl.maximum(end, first_tile) + (C - 1)) // C * C, end_stored, heads, HEADS, C)
        else:
            tl.store(corrections_row, tl.zeros([HEADS], tl.float32), mask=head < heads)
            tl.store(corrections_row + heads * total_rows, stored, mask=head < heads)


def mix_rows(
    scores: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor, *,
    chunk: Chunk, out: Tensor | None = None, corrections: Tensor | None = None,
    sums: tuple[Tensor, int] | None = None,
) -> None:  # fmt: skip
    """Turn `scores [B, H, rows, pitch]` into mixed probabilities, zero at unseen keys, in place or into `out`.

    `pre_mix [H, H]` (out, in) mixes the scores of heads, `post_mix [H, H]` (in, out) the probabilities. Writes the
    logsumexp into `logsumexp [B, H, M]` float32 of all queries, except for the chunk's rows above its own. `corrections
    [2, B, H, rows]` float32, if given, receive how much the logsumexp is too small, and the sum of a row's
    probabilities as stored. With `sums [B, H, rows, segments]`, each of so many keys and valid where a row sees one of
    these, `out` has all rows already. Only rows whose given logsumexp is beyond COARSE in a head are written again.
    """
    batch, heads, rows, pitch = scores.shape
    tile = row_tile(heads, scores.element_size(), FORWARD)
    launch(
        _mix_rows_kernel, min(batch * rows, FORWARD["programs"] * sm_count(scores.device)),
        row_signature(chunk, pre_mix, post_mix, logsumexp),
        scores, scores if out is None else out, *or_scores(scores, pre_mix, post_mix), logsumexp,
        logsumexp if corrections is None else corrections, logsumexp if sums is None else sums[0],
        scores if chunk.documents is None else chunk.documents,
        *matrix_strides(pre_mix), *matrix_strides(post_mix), *logsumexp.stride(),
        *((0, 0, 0, 0) if sums is None else sums[0].stride()),
        heads, rows, pitch, chunk.first_position, chunk.first_row, chunk.query_rows, chunk.key_rows, chunk.above,
        batch * rows, 0 if sums is None else sums[1],
        PRE=pre_mix is not None, POST=post_mix is not None, CORRECT=corrections is not None, SUMMED=sums is not None,
        CAUSAL=chunk.causal, DOCUMENTS=chunk.documents is not None, CONVOLVED=chunk.convolved, **tile,
        STAGES=FORWARD["stages"], PRECISION=dot_precision(scores.dtype), num_warps=FORWARD["num_warps"],
    )  # fmt: skip


def row_tile(heads: int, element_size: int, config: dict[str, int]) -> dict[str, int]:
    """The constants of a tile: heads, padded for a matrix product, keys, and keys of a round."""
    padded = max(16, next_power_of_2(heads))
    keys = max(32, config["tile"] * 2 // (padded * element_size))
    return {"HEADS": padded, "C": keys, "LANES": min(keys, 16 * config["num_warps"])}


def row_signature(chunk: Chunk, *tensors: Tensor | None) -> Any:
    """The signature of a launch."""
    return chunk.signature, call_signature(*tensors)


def or_scores(scores: Tensor, *mixings: Tensor | None) -> list[Tensor]:
    """The mixings, with the scores as a placeholder for None."""
    return [scores if mix is None else mix for mix in mixings]


def matrix_strides(mix: Tensor | None) -> tuple[int, int]:
    return (0, 0) if mix is None else (mix.stride(0), mix.stride(1))
