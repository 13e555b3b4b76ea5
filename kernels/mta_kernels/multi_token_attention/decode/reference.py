"""Decode of the whole multi-token attention as it is defined, in eager PyTorch: any device, any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import (
    autocast_dtype,
    can_be_read,
    cast_unless_float32,
    check_are_tensors,
    under_autocast,
)
from mta_kernels.conv_attention.reference import convolve_scores, gather_pages, repeat_heads
from mta_kernels.multi_token_attention.arguments import NormGate
from mta_kernels.multi_token_attention.decode.arguments import check_caches, check_step
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.mixers import Mixers, operation_of, with_dense_mixings
from mta_kernels.multi_token_attention.reference import mix_heads, norm_and_gate
from mta_kernels.operation import Operation
from mta_kernels.operator_gradients import check_not_mapped


def multi_token_attention_decode_reference(
    q_window: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    lengths: Tensor,
    state: DecodeState | None = None,
    pre_conv: Tensor | None = None,
    pre_mix: Tensor | None = None,
    post_conv: Tensor | None = None,
    post_mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    depth: int | None = None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    scale: float | None = None,
    pad_key: str = "both",
    block_table: Tensor | None = None,
) -> Tensor:
    """The newest row of causal multi-token attention from the caches, `[B, Hq, 1, D]`; changes `state` in place.

    Arguments are as for `multi_token_attention_decode`. Equals row `lengths - 1` of
    `multi_token_attention_reference`; a length of 0 gives zeros. Raises ValueError, TypeError or RuntimeError for
    arguments that do not fit.
    """
    given = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    after = NormGate.of(norm_weight, norm_eps, depth, gate_weight, gate_bias)
    check_step(q_window, k_cache, v_cache, lengths, given, after, pad_key, state, block_table)
    operation = operation_of(given, q_window.shape[3], causal=True, scale=scale, pad_key=pad_key)
    with torch.no_grad():
        out = newest_row(operation, q_window, k_cache, v_cache, with_dense_mixings(given), lengths, state, block_table)
        return norm_and_gate(out, *after.steps)


def newest_row(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, mixers: Mixers, lengths: Tensor,
    state: DecodeState | None, block_table: Tensor | None,
) -> Tensor:  # fmt: skip
    """Steps 1 to 7 for checked arguments, with dense mixings."""
    if block_table is not None:
        k_cache, v_cache = (gather_pages(cache, block_table) for cache in (k_cache, v_cache))
    column = torch.arange(k_cache.shape[2], device=k_cache.device)
    logits, _ = last_logits(operation, q_window, k_cache, mixers, lengths, 1)
    # A sequence without tokens sees one key, whose value is masked.
    seen = (column < lengths.clamp(min=1)[:, None])[:, None, None]
    logsumexp = logsumexp_of(logits, seen)
    probabilities = probabilities_of(logits, logsumexp, seen)
    if operation.post_conv is not None and mixers.post_conv is not None:
        if state is not None and operation.post_conv.query_taps > 1:
            _keep_row(state, logits, logsumexp, lengths)
            probabilities = torch.cat([_older(state, lengths, column), probabilities], dim=2)
        probabilities = convolve_scores(probabilities, mixers.post_conv, operation.post_conv)[:, :, -1:]
        probabilities = probabilities.masked_fill(~seen, 0)
    if mixers.post_mix is not None:
        probabilities = mix_heads(probabilities, mixers.post_mix.T, operation.post_mix)
    # A mask, not a product: a cache beyond its length may hold NaN, and 0 * NaN is NaN.
    values = v_cache.masked_fill((column >= lengths[:, None])[:, None, :, None], 0)
    return probabilities @ repeat_heads(values, q_window.shape[1])


def last_logits(
    operation: Operation, q_window: Tensor, k_cache: Tensor, mixers: Mixers, lengths: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Logits `[B, H, R, S]` of the last rows of sequences, and their positions `[B, R]`, below 0 before the first.

    R is `rows`, or less if the window has no more. Logits of keys that a row does not see are undefined.
    """
    heads, window = q_window.shape[1:3]
    window = min(window, operation.conv.query_taps - 1 + rows)
    row = lengths[:, None] - window + torch.arange(window, device=lengths.device)  # [B, W]
    queries = q_window[:, :, -window:].masked_fill((row < 0)[:, None, :, None], 0)
    keys = repeat_heads(k_cache, heads)
    # Scaled before it is rounded: in float16 a product of query and key may overflow where its score does not. Added to
    # zeros, since PyTorch 2.13 on a CPU writes nothing in bfloat16 where both factors, alpha and beta, are 0.
    scores = torch.baddbmm(
        queries.new_zeros(()), queries.flatten(0, 1), keys.flatten(0, 1).mT, alpha=operation.scale
    ).unflatten(0, queries.shape[:2])
    future = torch.arange(k_cache.shape[2], device=k_cache.device) > row[:, :, None]
    scores = scores.masked_fill(future[:, None], 0)  # rows before the first token see nothing
    if operation.pre_conv is not None and mixers.pre_conv is not None:
        scores = convolve_scores(scores, mixers.pre_conv, operation.pre_conv)
    scores = scores[:, :, -rows:]
    if mixers.pre_mix is not None:
        scores = mix_heads(scores, mixers.pre_mix, operation.pre_mix)
    return scores, row[:, -rows:]


