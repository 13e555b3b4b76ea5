"""`conv_attention_decode(group=)`: each rank attends to its share of the KV cache, and all merge what they found.

A rank's cache holds the keys that its share is mixed with (`cache_positions`), so that one small message a rank is all
that is passed: a row of out and its logsumexp a head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mta_kernels.conv_attention.backends import BACKENDS
from mta_kernels.conv_attention.context_parallel.attention import check_agreement, shape_facts
from mta_kernels.conv_attention.context_parallel.eager import sum_dtype
from mta_kernels.conv_attention.context_parallel.layout import cache_margins
from mta_kernels.conv_attention.context_parallel.ranks import GroupRanks, Ranks
from mta_kernels.conv_attention.reference import convolve_scores, repeat_heads
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.operation import Operation


def conv_attention_decode_over_ranks(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, *,
    group: dist.ProcessGroup, lengths: Tensor, backend: str, splits: int | str,
) -> Tensor:  # fmt: skip
    """`conv_attention_decode` of arguments already checked, with this rank's share of the cache; no gradients.

    Raises ValueError if ranks differ in shapes or options.
    """
    ranks = GroupRanks(group)
    pad = operation.conv.pad
    share = k_cache.shape[2] - sum(cache_margins(ranks.rank, ranks.size, operation.conv.key_taps, pad))
    facts = shape_facts(q_window=q_window, weight=weight, lengths=lengths)
    facts |= {"the number of KV heads": k_cache.shape[1], "the share of the cache": share, "the padding of keys": pad}
    facts |= {"scale": operation.scale, "backend": BACKENDS.index(backend)}
    check_agreement(group, facts, q_window.device)
    with torch.no_grad():
        tensors = q_window, k_cache, v_cache, weight
        return decode_over_ranks(operation, ranks, *tensors, lengths=lengths, backend=backend, splits=splits)


def decode_over_ranks(
    operation: Operation, ranks: Ranks, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, *,
    lengths: Tensor, backend: str, splits: int | str = "auto",
) -> Tensor:  # fmt: skip
    """The newest row, `[B, Hq, 1, D]`, the same on all ranks bit for bit."""
    key_taps = operation.conv.key_taps
    before, after = cache_margins(ranks.rank, ranks.size, key_taps, operation.conv.pad)
    share = k_cache.shape[2] - before - after
    if share < max(1, key_taps - 1):
        raise ValueError(
            f"rank {ranks.rank} of {ranks.size} holds {k_cache.shape[2]} keys, of which {before + after} are its "
            f"neighbours', and {key_taps} key taps need shares of {max(1, key_taps - 1)} or more; "
            "cache_positions says which positions a rank holds"
        )
    # The length that counts from the first key held: below 0 where the sequence ends before it.
    held = lengths - (ranks.rank * share - before)
    tensors = q_window, k_cache, v_cache, weight, held
    if backend == "reference":
        out, logsumexp = eager_part(operation, *tensors, first_key=before, own_keys=share)
    else:
        out, logsumexp = triton_part(operation, *tensors, first_key=before, own_keys=share, splits=splits)
    found = torch.stack(ranks.gather(torch.cat([out, logsumexp[..., None]], dim=-1)))  # [R, B, Hq, D + 1]
    outs, logsumexps = found[..., :-1], found[..., -1:]
    largest = logsumexps.amax(0)
    shares = torch.exp(logsumexps - largest.masked_fill(largest == float("-inf"), 0))
    total = shares.sum(0)
    merged = (shares * outs).sum(0) / total.masked_fill(total == 0, 1)  # zeros for a sequence without tokens
    return merged[:, :, None].to(q_window.dtype)


def eager_part(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, lengths: Tensor, *,
    first_key: int, own_keys: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out `[B, Hq, D]` of `own_keys` keys from `first_key` on, and the logsumexp `[B, Hq]`, -inf where none is seen."""
    q_window = q_window[:, :, -operation.conv.query_taps :]
    query_heads, window = q_window.shape[1:3]
    keys, values = (repeat_heads(x, query_heads) for x in (k_cache, v_cache))
    column = torch.arange(keys.shape[2], device=keys.device)
    row = lengths[:, None] - window + torch.arange(window, device=keys.device)  # [B, W]
    visible = (column <= row[:, :, None])[:, None]
    scores = q_window @ keys.transpose(-1, -2) * operation.scale
    scores = torch.where(visible, scores, torch.zeros((), dtype=scores.dtype, device=scores.device))
    mixed = convolve_scores(scores, weight, operation.conv)[:, :, -1]
    own = (column >= first_key) & (column < first_key + own_keys) & (column < lengths[:, None])  # [B, keys]
    mixed = mixed.masked_fill(~own[:, None], float("-inf")).to(sum_dtype(mixed.dtype))
    values = values.masked_fill(~own[:, None, :, None], 0)  # what lies there may be anything
    logsumexp = torch.logsumexp(mixed, dim=-1)
    p = torch.exp(mixed - logsumexp.masked_fill(logsumexp == float("-inf"), 0)[..., None])
    return (p[:, :, None].to(values.dtype) @ values)[:, :, 0].to(mixed.dtype), logsumexp


def triton_part(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, lengths: Tensor, *,
    first_key: int, own_keys: int, splits: int | str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `eager_part`, float32, by the Triton kernel; `splits` as in `conv_attention_decode`."""
    from mta_kernels.conv_attention.triton.decode import chosen_tiles, launch_shares
    from mta_kernels.conv_attention.triton.prepare import LN_2

    batch, query_heads = q_window.shape[:2]
    splits, config = chosen_tiles(q_window, k_cache, weight, splits, own_keys)
    with on_device_of(q_window), without_autocast(q_window):
        found = launch_shares(
            operation, q_window, k_cache, v_cache, weight, lengths, None, splits=splits, config=config,
            first_key=first_key, own_keys=own_keys,
        )  # fmt: skip
    largest = found.maxima.amax(-1, keepdim=True)
    shares = torch.exp2(found.maxima - largest.masked_fill(largest == float("-inf"), 0))
    total = (shares * found.sums).sum(-1, keepdim=True)
    out = (shares[..., None] * found.partial).sum(1) / total.masked_fill(total == 0, 1)
    logsumexp = (largest + torch.log2(total)) * LN_2.value
    return out.view(batch, query_heads, -1), logsumexp.view(batch, query_heads)
