"""Stored scores for the row kernels, and the float64 definition of what comes of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from kernel_inputs import DEVICE
from torch import Tensor

NAN = float("nan")


@dataclass
class Chunk:
    """Stored scores `[B, H, R, ld]` with NaN in all columns that a row does not see, and how they are to be mixed."""

    scores: Tensor
    gradients: Tensor  # of the mixed probabilities, alike
    pre_mix: Tensor | None
    post_mix: Tensor | None
    first_position: int
    keys: int
    causal: bool
    documents: Tensor | None
    visible: Tensor  # [R, ld]

    @property
    def options(self) -> dict:
        return {
            "first_position": self.first_position, "keys": self.keys, "causal": self.causal,
            "documents": self.documents,
        }  # fmt: skip

    def logsumexp(self) -> Tensor:
        """Room for it, of unusual strides: rows, then heads, then sequences."""
        batch, heads, rows, _ = self.scores.shape
        return torch.full((rows, heads, batch), NAN, device=DEVICE).permute(2, 1, 0)

    def hidden(self, x: Tensor) -> Tensor:
        return x.masked_fill(~self.visible, 0)


def documents_of(starts: list[int], positions: int) -> Tensor:
    """`[2, positions]`: the first position of each one's document, and one past its last."""
    bounds = [*starts, positions]
    found = torch.empty(2, positions, dtype=torch.int32, device=DEVICE)
    for start, end in itertools.pairwise(bounds):
        found[0, start:end], found[1, start:end] = start, end
    return found


def make_chunk(
    batch: int, heads: int, rows: int, keys: int, *, dtype: torch.dtype = torch.bfloat16, causal: bool = True,
    above: int | None = None, room: int = 0, starts: list[int] | None = None, mix_dtype: torch.dtype | None = None,
    mixed: tuple[bool, bool] = (True, True), size: float = 1.5, seed: int = 0,
) -> Chunk:  # fmt: skip
    """A chunk of the last `rows` of `keys` positions, or of `rows` from `above` on; `room` columns too many."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ld = -(-keys // 8) * 8 + room
    first = keys - rows if causal else above or 0
    scores = (random(batch, heads, rows, ld) * size).clamp(-65504, 65504).to(DEVICE, dtype)
    positions, columns = torch.arange(first, first + rows)[:, None], torch.arange(ld)
    visible = (columns < keys) & ((columns <= positions) | torch.tensor(not causal))
    documents = None
    if starts is not None:
        documents = documents_of(starts, max(keys, first + rows))
        low, high = documents[:, first : first + rows, None].cpu()
        visible = visible & (columns >= low) & (columns < high)
    visible = visible.to(DEVICE)
    mixes = [
        (torch.eye(heads) + random(heads, heads) / heads**0.5).to(DEVICE, mix_dtype or dtype) if there else None
        for there in mixed
    ]
    gradients = random(batch, heads, rows, ld).to(DEVICE, dtype)
    for x in (scores, gradients):
        x.masked_fill_(~visible, NAN)
    return Chunk(scores, gradients, *mixes, first, keys, causal, documents, visible)


def exact(chunk: Chunk, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed probabilities, logsumexp and probabilities by definition, in float64 or as eager in another dtype."""
    stored = chunk.scores.dtype
    scores = chunk.hidden(chunk.scores).to(dtype)
    pre, post = (None if mix is None else mix.to(stored).to(dtype) for mix in (chunk.pre_mix, chunk.post_mix))
    logits = scores if pre is None else torch.einsum("hg,bgij->bhij", pre, scores)
    logits = logits.to(torch.promote_types(dtype, torch.float32)).masked_fill(~chunk.visible, -torch.inf)
    unseen = ~chunk.visible.any(-1, keepdim=True)
    probabilities = logits.masked_fill(unseen, 0).softmax(-1).masked_fill(unseen, 0).to(dtype)
    mixed = probabilities if post is None else torch.einsum("bgij,gh->bhij", probabilities, post)
    return mixed, logits.logsumexp(-1), probabilities


def exact_backward(chunk: Chunk, dtype: torch.dtype = torch.float64) -> tuple[Tensor | None, ...]:
    """Gradients of scores, pre_mix and post_mix by autograd through `exact`."""
    stored = chunk.scores.dtype
    leaves: dict[str, Any] = {
        name: x if x is None else x.to(stored).to(dtype) for name, x in vars(chunk).items() if "mix" in name
    }
    scores = chunk.hidden(chunk.scores).to(dtype)
    wanted = [x.requires_grad_() for x in (scores, *leaves.values()) if x is not None]
    mixed = exact(replace(chunk, scores=scores, **leaves), dtype)[0]
    found = iter(torch.autograd.grad(mixed, wanted, chunk.hidden(chunk.gradients).to(dtype)))
    return tuple(None if x is None else next(found) for x in (scores, *leaves.values()))
