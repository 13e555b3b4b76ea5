"""Inputs of decode steps of the whole multi-token attention, shared by their tests."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from kernel_inputs import DEVICE
from torch import Tensor

from mta_kernels.multi_token_attention import (
    DecodeState,
    multi_token_attention_reference,
    prefill_state,
)

PARTS = ("pre_conv", "pre_mix", "post_conv", "post_mix")
COMBINATIONS = [dict(zip(PARTS, chosen, strict=True)) for chosen in product((False, True), repeat=4)]
OF_LOGITS = ("pre_conv", "pre_mix", "scale", "pad_key")  # what prefill_state takes beside post_conv


def name_of(parts: dict[str, bool]) -> str:
    return "+".join(name for name, there in parts.items() if there) or "plain"


class Inputs:
    """A prompt of random tokens and its mixers; `step` gives the arguments of a decode of its first tokens."""

    def __init__(
        self, parts: dict[str, bool], heads=4, kv_heads=2, tokens=40, head_dim=16, taps=(3, 5), after=(4, 3),
        dtype=torch.float64, batch=1, groups=None, magnitude=1.0, seed=0, **options: Any,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, by: float = 1.0) -> Tensor:
            return (by * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)

        self.q = normal(batch, heads, tokens, head_dim, by=magnitude)
        self.k, self.v = (normal(batch, kv_heads, tokens, head_dim) for _ in range(2))
        mix = (groups, heads // groups, heads // groups) if groups else (heads, heads)
        made = {
            "pre_conv": normal(heads, *taps, by=0.3), "pre_mix": normal(*mix, by=0.5),
            "post_conv": normal(heads, *after, by=0.3), "post_mix": normal(*mix, by=0.5),
        }  # fmt: skip
        self.mixers = {name: x for name, x in made.items() if parts[name]}
        self.options = options

    @property
    def needed(self) -> int:
        """Queries that a step looks at, one of no mixer included."""
        return self.mixers["pre_conv"].shape[1] if "pre_conv" in self.mixers else 1

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""
        other = object.__new__(Inputs)
        other.q, other.k, other.v = (x.to(dtype) for x in (self.q, self.k, self.v))
        other.mixers = {name: x.to(dtype) for name, x in self.mixers.items()}
        other.options = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return other

    def double(self) -> Inputs:
        return self.to(torch.float64)

    def rows(self) -> Tensor:
        """All rows of the forward."""
        return multi_token_attention_reference(self.q, self.k, self.v, **self.mixers, **self.options)

    def window(self, lengths: list[int], queries: int) -> Tensor:
        """The last queries of each sequence, NaN before its first."""
        before = torch.full_like(self.q[:, :, :1], float("nan")).expand(-1, -1, queries, -1)
        whole = torch.cat([before, self.q], 2)
        return torch.stack([whole[b, :, length : length + queries] for b, length in enumerate(lengths)])

    def caches(self, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values, NaN beyond each length."""
        keys, values = self.k.clone(), self.v.clone()
        for b, length in enumerate(lengths):
            keys[b, :, length:] = values[b, :, length:] = float("nan")
        return keys, values

    def state(self, lengths: list[int], extra: int = 0) -> DecodeState | None:
        """That of prompts of these lengths, with NaN in what it has not been given; None if none is needed."""
        if "post_conv" not in self.mixers:
            return None
        queries = self.needed + self.mixers["post_conv"].shape[1] - 2
        window = self.window(lengths, max(1, queries + extra))
        options = {name: x for name, x in self.options.items() if name in OF_LOGITS}
        mixers = {name: x for name, x in self.mixers.items() if name != "post_mix"}
        counts = torch.tensor(lengths, device=DEVICE)
        return prefill_state(window, self.caches(lengths)[0], lengths=counts, **mixers, **options)

    def step(self, lengths: list[int], extra: int = 0) -> dict[str, Any]:
        """The arguments of a step after which sequences have these lengths, without its state."""
        keys, values = self.caches(lengths)
        window = self.window(lengths, self.needed + extra)
        counts = torch.tensor(lengths, device=DEVICE)
        mixers = {**self.mixers, **self.options}
        return {"q_window": window, "k_cache": keys, "v_cache": values, "lengths": counts, **mixers}
