"""Decode of the whole multi-token attention against the forward in float64: the definition first, then the kernels."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICE, relative_error
from torch import Tensor

from mta_kernels.multi_token_attention.decode.reference import (
    multi_token_attention_decode_reference,
    prefill_state,
)
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.reference import multi_token_attention_reference

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

    def double(self) -> Inputs:
        other = object.__new__(Inputs)
        other.q, other.k, other.v = (x.double() for x in (self.q, self.k, self.v))
        other.mixers = {name: x.double() for name, x in self.mixers.items()}
        other.options = {name: x.double() if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return other

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


def paged(x: Tensor, page_size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """`x [B, H, S, D]` as shuffled pages, and their block table; unused pages are NaN."""
    batch, heads, length, head_dim = x.shape
    count = -(-length // page_size)
    padded = x.new_full((batch, heads, count * page_size, head_dim), float("nan"))
    padded[:, :, :length] = x
    order = torch.randperm(batch * count + 2, generator=torch.Generator().manual_seed(seed))[: batch * count]
    pages = x.new_full((batch * count + 2, heads, page_size, head_dim), float("nan"))
    pages[order.to(x.device)] = padded.unflatten(2, (count, page_size)).transpose(1, 2).flatten(0, 1)
    return pages, order.view(batch, count).to(x.device, torch.int32)


@pytest.mark.parametrize("parts", COMBINATIONS, ids=name_of)
def test_definition_gives_every_row_of_the_forward(parts: dict[str, bool]) -> None:
    """From the first token on, by one state, in steps of each token."""
    inputs = Inputs(parts, tokens=14)
    rows = inputs.rows()
    state = inputs.state([0])
    for row in range(14):
        got = multi_token_attention_decode_reference(**inputs.step([row + 1]), state=state)
        torch.testing.assert_close(got[:, :, 0], rows[:, :, row], msg=str(row))


@pytest.mark.parametrize("pad_key", ["both", "left", "right"])
@pytest.mark.parametrize("extra", [0, 3])
def test_definition_after_prompts_of_any_length(extra: int, pad_key: str) -> None:
    """Prompts shorter and longer than the taps look back, a batch of them, with longer windows than are needed."""
    lengths = [0, 1, 2, 4, 7, 33]
    inputs = Inputs(dict.fromkeys(PARTS, True), batch=6, groups=2, pad_key=pad_key, scale=0.4)
    rows = inputs.rows()
    state = inputs.state(lengths, extra)
    for step in range(1, 6):
        now = [length + step for length in lengths]
        for _ in range(2):  # a step may be repeated
            got = multi_token_attention_decode_reference(**inputs.step(now, extra), state=state)
            for sequence, length in enumerate(now):
                torch.testing.assert_close(got[sequence, :, 0], rows[sequence, :, length - 1])
        assert state.lengths.tolist() == now


def test_definition_of_norm_gate_pages_and_sequences_without_tokens() -> None:
    lengths = [5, 0, 18]
    after = {
        "norm_weight": torch.linspace(0.5, 1.5, 16, device=DEVICE).double(), "depth": 3,
        "gate_weight": torch.linspace(-1, 1, 16, device=DEVICE).double()[None],
        "gate_bias": torch.full([1], 0.3, device=DEVICE).double(),
    }  # fmt: skip
    inputs = Inputs(dict.fromkeys(PARTS, True), batch=3, **after)
    rows = inputs.rows()
    state = inputs.state([4, 0, 17])
    step = inputs.step(lengths)
    step["k_cache"], table = paged(step["k_cache"], 16)
    step["v_cache"], _ = paged(step["v_cache"], 16)
    room = DecodeState.empty(3, 4, 4, 48, dtype=torch.float64, device=DEVICE)
    room.logits[..., :40], state = state.logits, DecodeState(room.logits, state.logsumexp, state.lengths)
    got = multi_token_attention_decode_reference(**step, state=state, block_table=table)
    assert (got[1] == 0).all()
    for sequence in (0, 2):
        torch.testing.assert_close(got[sequence, :, 0], rows[sequence, :, lengths[sequence] - 1])


def test_state_that_does_not_fit_is_refused() -> None:
    inputs = Inputs(dict.fromkeys(PARTS, True), batch=2)
    step = inputs.step([9, 5])
    with pytest.raises(TypeError, match="state is None and post_conv looks back on 4 queries; give the DecodeState"):
        multi_token_attention_decode_reference(**step)
    for lengths in ([7, 4], [8, 3], [9, 6]):
        with pytest.raises(ValueError, match=r"lengths says \d tokens of sequence \d, the new one included, and state"):
            multi_token_attention_decode_reference(**step, state=inputs.state(lengths))
    state = inputs.state([8, 4])
    short = DecodeState(state.logits[..., :30], state.logsumexp, state.lengths)
    with pytest.raises(ValueError, match=r"logits of shape \(2, 4, 4, 30\); expected \[2, 4, 4, 40 or more\]"):
        multi_token_attention_decode_reference(**step, state=short)
    half = DecodeState(state.logits.half(), state.logsumexp, state.lengths)
    with pytest.raises(TypeError, match="they must be the same"):
        multi_token_attention_decode_reference(**step, state=half)
    step["q_window"].requires_grad_()
    with pytest.raises(RuntimeError, match="not differentiable"):
        multi_token_attention_decode_reference(**step, state=state)


def test_short_window_and_long_lengths_are_refused() -> None:
    inputs = Inputs(dict.fromkeys(PARTS, True))
    step = inputs.step([9])
    short = step | {"q_window": step["q_window"][:, :, 1:]}
    with pytest.raises(ValueError, match="q_window holds 2 queries"):
        multi_token_attention_decode_reference(**short, state=inputs.state([8]))
    with pytest.raises(ValueError, match="the cache holds 40 keys a sequence"):
        multi_token_attention_decode_reference(**step | {"lengths": step["lengths"] + 40}, state=inputs.state([8]))
    mixers = {"post_conv": inputs.mixers["post_conv"], "pre_conv": inputs.mixers["pre_conv"]}
    with pytest.raises(ValueError, match="rows that steps look back on need 5: give the last 5"):
        prefill_state(inputs.q[:, :, -4:], inputs.k, lengths=torch.tensor([9], device=DEVICE), **mixers)


def test_eager_error_is_that_of_the_forward() -> None:
    inputs = Inputs(dict.fromkeys(PARTS, True), dtype=torch.float16)
    exact = inputs.double().rows()[:, :, 20:21]
    got = multi_token_attention_decode_reference(**inputs.step([21]), state=inputs.state([20]))
    assert relative_error(got, exact) <= 2 * max(relative_error(inputs.rows()[:, :, 20:21], exact), 1e-3)
