"""Which kernels run a decode step, and where; they are imported when they first run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mta_kernels.conv_attention.backend import size_unsupported
from mta_kernels.conv_attention.surroundings import without_autocast
from mta_kernels.conv_attention.triton.backend import platform_unsupported
from mta_kernels.gpu_limits import absent
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.mixers import Mixers, operation_by_numbers
from mta_kernels.operation import ONE_TAP, Operation

BACKENDS = ("reference", "triton")
MAX_HEADS = 64


def why_not(operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why the Triton kernels cannot run a step on this machine, in a clause, or None if they can."""
    heads, head_dim = q_window.shape[1], q_window.shape[3]
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        strides = f"{tuple(k_cache.stride())} and {tuple(v_cache.stride())}"
        return f"the caches have strides {strides}, and it needs the numbers of a key side by side (stride 1)"
    if heads > MAX_HEADS:
        return f"{heads} query heads are more than {MAX_HEADS}"
    return (
        absent(q_window.device)
        or platform_unsupported(q_window.device, q_window.dtype)
        or size_unsupported(head_dim, *(operation.pre_conv or ONE_TAP).taps)
        or size_unsupported(head_dim, *(operation.post_conv or ONE_TAP).taps)
    )


def choose(backend: str, operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor) -> str:
    """The name of what runs a step; raises ValueError for an unknown name, or for kernels that cannot."""
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend is {backend!r}; expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    if backend == "reference":
        return backend
    reason = why_not(operation, q_window, k_cache, v_cache)
    if reason and backend != "auto":
        raise ValueError(f"backend {backend!r} cannot run this: {reason}; backend='auto' picks one that can")
    return "reference" if reason else "triton"


def decode_op(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, mixers: Mixers, lengths: Tensor,
    state: DecodeState | None, block_table: Tensor | None, splits: int,
) -> Tensor:  # fmt: skip
    """Steps 1 to 7 by the operator, for arguments already checked, their mixings dense; 0 splits are "auto"."""
    pads = (convolution.pad if convolution else 0 for convolution in (operation.pre_conv, operation.post_conv))
    kept = (None, None, None) if state is None else (state.logits, state.logsumexp, state.lengths)
    return DECODE(q_window, k_cache, v_cache, *mixers, *kept, lengths, block_table, operation.scale, *pads, splits)


torch.library.define(
    "mta::multi_token_attention_decode",
    "(Tensor q_window, Tensor k_cache, Tensor v_cache, Tensor? pre_conv, Tensor? pre_mix, Tensor? post_conv, "
    "Tensor? post_mix, Tensor(a!)? logits, Tensor(b!)? logsumexp, Tensor(c!)? seen, Tensor lengths, "
    "Tensor? block_table, float scale, int pre_pad, int post_pad, int splits) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
DECODE = torch.ops.mta.multi_token_attention_decode.default


@torch.library.impl("mta::multi_token_attention_decode", ("cpu", "cuda"))
def _decode(
    q_window: Tensor, k_cache: Tensor, v_cache: Tensor, pre_conv: Tensor | None, pre_mix: Tensor | None,
    post_conv: Tensor | None, post_mix: Tensor | None, logits: Tensor | None, logsumexp: Tensor | None,
    seen: Tensor | None, lengths: Tensor, block_table: Tensor | None, scale: float, pre_pad: int, post_pad: int,
    splits: int,
) -> Tensor:  # fmt: skip
    from mta_kernels.multi_token_attention.decode.triton import newest_row

    mixers = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    operation = operation_by_numbers(mixers, True, scale, pre_pad, post_pad)
    state = None
    if logits is not None and logsumexp is not None and seen is not None:
        state = DecodeState(logits, logsumexp, seen)
    with without_autocast(q_window):
        return newest_row(operation, q_window, k_cache, v_cache, mixers, lengths, state, block_table, splits or "auto")


@torch.library.register_fake("mta::multi_token_attention_decode")
def _fake_decode(q_window: Tensor, *others: Any) -> Tensor:
    batch, heads, _, head_dim = q_window.shape
    return q_window.new_empty(batch, heads, 1, head_dim)
