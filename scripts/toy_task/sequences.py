"""The toy task: the questions of a run, and its sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LETTERS, BLOCK, QUERY = 26, 5, 2
MARK, QUERY_MARK, VOCABULARY = LETTERS, LETTERS + 1, LETTERS + 2
ANSWERS = {"all": slice(0, BLOCK), "first": slice(0, 1), "last": slice(BLOCK - 1, BLOCK)}
DRAWN = 100  # batches at a time


@dataclass(frozen=True)
class Setting:
    """One run: a model, its task and how it is trained."""

    attention: str
    seed: int
    variant: str
    blocks: int
    width: int
    heads: int
    layers: int
    batch: int
    steps: int
    learning_rate: float

    @property
    def answer(self) -> int:
        """Letters of the answer."""
        return len(range(BLOCK)[ANSWERS[self.variant]])

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.blocks * (BLOCK + 1) + QUERY + self.answer


def draw_blocks(count: int, generator: torch.Generator) -> Tensor:
    """`[count, BLOCK]`: different letters in random order."""
    return torch.rand(count, LETTERS, generator=generator, device=generator.device).topk(BLOCK).indices


def draw_sequences(
    count: int, blocks: int, variant: str, generator: torch.Generator, query_letters: int = QUERY
) -> Tensor:
    """`[count, tokens]`: blocks with a mark after each, a query that one block alone answers, and that answer."""
    row = torch.arange(count, device=generator.device)
    letters = draw_blocks(count * blocks, generator).view(count, blocks, BLOCK)
    place = torch.randint(blocks, (count,), generator=generator, device=generator.device)
    target = letters[row, place]
    order = torch.rand(count, BLOCK, generator=generator, device=generator.device).topk(query_letters).indices
    query = target.gather(1, order)
    while True:
        has_query = (letters[..., None] == query[:, None, None]).any(2).all(2)  # [count, blocks]
        has_query[row, place] = False
        rivals = int(has_query.sum())
        if not rivals:
            break
        letters[has_query] = draw_blocks(rivals, generator)
    marks = torch.full((count, blocks, 1), MARK, device=generator.device)
    marks[:, -1] = QUERY_MARK
    return torch.cat([torch.cat([letters, marks], 2).flatten(1), query, target[:, ANSWERS[variant]]], 1)


def draw_batches(setting: Setting, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of fresh sequences, without end."""
    while True:
        drawn = draw_sequences(DRAWN * setting.batch, setting.blocks, setting.variant, generator)
        yield from drawn.split(setting.batch)
