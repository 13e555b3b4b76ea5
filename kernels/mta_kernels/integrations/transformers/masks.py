"""The mask of a forward pass: where sequences and documents begin, instead of which key each query sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mta_kernels.integrations.transformers.layers import uses_interface
from mta_kernels.integrations.transformers.options import options_of

UNSUPPORTED = "is not supported by attn_implementation='mta'; expected causal attention to all keys of a document"


class Layout(NamedTuple):
    """What is not plain causal attention in a batch of N positions. None stands for a part that is."""

    cu_seqlens: Tensor | None = None  # [S + 1]: bounds of documents and of left padding in the flattened [B * N]
    starts: Tensor | None = None  # [B]: the first position that is no padding, if the queries are but the last ones
    starts_on_host: tuple[int, ...] = ()
    plain: Tensor | None = None  # [B, 1, M, N], True where a query sees a key: for layers of plain attention


def mta_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Layout | None:
    """The mask of `attn_implementation="mta"`, as `AttentionMaskInterface` asks for it; None if nothing is masked.

    `attention_mask [B, kv_length]` is that of the tokenizer. Left padding, and documents that restart `position_ids`,
    become bounds that no convolution crosses. Right padding needs nothing: no token sees it. Raises ValueError for
    other masks. A mask that is given is read on the host, once a forward pass.
    """
    if config is not None and not uses_interface(type(config).__module__.replace("configuration_", "modeling_")):
        raise ValueError(
            f"a model of {type(config).__name__} computes attention by itself and not by transformers' "
            "AttentionInterface, so that it would lose its mask; attn_implementation='mta' needs a model such as Llama"
        )
    if isinstance(q_offset, Tensor) or kv_offset or q_offset + q_length != kv_length:
        raise ValueError(
            f"the mask is over {kv_length} keys, which are not those of the tokens so far; a static or sliding cache "
            "or a prefix of keys is not supported by attn_implementation='mta': leave cache_implementation out"
        )
    starts: Tensor | None = None
    on_host: tuple[int, ...] = ()
    first_rows = None
    if attention_mask is not None:
        starts, on_host = _starts(attention_mask.to(device=device, dtype=torch.bool))
    if mask_function is not causal_mask_function and not _hides_nothing(mask_function, q_length, kv_length, device):
        first_rows = _first_rows(mask_function, batch_size, q_length, kv_length, options, device)
    plain = None
    if config is not None and any(options_of(config, i) is None for i in range(config.num_hidden_layers)):  # plain ones
        shared: dict[str, Any] = {"q_offset": q_offset, "mask_function": mask_function, "device": device, **options}
        plain = sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, **shared)
    layout = Layout(plain=plain)
    if q_length < kv_length and starts is not None:
        layout = layout._replace(starts=starts, starts_on_host=on_host)
    elif starts is not None or first_rows is not None:
        layout = layout._replace(cu_seqlens=_bounds(batch_size, kv_length, starts, first_rows, device))
    return None if all(part is None for part in (layout.cu_seqlens, layout.starts, plain)) else layout


def _starts(mask: Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
    """The first position of each sequence that is no padding, `[B]`, here and on the host.

    None and nothing if no sequence is padded on its left.
    """
    rises = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    starts = mask.int().argmax(1)
    most_rises, *on_host = torch.cat([rises.max()[None], starts]).tolist()
    if most_rises > 1:
        raise ValueError(
            "attention_mask has padding between tokens, which attn_implementation='mta' does not support; pad on the "
            "left, as generation needs it: tokenizer.padding_side = 'left'"
        )
    return (starts, tuple(on_host)) if any(on_host) else (None, ())


def _hides_nothing(sees: Callable[..., Any], rows: int, keys: int, device: torch.device | str) -> bool:
    """Whether rows behind keys in a cache see all of these: as under a sliding window that is long enough."""
    if rows == keys:
        return False  # documents may begin there
    row, key = torch.arange(keys - rows, keys, device=device)[:, None], torch.arange(keys, device=device)
    seen = torch.as_tensor(sees(0, 0, row, key), device=device)
    return bool((seen == (key <= row)).all())


def _first_rows(
    sees: Callable[..., Any], batch: int, rows: int, keys: int, options: dict[str, Any], device: torch.device | str
) -> Tensor | None:
    """Where documents begin, `[B, N]`; None if each row of a batch is one. Raises ValueError for other masks."""
    if rows != keys or options.get("use_vmap"):
        raise ValueError(f"a mask that is not causal alone, with {keys - rows} keys in a cache, {UNSUPPORTED}")
    sequence, row = torch.arange(batch, device=device)[:, None], torch.arange(rows, device=device)[None]
    sees_previous = sees(sequence, 0, row[:, 1:], row[:, :-1]).expand(batch, -1)
    first = torch.cat([torch.ones(batch, 1, dtype=torch.bool, device=device), ~sees_previous], dim=1)
    start = torch.where(first, row, 0).cummax(1).values
    sees_start = sees(sequence, 0, row.expand(batch, -1), start)
    sees_next = sees(sequence, 0, row[:, :-1], row[:, 1:])
    if not sees_start.all() or sees_next.any():
        raise ValueError(f"a sliding window or another mask that is not causal alone {UNSUPPORTED}")
    return first if first[:, 1:].any() else None


def _bounds(
    batch: int, tokens: int, starts: Tensor | None, first_rows: Tensor | None, device: torch.device | str
) -> Tensor:
    """`cu_seqlens` of the flattened batch: padding is a document of its own, which nobody reads."""
    first = torch.zeros(batch, tokens, dtype=torch.bool, device=device) if first_rows is None else first_rows
    first[:, 0] = True
    if starts is not None:
        first = first.scatter(1, starts[:, None], True)
    end = torch.tensor([batch * tokens], device=device)
    return torch.cat([first.flatten().nonzero().flatten(), end]).int()
