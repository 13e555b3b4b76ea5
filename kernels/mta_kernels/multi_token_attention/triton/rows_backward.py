"""The backward of `rows`: from a row's gradients of mixed probabilities to gradients of scores, all heads at a time.

With the logits `l = pre(scores)` and `p = exp(l - logsumexp)`: `dp = post^T(grad)`, `delta = sum p * dp` over the row,
`dl = p * (dp - delta)`, and the scores have the gradient `pre^T(dl)`. The kernel reads a row twice, for delta and to
write, or once where delta is known. The gradients of the mixings are `dpre[h, g] = sum dl_h scores_g` and `dpost[g, h]
= sum p_g grad_h`. Each program sums them over its rows of every chunk into its own buffer, so the results are the same
from run to run.
"""

from __future__ import annotations

import functools
import operator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mta_kernels.conv_attention.triton.launch import launch
from mta_kernels.conv_attention.triton.prepare import LN_2, LOG2_E, dot_precision
from mta_kernels.gpu_limits import sm_count
from mta_kernels.multi_token_attention.triton.chunks import Chunk, seen_keys, stored_end, stored_from
from mta_kernels.multi_token_attention.triton.rows import (
    load_keys,
    load_mix,
    matrix_strides,
    mixed,
    or_scores,
    row_signature,
    row_statistics,
    row_tile,
    store_keys,
    store_zeros,
)

# Beyond it, the rounding of a logsumexp may exceed the range of an exponential: the row's logits are summed again.
LARGE = tl.constexpr(2.0**20)
# Keys of a tile times heads, programs an SM, warps, pipeline stages.
BACKWARD = {"tile": 2048, "programs": 4, "num_warps": 4, "stages": 3}


@triton.jit
def _probabilities(scores, pre, logsumexp, residual, key, start, end, PRE: tl.constexpr, PRECISION: tl.constexpr):
    """`exp(pre(scores) - logsumexp - residual)`, zero where a key is not seen: `[keys, HEADS]`."""
    logits = mixed(scores, pre, PRE, PRECISION)
    exponent = (logits - logsumexp[None, :] - residual[None, :]) * LOG2_E
    p = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.where(((key >= start) & (key < end))[:, None], p, 0.0)


@triton.jit
def row_unit(loss_scale_ptr, batch, position, counted, SCALED: tl.constexpr, DOCUMENTS: tl.constexpr):
    """One over the loss scale of a row's document or sequence, by which its stored gradients are multiplied."""
    if not SCALED:
        return 1.0
    return 1.0 / tl.load(loss_scale_ptr + (position if DOCUMENTS else batch), mask=counted, other=1.0)


@triton.jit
def add_partial(partial_ptr, total, HEADS: tl.constexpr):
    """Adds `total [HEADS, HEADS]` to this program's sums."""
    head = tl.arange(0, HEADS)
    place = partial_ptr + tl.program_id(0) * (HEADS * HEADS) + head[:, None] * HEADS + head[None, :]
    tl.store(place, tl.load(place) + total)


