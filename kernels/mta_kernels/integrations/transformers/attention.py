"""The attention function of `attn_implementation="mta"`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mta_kernels.integrations.transformers.layers import is_attention, with_older_queries
from mta_kernels.integrations.transformers.masks import MaskLayout
from mta_kernels.integrations.transformers.options import options_of
from mta_kernels.multi_token_attention import MultiTokenAttention


def mta_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskLayout | None,
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
    layout = attention_mask or MaskLayout()
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
    if scaling is not None and attention.scale != scaling:  # a model may pass another scaling than its layer has
        attention.scale = scaling
    if any(x.is_meta for x in attention.parameters()) and not query.is_meta:
        raise ValueError(
            f"layer {module.layer_idx} is offloaded, which attn_implementation='mta' does not support; give it a "
            "device in device_map"
        )
    rows, window, keys = query.shape[2], query, key.shape[2] if layout.keys is None else layout.keys
    if mta_cache is not None:
        window = with_older_queries(mta_cache, module.layer_idx, query, _looks_back(attention))
    elif rows != key.shape[2] or layout.keys is not None:
        raise ValueError(f"there are {rows} tokens and no cache, but {key.shape[2]} keys or a mask of another length")
    if layout.cu_seqlens is not None:
        out = _flattened(attention, query, key, value, layout.cu_seqlens)
    elif rows == 1 and mta_cache is not None and not torch.is_grad_enabled():
        out = _decode(attention, window, key, value, keys, layout.starts)
    else:
        key, value = key[:, :, : int(keys)], value[:, :, : int(keys)]
        if layout.starts is not None:
            out = _shifted(attention, window, key, value, layout.starts)[:, :, -rows:]
        else:
            out = attention(query, key, value, q_history=window[:, :, :-rows] if rows < key.shape[2] else None)
    return out.transpose(1, 2).contiguous(), None


def _check(mask: Any, dropout: float, keys: int, kwargs: dict[str, Any]) -> None:
    """Raise ValueError or TypeError for a mask or an option that attention would ignore."""
    if mask is not None and not isinstance(mask, MaskLayout):
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
    """Attention in one row of tokens; neither attention nor a convolution crosses a document's bounds."""
    flat = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v)]  # [1, heads, B * N, D]
    out: Tensor = attention(*flat, cu_seqlens=cu_seqlens)
    return out[0].transpose(0, 1).unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _decode(
    attention: MultiTokenAttention, window: Tensor, k: Tensor, v: Tensor, keys: int | Tensor, starts: Tensor | None
) -> Tensor:
    """The newest row of each sequence. Padding on the left moves behind the tokens, which copies the cache."""
    lengths = torch.zeros(k.shape[0], dtype=torch.long, device=k.device) + keys
    if starts is not None:
        lengths = (lengths - starts).clamp(min=0)
        k, v = (_rolled(x, starts) for x in (k, v))
    state = attention.prefill_state(window[:, :, :-1], k, lengths=(lengths - 1).clamp(min=0))
    return attention.decode(window, k, v, lengths=lengths, state=state)


def _shifted(attention: MultiTokenAttention, window: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Rows of prompts with left padding: zero at the padding; rows before the window are undefined.

    The padding moves behind the tokens, where causal attention does not see it, and its rows move back.
    """
    keys = k.shape[2]
    q = F.pad(window[:, :, -keys:], (0, 0, max(0, keys - window.shape[2]), 0))
    out = _rolled(attention(*(_rolled(x, starts) for x in (q, k, v))), -starts)
    is_padding = torch.arange(keys, device=k.device) < starts[:, None]
    return out.masked_fill(is_padding[:, None, :, None], 0)


def _rolled(x: Tensor, by: Tensor) -> Tensor:
    """`x [B, H, N, D]` with each sequence rotated to begin at position `by [B]`."""
    place = (torch.arange(x.shape[2], device=x.device) + by[:, None]) % x.shape[2]
    return x.gather(2, place[:, None, :, None].expand_as(x))