def logsumexp_of(logits: Tensor, seen: Tensor) -> Tensor:
    """The logsumexp of each row's logits where `seen`, in float32 or wider: `[B, H, R]`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.logsumexp(wide.masked_fill(~seen, float("-inf")), dim=-1)


def probabilities_of(logits: Tensor, logsumexp: Tensor, seen: Tensor) -> Tensor:
    """Probabilities in the dtype of the logits `[B, H, R, S]`; zero where not `seen`."""
    exponents = (logits - logsumexp[..., None]).masked_fill(~seen, float("-inf"))
    return torch.exp(exponents).to(logits.dtype)


def _keep_row(state: DecodeState, logits: Tensor, logsumexp: Tensor, lengths: Tensor) -> None:
    """Write the newest row into the state, for sequences that have one."""
    batch = torch.arange(lengths.shape[0], device=lengths.device)
    slot = (lengths - 1).clamp(min=0) % state.logits.shape[2]
    for kept, row in ((state.logits[..., : logits.shape[3]], logits[:, :, 0]), (state.logsumexp, logsumexp[:, :, 0])):
        exists = (lengths > 0).view(-1, *[1] * (row.dim() - 1))
        kept[batch, :, slot] = torch.where(exists, row, kept[batch, :, slot])
    state.lengths.copy_(lengths)


def _older(state: DecodeState, lengths: Tensor, column: Tensor) -> Tensor:
    """Probabilities of the rows before the newest, oldest first: `[B, H, query taps - 1, S]`."""
    rows = state.logits.shape[2] - 1
    row = lengths[:, None] - 1 - rows + torch.arange(rows, device=lengths.device)  # [B, R]
    batch = torch.arange(row.shape[0], device=row.device)[:, None]
    slot = row % (rows + 1)
    logits = state.logits[batch, :, slot].transpose(1, 2)[..., : column.shape[0]]
    seen = (row[:, :, None] >= column)[:, None]
    return probabilities_of(logits, state.logsumexp[batch, :, slot].transpose(1, 2), seen)


def prefill_state(
    q_window: Tensor,
    k_cache: Tensor,
    *,
    lengths: Tensor,
    post_conv: Tensor,
    pre_conv: Tensor | None = None,
    pre_mix: Tensor | None = None,
    scale: float | None = None,
    pad_key: str = "both",
    block_table: Tensor | None = None,
) -> DecodeState:
    """The state after prompts of `lengths [B]` tokens, with room for as many keys as the cache has.

    `q_window [B, Hq, W, D]` holds the last `W >= min(max(cq, cq + cq2 - 2), tokens)` queries of each sequence, oldest
    first, cq and cq2 being the query taps of `pre_conv` (1 without one) and `post_conv`; a prompt will do. With one
    more query, the first step may repeat the prompt's last token; without it, that step raises an error on a CPU and
    gives NaN on a GPU. All else is as for `multi_token_attention_decode`, with the mixers of the steps; under autocast
    the state is in its dtype, like the steps. Computes `cq2` rows of logits in eager PyTorch. Raises ValueError or
    TypeError for arguments that do not fit.
    """
    given = Mixers(pre_conv, pre_mix, post_conv)
    check_are_tensors(q_window=q_window, k_cache=k_cache, lengths=lengths, **given._asdict(), block_table=block_table)
    check_not_mapped("prefill_state", q_window, k_cache, lengths, *given, block_table)
    if post_conv is None:
        raise TypeError("post_conv is None; only a layer with a convolution of probabilities needs a state")
    if under_autocast(q_window):
        q_window, k_cache = (x.to(autocast_dtype(x)) for x in (q_window, k_cache))
        given = Mixers(*map(cast_unless_float32, given))
    check_caches(q_window, k_cache, k_cache, lengths, given, pad_key, block_table)
    (batch, heads, window, head_dim), query_taps = q_window.shape, post_conv.shape[1]
    operation = operation_of(given, head_dim, causal=True, scale=scale, pad_key=pad_key)
    needed = operation.conv.query_taps + query_taps - 2
    if can_be_read(lengths) and window < min(needed, int(lengths.max())):
        raise ValueError(
            f"q_window holds {window} queries and the rows that steps look back on need {needed}: "
            f"give the last {min(needed, int(lengths.max()))}"
        )
    if block_table is not None:
        k_cache = gather_pages(k_cache, block_table)
    capacity = k_cache.shape[2]
    state = DecodeState.empty(batch, heads, query_taps, capacity, dtype=q_window.dtype, device=q_window.device)
    state.lengths.copy_(lengths)
    if query_taps == 1:
        return state
    with torch.no_grad():
        # One row more than the next step reads, to repeat the prompt's last token: NaN if the window is too short.
        logits, row = last_logits(operation, q_window, k_cache, with_dense_mixings(given), lengths, query_taps)
        known = (row - (operation.conv.query_taps - 1)).clamp(min=0) >= lengths[:, None] - window
        seen = (torch.arange(capacity, device=row.device) <= row[:, :, None].clamp(min=0))[:, None]
        logsumexp = logsumexp_of(logits, seen).masked_fill(~known[:, None], float("nan"))
        at = torch.arange(batch, device=row.device)[:, None], slice(None), row % query_taps
        state.logits[at] = logits.transpose(1, 2)
        state.logsumexp.fill_(float("nan"))[at] = logsumexp.transpose(1, 2)
    return state
