"""The attention function of `attn_implementation="mta"`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mta_kernels.integrations.transformers.cache import layer_with_queries
from mta_kernels.integrations.transformers.layers import is_attention
from mta_kernels.integrations.transformers.masks import Layout
from mta_kernels.integrations.transformers.options import options_of
from mta_kernels.multi_token_attention import MultiTokenAttention


def mta_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Layout | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    mta_cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[B, M, heads, D]` of `query [B, heads, M, D]` and `key, value [B, Hkv, N, D]`, and no probabilities.

    As `AttentionInterface` calls it, with `mta_cache` besides, the model's cache. Layers that `config.mta` leaves out
    have plain attention. Raises ValueError or TypeError, in one sentence, for what is not supported.
    """
    _check(attention_mask, dropout, key.shape[2], kwargs)
    layout = attention_mask or Layout()
    attention: MultiTokenAttention | None = getattr(module, "mta", None)
    if attention is None:
        if not is_attention(module):
            raise ValueError(
                f"{type(module).__name__} is no layer that attn_implementation='mta' knows: one with a layer_idx, a "
                "scaling and one head_dim for queries and values"
            )
        if options_of(module.config, module.layer_idx) is not None:
            raise ValueError(
                f"layer {module.layer_idx} has no parameters of multi-token attention; add them by "
                "mta_kernels.integrations.transformers.add_multi_token_attention(model)"
            )
        return sdpa_attention_forward(
            module, query, key, value, layout.plain, dropout=dropout, scaling=scaling, **kwargs
        )
    if scaling is not None and attention.scale != scaling:  # which a model may give another than its layer has
        attention.scale = scaling
    rows, window = query.shape[2], query
    older = key.shape[2] - rows
    if mta_cache is not None:
        window = layer_with_queries(mta_cache, module.layer_idx).with_older(query, _looks_back(attention))
    if window.shape[2] - rows < min(older, _looks_back(attention)):
        raise ValueError(
            f"the cache has {older} keys and {window.shape[2] - rows} queries of layer {module.layer_idx}; fill it "
            "by the model itself with attn_implementation='mta'"
        )
    if layout.cu_seqlens is not None:
        out = _flattened(attention, query, key, value, layout.cu_seqlens)
    elif rows == 1 and older and not torch.is_grad_enabled() and attention.mta_kernel_after_sm is None:
        out = _decode(attention, window, key, value, layout.starts)
    elif layout.starts is not None:
        out = _each_sequence(attention, window, rows, key, value, layout.starts_on_host)
    else:
        out = attention(query, key, value, q_history=window[:, :, :-rows] if older else None)
    return out.transpose(1, 2).contiguous(), None


def _check(mask: Any, dropout: float, keys: int, kwargs: dict[str, Any]) -> None:
    """Raise ValueError or TypeError for a mask or an option that would be ignored."""
    if mask is not None and not isinstance(mask, Layout):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else ""
        raise TypeError(
            f"attention_mask is a {type(mask).__name__} {shape}; attn_implementation='mta' takes the tokenizer's, "
            "[batch, tokens], and makes its own of it"
        )
    window, packed = kwargs.get("sliding_window"), kwargs.get("cu_seq_lens_q")
    given = {
        f"attention_dropout={dropout}": dropout > 0,
        "attention that is not causal": kwargs.get("is_causal") is False,
        "output_attentions=True": kwargs.get("output_attentions"),
        f"a sliding window of {window}": window is not None and keys > window,
        "cu_seq_lens_q with a cache": packed is not None
        and len(packed) > 2
        and getattr(mask, "cu_seqlens", None) is None,
    } | {name: kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")}
    for what, is_given in given.items():
        if is_given:
            raise ValueError(f"{what} is not supported by attn_implementation='mta'; leave it out or use 'sdpa'")


def _looks_back(attention: MultiTokenAttention) -> int:
    """How many queries before its own a row depends on."""
    convolutions = (attention.mta_kernel, attention.mta_kernel_after_sm)
    return sum(x.shape[2] - 1 for x in convolutions if x is not None)


def _flattened(attention: MultiTokenAttention, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Attention in one row of tokens, whose documents neither attention nor convolution leaves."""
    flat = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v)]  # [1, heads, B * N, D]
    out: Tensor = attention(*flat, cu_seqlens=cu_seqlens)
    return out[0].transpose(0, 1).unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _decode(attention: MultiTokenAttention, window: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
    """The newest row of each sequence. Keys behind left padding move to the front, which copies the cache."""
    batch, _, keys, _ = k.shape
    lengths = torch.full((batch,), keys, device=k.device)
    if starts is not None:
        lengths = lengths - starts
        place = (torch.arange(keys, device=k.device) + starts[:, None]).clamp(max=keys - 1)
        k, v = (x.gather(2, place[:, None, :, None].expand_as(x)) for x in (k, v))
    return attention.decode(window, k, v, lengths=lengths)


def _each_sequence(
    attention: MultiTokenAttention, window: Tensor, rows: int, k: Tensor, v: Tensor, starts: tuple[int, ...]
) -> Tensor:
    """A chunk of prompts that are padded on their left, one sequence after another; rows of padding are zero."""
    older = k.shape[2] - rows
    outs = []
    for b, start in enumerate(starts):
        padding = max(0, start - older)  # rows of this chunk that are padding
        q, history = (
            window[b : b + 1, :, window.shape[2] - rows + padding :],
            window[b : b + 1, :, : window.shape[2] - rows],
        )
        keys, values = (x[b : b + 1, :, start:] for x in (k, v))
        has_history = keys.shape[2] > q.shape[2]
        out = attention(q, keys, values, q_history=history if has_history else None)
        outs.append(F.pad(out, (0, 0, padding, 0)))
    return torch.cat(outs)
