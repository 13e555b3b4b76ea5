"""The public interface of decode: one function."""

from __future__ import annotations

import torch
from torch import Tensor

from mta_kernels.backend import Request
from mta_kernels.conv_attention import conv_attention_decode
from mta_kernels.conv_attention.arguments import (
    as_int,
    autocast_dtype,
    cast_unless_float32,
    check_are_tensors,
    check_splits,
    under_autocast,
)
from mta_kernels.multi_token_attention import reference
from mta_kernels.multi_token_attention.arguments import NormGate
from mta_kernels.multi_token_attention.choice import choose, conv_attention_weight, is_conv_attention
from mta_kernels.multi_token_attention.decode.arguments import check_step
from mta_kernels.multi_token_attention.decode.operators import decode_op
from mta_kernels.multi_token_attention.decode.reference import newest_row
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.mixers import Mixers, operation_of, with_dense_mixings
from mta_kernels.multi_token_attention.norm_gate import norm_and_gate


def multi_token_attention_decode(
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
    backend: str = "auto",
    splits: int | str = "auto",
) -> Tensor:
    """One decode step: the newest row of causal multi-token attention, `[B, Hq, 1, D]`, from the KV cache.

    `q_window [B, Hq, W, D]` holds the last `W >= min(cq, tokens so far)` queries, oldest first, the new one last, cq
    being the query taps of `pre_conv`, or 1; `k_cache, v_cache [B, Hkv, S, D]`; `lengths [B]`, int32 or int64, counts
    each sequence's tokens, the new one included. A sequence of length 0 gives zeros, which a norm with `norm_eps=0`
    makes NaN. What lies in a cache beyond a length, and in q_window before a sequence's first token, may be anything,
    NaN included.
    With `block_table [B, max_pages]` int32 the caches are pages, as in `conv_attention_decode`.

    A `post_conv` of more than one query tap needs `state`, the result of the step before: `prefill_state` makes it from
    a prompt, `DecodeState.empty` from no token. A step changes it in place, may be repeated, and is fit for a CUDA
    graph. The state must be one token behind `lengths`, or left by the step that is repeated. On a CPU any other state
    raises an error; on a GPU the caller must ensure it.

    All other arguments are as for `multi_token_attention`, with `scale` and `pad_key`. `backend` is "auto",
    "reference" or "triton" (up to 64 query heads, caches whose last stride is 1); a named one never falls back. What
    `conv_attention_decode` computes is computed by it, and its backends may be named. `splits`, the programs that share
    a sequence's keys, 1 to 128, is not for the reference. Nothing waits for the device, and nothing is differentiable.
    Raises ValueError, TypeError or RuntimeError, in one sentence, for arguments that do not fit.
    """
    given = Mixers(pre_conv, pre_mix, post_conv, post_mix)
    after = NormGate.of(norm_weight, norm_eps, depth, gate_weight, gate_bias)
    check_are_tensors(q_window=q_window, k_cache=k_cache, v_cache=v_cache)
    if under_autocast(q_window):
        q_window, k_cache, v_cache = (x.to(autocast_dtype(x)) for x in (q_window, k_cache, v_cache))
        given = Mixers(*map(cast_unless_float32, given))
        after = NormGate(*map(cast_unless_float32, after))
    check_step(q_window, k_cache, v_cache, lengths, given, after, pad_key, state, block_table)
    splits = as_int(splits)
    check_splits(splits)
    operation = operation_of(given, q_window.shape[3], causal=True, scale=scale, pad_key=pad_key)
    finish = norm_and_gate
    with torch.no_grad():
        if is_conv_attention(operation, 0.0, backend):
            out = conv_attention_decode(
                q_window, k_cache, v_cache, conv_attention_weight(given, q_window), lengths=lengths, scale=scale,
                pad_key=pad_key, backend=backend, splits=splits, block_table=block_table,
            )  # fmt: skip
        else:
            tensors, mixers = (q_window, k_cache, v_cache), with_dense_mixings(given)
            heads, head_dim = q_window.shape[1], q_window.shape[3]
            request = Request(operation, q_window.device, q_window.dtype, head_dim, decode=tensors, heads=heads)
            kernels = choose(backend, request)
            rest = lengths, state, block_table
            if kernels is not None:
                count = 0 if splits == "auto" else int(splits)
                return decode_op(operation, *tensors, mixers, after, *rest, splits=count, backend=kernels)
            if splits != "auto":
                raise ValueError(
                    f"splits is {splits!r}; the reference backend does not split the keys: leave it at 'auto'"
                )
            out, finish = newest_row(operation, *tensors, mixers, *rest), reference.norm_and_gate
        return finish(out, *after.steps)
