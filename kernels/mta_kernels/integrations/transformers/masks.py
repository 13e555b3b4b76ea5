"""The mask of a forward pass: where sequences and documents begin, not which key each query sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mta_kernels.integrations.transformers.layers import uses_interface
from mta_kernels.integrations.transformers.options import options_of

NOT_CAUSAL = (
    "a sliding window or another mask that is not causal alone is not supported by attn_implementation='mta'; expected "
    "causal attention to all keys of a document"
)


class MaskLayout(NamedTuple):
    """How a batch of N positions differs from plain causal attention; None stands for a part that does not."""

    cu_seqlens: Tensor | None = None  # [S + 1]: bounds of documents in the flattened [B * N]
    starts: Tensor | None = None  # [B]: the first position that is no padding
    keys: int | Tensor | None = None  # how many of a static cache's keys are there after this pass
    plain: Tensor | None = None  # [B, 1, M, N], True where a query sees a key: for layers of plain attention

    @property
    def ndim(self) -> int:
        """Not 2: transformers hands on what generation with a static cache made before."""
        return 0


def mta_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | MaskLayout | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> MaskLayout | None:
    """The mask of `attn_implementation="mta"`, as `AttentionMaskInterface` calls for it; None if nothing is masked.

    `attention_mask [B, kv_length]` comes from the tokenizer. Documents that restart `position_ids` become bounds that
    no convolution crosses. Right padding needs nothing: no token sees it. Raises ValueError for other masks. Reads the
    mask on the host, but not in a compiled graph, where PyTorch raises RuntimeError for other masks.
    """
    if isinstance(attention_mask, MaskLayout):
        return attention_mask
    if config is not None and not uses_interface(type(config).__module__.replace("configuration_", "modeling_")):
        raise ValueError(
            f"a model of {type(config).__name__} computes attention by itself and not by transformers' "
            "AttentionInterface, so that it would lose its mask; attn_implementation='mta' needs a model such as Llama"
        )
    layout = MaskLayout()
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_length:
        keys = torch.zeros((), dtype=torch.long, device=device) + q_offset + q_length
        layout = layout._replace(keys=keys if q_length == 1 else int(q_offset) + q_length)
    if attention_mask is not None:
        layout = layout._replace(starts=_starts(attention_mask.to(device=device, dtype=torch.bool)))
    if mask_function is not causal_mask_function:
        if options.get("use_vmap") or kv_offset:  # a function of one index at a time; a window that has moved
            raise ValueError(NOT_CAUSAL)
        if attention_mask is None and q_length == kv_length:
            layout = layout._replace(cu_seqlens=_bounds(mask_function, batch_size, kv_length, device))
        else:
            row = torch.arange(q_length, device=device) + q_offset
            _require(_hides_nothing(mask_function, batch_size, row), NOT_CAUSAL)
    if config is not None and any(options_of(config, i) is None for i in range(config.num_hidden_layers)):  # plain ones
        shared: dict[str, Any] = {"q_offset": q_offset, "mask_function": mask_function, "device": device, **options}
        layout = layout._replace(
            plain=sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, **shared)
        )
    return None if all(part is None for part in layout) else layout


def _require(holds: Tensor, sentence: str) -> None:
    """Raise ValueError with a sentence unless the 0-d `holds` is True."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, sentence)
    elif not holds:
        raise ValueError(sentence)


def _starts(mask: Tensor) -> Tensor | None:
    """The first position of each sequence that is no padding, `[B]`; None if no sequence is padded on its left."""
    rises = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    _require(
        (rises <= 1).all(),
        "attention_mask has padding between tokens, which attn_implementation='mta' does not support; pad on the "
        "left, as generation needs it: tokenizer.padding_side = 'left'",
    )
    starts = mask.int().argmax(1)
    return starts if torch.compiler.is_compiling() or starts.any() else None


def _hides_nothing(sees: Callable[..., Any], batch: int, row: Tensor) -> Tensor:
    """Whether rows see the first key and no key after their own, as under a sliding window that is long enough."""
    sequence, rows = torch.arange(batch, device=row.device)[:, None], row[None]
    sees_first, sees_next = sees(sequence, 0, rows, rows * 0), sees(sequence, 0, rows[:, :-1], rows[:, 1:])
    return sees_first.all() & ~sees_next.any()


def _bounds(sees: Callable[..., Any], batch: int, tokens: int, device: torch.device | str) -> Tensor | None:
    """`cu_seqlens` of the flattened batch; None if each row of it is a document. Raises ValueError for other masks."""
    sequence, row = torch.arange(batch, device=device)[:, None], torch.arange(tokens, device=device)[None]
    sees_previous = sees(sequence, 0, row[:, 1:], row[:, :-1]).expand(batch, -1)
    first = torch.cat([torch.ones(batch, 1, dtype=torch.bool, device=device), ~sees_previous], dim=1)
    start = torch.where(first, row, 0).cummax(1).values
    sees_start = sees(sequence, 0, row.expand(batch, -1), start)
    sees_next = sees(sequence, 0, row[:, :-1], row[:, 1:])
    _require(sees_start.all() & ~sees_next.any(), NOT_CAUSAL)
    if not first[:, 1:].any():
        return None
    return F.pad(first.flatten().nonzero().flatten(), (0, 1), value=batch * tokens).int()