@triton.jit(do_not_specialize=["rows", "first_position", "first_row", "query_rows", "key_rows", "above", "total_rows"])
def _mix_rows_backward_kernel(
    scores_ptr, grad_ptr, pre_ptr, post_ptr, logsumexp_ptr, corrections_ptr, delta_ptr, loss_scale_ptr, documents_ptr,
    dpre_ptr, dpost_ptr,
    stride_pre_out, stride_pre_in, stride_post_in, stride_post_out, stride_lb, stride_lh, stride_ln,
    heads, rows, pitch, first_position, first_row, query_rows, key_rows, above, owned, total_rows,
    PRE: tl.constexpr, POST: tl.constexpr, WRITE: tl.constexpr, KNOWN: tl.constexpr, SCALED: tl.constexpr,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, CONVOLVED: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr,
    LANES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`grad [B, H, rows, pitch]` of mixed probabilities becomes the scores'; WRITE turns scores into probabilities.

    Both are then zero at keys that are not seen. The owned rows alone count for dpre and dpost `[programs, HEADS,
    HEADS]`. logsumexp `[B, H, M]` is of all queries. With KNOWN, delta `[B, H, rows]` is of the probabilities as
    stored, and corrections are as `_mix_rows_kernel` writes them.
    """
    dtype = scores_ptr.dtype.element_ty
    pitch = tl.multiple_of(pitch, 8)
    head = tl.arange(0, HEADS)
    pre, post, pre_back, post_back = 0, 0, 0, 0
    dpre = tl.zeros([HEADS, HEADS], tl.float32)
    dpost = tl.zeros([HEADS, HEADS], tl.float32)
    if PRE:
        pre = load_mix(pre_ptr, heads, stride_pre_in, stride_pre_out, HEADS).to(dtype)
        pre_back = load_mix(pre_ptr, heads, stride_pre_out, stride_pre_in, HEADS).to(dtype)
    if POST:
        post = load_mix(post_ptr, heads, stride_post_in, stride_post_out, HEADS).to(dtype)
        post_back = load_mix(post_ptr, heads, stride_post_out, stride_post_in, HEADS).to(dtype)
    for index in range(tl.program_id(0), total_rows, tl.num_programs(0)):
        batch = (index // rows).to(tl.int64)
        row = index % rows
        place = ((batch * heads + head[:, None]) * rows + row) * pitch  # [HEADS, 1]
        scores_row, grad_row = scores_ptr + place, grad_ptr + place
        start, end = seen_keys(row, first_position, first_row, query_rows, key_rows, documents_ptr, CAUSAL, DOCUMENTS)
        first_stored = stored_from(row, first_position, documents_ptr, DOCUMENTS, CONVOLVED)
        end_stored = stored_end(row, first_position, pitch, CAUSAL, CONVOLVED)
        logsumexp = tl.load(
            logsumexp_ptr + batch * stride_lb + head * stride_lh + (first_row + row) * stride_ln,
            mask=(head < heads) & (end > start), other=0.0,
        )  # fmt: skip
        first_tile = start // C * C
        if KNOWN:
            place_of_row = (batch * heads + head) * rows + row
            inside = (head < heads) & (end > start)
            delta = tl.load(delta_ptr + place_of_row, mask=inside, other=0.0)
            residual = tl.load(corrections_ptr + place_of_row, mask=inside, other=0.0)
            # Divided by the stored probabilities' sum: where one key has nearly all, dl is only a small difference.
            delta /= tl.load(corrections_ptr + heads * total_rows + place_of_row, mask=inside, other=1.0)
            factor = tl.full([HEADS], 1.0, tl.float32)
        else:
            residual = tl.zeros([HEADS], tl.float32)
            large = tl.abs(logsumexp) > LARGE  # for each head by itself: other heads may be independent of it
            some = tl.max(large.to(tl.int32), 0) > 0
            maximum, total = row_statistics(
                scores_row, pre, start, tl.where(some, end, 0), heads, PRE, HEADS, C, LANES, STAGES, PRECISION
            )
            logsumexp = tl.where(large, maximum + tl.log2(tl.where(large, total, 1.0)) * LN_2, logsumexp)
            sums = tl.zeros([LANES, HEADS], tl.float32)
            total = tl.zeros([LANES, HEADS], tl.float32)
            for first in tl.range(first_tile, end, C, num_stages=STAGES):
                key = first + tl.arange(0, C)
                scores = load_keys(scores_row, key, start, end, heads, HEADS)  # [HEADS, C]
                dp = mixed(load_keys(grad_row, key, start, end, heads, HEADS), post_back, POST, PRECISION)  # [C, HEADS]
                p = _probabilities(scores, pre, logsumexp, residual, key, start, end, PRE, PRECISION)
                sums += tl.sum(tl.reshape(p * dp, [C // LANES, LANES, HEADS]), 0)
                total += tl.sum(tl.reshape(p, [C // LANES, LANES, HEADS]), 0)
            # The sum is one up to the rounding of the logsumexp, which is as coarse as the largest logit's.
            total = tl.sum(total, 0)
            factor = 1.0 / tl.where(total == 0.0, 1.0, total)
            delta = tl.sum(sums, 0) * factor
        counted = (row >= above) & (row < above + owned)
        dpre_before, dpost_before = dpre, dpost
        if SCALED:  # the loss scale may differ from the row before
            dpre = tl.zeros([HEADS, HEADS], tl.float32)
            dpost = tl.zeros([HEADS, HEADS], tl.float32)
        if first_stored < first_tile:
            store_zeros(grad_row, first_stored, first_tile, heads, HEADS, C)
            if WRITE:
                store_zeros(scores_row, first_stored, first_tile, heads, HEADS, C)
        for first in tl.range(first_tile, end, C, num_stages=STAGES):
            key = first + tl.arange(0, C)
            scores = load_keys(scores_row, key, start, end, heads, HEADS)  # [HEADS, C]
            grad = load_keys(grad_row, key, start, end, heads, HEADS)  # [HEADS, C]
            p = _probabilities(scores, pre, logsumexp, residual, key, start, end, PRE, PRECISION)  # [C, HEADS]
            p *= factor[None, :]
            dl = p * (mixed(grad, post_back, POST, PRECISION) - delta[None, :])
            seen = ((key >= start) & (key < end))[:, None]  # even in a row of NaN: the tile has unseen keys, too
            p, dl = tl.where(seen, p, 0.0), tl.where(seen, dl, 0.0)
            p_rounded, dl_rounded = p.to(dtype), dl.to(dtype)
            if POST:
                dpost = tl.dot(tl.where(counted, grad, 0.0).to(dtype), p_rounded, dpost, input_precision=PRECISION)
            if PRE:
                dpre = tl.dot(tl.where(counted, scores, 0.0).to(dtype), dl_rounded, dpre, input_precision=PRECISION)
            if WRITE:
                if POST:
                    p = tl.dot(p_rounded, post, input_precision=PRECISION)
                store_keys(scores_row, key, p, first_stored, end_stored, heads, HEADS)
            if PRE:
                dl = tl.dot(dl_rounded, pre_back, input_precision=PRECISION)
            store_keys(grad_row, key, dl, first_stored, end_stored, heads, HEADS)
        if SCALED:
            unit = row_unit(loss_scale_ptr, batch, first_position + row, counted, SCALED, DOCUMENTS)
            dpre = dpre_before + dpre * unit
            dpost = dpost_before + dpost * unit
        tail = (tl.maximum(end, first_tile) + (C - 1)) // C * C
        store_zeros(grad_row, tail, end_stored, heads, HEADS, C)
        if WRITE:
            store_zeros(scores_row, tail, end_stored, heads, HEADS, C)
    if PRE:
        add_partial(dpre_ptr, dpre, HEADS)
    if POST:
        add_partial(dpost_ptr, dpost, HEADS)


class MixingGradients:
    """The gradients of both mixings while chunks add to them: the sums of each program of the kernels."""

    def __init__(self, like: Tensor, heads: int) -> None:
        self.heads, self._device = heads, like.device
        self.programs = BACKWARD["programs"] * sm_count(like.device)
        self._padded = row_tile(heads, like.element_size(), BACKWARD)["HEADS"]
        self.others: list[tuple[Tensor | None, Tensor | None]] = []

    @functools.cached_property
    def partial(self) -> Tensor:
        """`[2, programs, from, to]`, of pre (g, h) and of post (h, g): allocated when Triton's kernels add to it."""
        shape = 2, self.programs, self._padded, self._padded
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    def add(self, dpre: Tensor | None, dpost: Tensor | None) -> None:
        """Add `[H, H]` sums of other kernels."""
        self.others.append((dpre, dpost))

    def dpre(self) -> Tensor:
        """`[H, H]` (out, in)."""
        return self._summed(0)

    def dpost(self) -> Tensor:
        """`[H, H]` (in, out)."""
        return self._summed(1)

    def _summed(self, which: int) -> Tensor:
        found = [x for both in self.others if (x := both[which]) is not None]
        if "partial" in self.__dict__:
            found.append(self.partial[which].sum(0)[: self.heads, : self.heads].T)
        return functools.reduce(operator.add, found)


def mix_rows_backward(
    scores: Tensor, grad: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor,
    gradients: MixingGradients, *, chunk: Chunk, loss_scale: Tensor | None = None, write: bool = True,
    delta: Tensor | None = None, corrections: Tensor | None = None,
) -> None:  # fmt: skip
    """grad, the mixed probabilities' gradient, becomes the scores'; if `write`, scores become mixed probabilities.

    scores and grad `[B, H, rows, pitch]`, logsumexp `[B, H, M]` of all queries. The chunk's owned rows add to the
    `gradients` of the mixings, divided by the `loss_scale` of `backward.gradient_scale`. The kernel sums `delta
    [B, H, rows]` float32 unless it is given, for the probabilities that `mix_rows` stored, with its `corrections`.
    """
    batch, heads, rows, pitch = scores.shape
    launch(
        _mix_rows_backward_kernel, min(batch * rows, gradients.programs),
        row_signature(chunk, pre_mix, post_mix, logsumexp, loss_scale),
        scores, grad, *or_scores(scores, pre_mix, post_mix), logsumexp,
        *(logsumexp if x is None else x for x in (corrections, delta, loss_scale)),
        scores if chunk.documents is None else chunk.documents, *gradients.partial.unbind(),
        *matrix_strides(pre_mix), *matrix_strides(post_mix), *logsumexp.stride(),
        heads, rows, pitch, chunk.first_position, chunk.first_row, chunk.query_rows, chunk.key_rows, chunk.above,
        chunk.owned, batch * rows,
        PRE=pre_mix is not None, POST=post_mix is not None, WRITE=write,
        KNOWN=delta is not None, SCALED=loss_scale is not None, CAUSAL=chunk.causal,
        DOCUMENTS=chunk.documents is not None, CONVOLVED=chunk.convolved,
        **row_tile(heads, scores.element_size(), BACKWARD), STAGES=BACKWARD["stages"],
        PRECISION=dot_precision(scores.dtype), num_warps=BACKWARD["num_warps"],
    )  # fmt: skip
