"""Checks of the arguments of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import (
    can_be_read,
    check_are_tensors,
    check_no_overlap,
    kind_of,
    wants_gradient,
)
from mta_kernels.conv_attention.reference import check_decode_arguments
from mta_kernels.multi_token_attention.arguments import NormGate, check_mixers, check_norm_and_gate
from mta_kernels.multi_token_attention.decode.state import DecodeState, needs_state
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.operator_gradients import check_not_mapped


def check_step(
    q_window: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, given: Mixers, after: NormGate, pad_key: str,
    state: DecodeState | None, block_table: Tensor | None,
) -> None:  # fmt: skip
    """Raise, in one sentence, unless the arguments fit `multi_token_attention_decode`.

    The contents of lengths and of the state are read on a CPU alone: on a GPU that would wait for the device.
    """
    check_are_tensors(
        q_window=q_window, k_cache=k_cache, v_cache=v_cache, lengths=lengths, **given._asdict(), **after.tensors,
        block_table=block_table,
    )  # fmt: skip
    capacity = check_caches(q_window, k_cache, v_cache, lengths, given, pad_key, block_table)
    check_norm_and_gate(after, q_window, "q_window")
    if needs_state(given):
        kept = (state.logits, state.logsumexp, state.lengths) if isinstance(state, DecodeState) else ()
        read = q_window, k_cache, v_cache, lengths, *given, block_table
        check_not_mapped("multi_token_attention_decode with a state", *read, *kept)
        check_state(state, q_window, lengths, given, capacity)
    elif state is not None and not isinstance(state, DecodeState):
        raise TypeError(f"state is {kind_of(state)}; expected None, as these steps look back on no other row")
    check_wants_no_gradient(q_window, k_cache, v_cache, *given, *after.tensors.values())


def check_wants_no_gradient(*tensors: Tensor | None) -> None:
    """Raise RuntimeError if one of these requires a gradient."""
    if wants_gradient(*tensors):
        raise RuntimeError("multi_token_attention_decode is not differentiable; call it under torch.no_grad()")


def check_caches(
    q_window: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, given: Mixers, pad_key: str,
    block_table: Tensor | None,
) -> int:  # fmt: skip
    """Raise ValueError or TypeError unless these fit each other; returns the capacity of a sequence in keys."""
    taps = given.pre_conv
    if taps is None:  # one tap, if there are heads for it
        taps = q_window[0, :, :1, :1] if q_window.dim() == 4 and q_window.shape[0] else q_window
    check_decode_arguments(q_window, k_cache, v_cache, taps, lengths, pad_key, block_table, weight_name="pre_conv")
    check_mixers(given._replace(pre_conv=None), q_window, "q_window")
    capacity = k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    if can_be_read(lengths) and int(lengths.max()) > capacity:
        raise ValueError(
            f"lengths has {int(lengths.max())} and the cache holds {capacity} keys a sequence; give at most as many"
        )
    return capacity


def check_state(state: DecodeState | None, q_window: Tensor, lengths: Tensor, given: Mixers, capacity: int) -> None:
    """Raise ValueError or TypeError unless `state` is of these sequences, before this step or after it."""
    assert given.post_conv is not None
    batch, heads, rows = *q_window.shape[:2], given.post_conv.shape[1]
    if not isinstance(state, DecodeState):
        kind = "None" if state is None else kind_of(state)
        raise TypeError(
            f"state is {kind} and post_conv looks back on {rows} queries; give the DecodeState of prefill_state, "
            "or DecodeState.empty for sequences without tokens"
        )
    logits, logsumexp, seen = state.logits, state.logsumexp, state.lengths
    tensors = {"state.logits": logits, "state.logsumexp": logsumexp, "state.lengths": seen}
    check_are_tensors(**tensors)
    if logits.dim() != 4 or logits.shape[:3] != (batch, heads, rows) or logits.shape[3] < capacity:
        raise ValueError(
            f"state has logits of shape {tuple(logits.shape)}; expected [{batch}, {heads}, {rows}, {capacity} or more],"
            " as prefill_state makes them for these caches"
        )
    if logsumexp.shape != (batch, heads, rows) or seen.shape != (batch,):
        raise ValueError(
            f"state has logsumexp of shape {tuple(logsumexp.shape)} and lengths {tuple(seen.shape)}; "
            f"expected [{batch}, {heads}, {rows}] and [{batch}], as prefill_state makes them"
        )
    for name, x in tensors.items():
        if x.device != q_window.device:
            raise ValueError(f"{name} is on {x.device} and q_window on {q_window.device}; move them to one device")
        check_no_overlap(name, x, "state.clone()")
    if logits.dtype != q_window.dtype:
        raise TypeError(f"state.logits has dtype {logits.dtype} and q_window {q_window.dtype}; they must be the same")
    wide = torch.promote_types(q_window.dtype, torch.float32)
    if logsumexp.dtype != wide or seen.dtype != torch.int32:
        raise TypeError(
            f"state has logsumexp in {logsumexp.dtype} and lengths in {seen.dtype}; expected {wide} and torch.int32"
        )
    if can_be_read(lengths):
        check_seen(state, lengths)


def check_seen(state: DecodeState, lengths: Tensor) -> None:
    """Raise ValueError unless `state` is one token behind `lengths`, or as a step with these left it."""
    logsumexp, seen = state.logsumexp, state.lengths
    behind = (lengths > 0) & (seen != lengths - 1) & (seen != lengths)
    if behind.any():
        which = int(behind.nonzero()[0])
        raise ValueError(
            f"lengths says {int(lengths[which])} tokens of sequence {which}, the new one included, and state has "
            f"seen {int(seen[which])}; give each step one token, or a state of prefill_state"
        )
    heads, rows = logsumexp.shape[1:]
    oldest = (lengths % rows).long()[:, None, None].expand(-1, heads, 1)  # only a repeated step reads it
    unknown = (seen == lengths) & (lengths >= rows) & logsumexp.gather(2, oldest).isnan().any(1).flatten()
    if unknown.any():
        which = int(unknown.nonzero()[0])
        raise ValueError(
            f"lengths says {int(lengths[which])} tokens of sequence {which}, the new one included, and state is of a "
            f"prompt of {int(seen[which])}; give lengths that count the new token, or prefill_state one query more"
        )
