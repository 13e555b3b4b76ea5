"""Generating with a cache: prompts in chunks, then a token of every sequence at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mtabench.transformer.cache import Cache
from mtabench.transformer.model import Transformer

CHUNK = 2048  # tokens of a prompt at a time


@torch.no_grad()
def prefill(model: Transformer, cache: Cache, prompts: Tensor, lengths: Tensor, chunk: int = CHUNK) -> Tensor:
    """Put prompts `[B, N]`, of `lengths [B]` tokens and padded on the right, into the cache.

    Returns the logits `[B, vocabulary]` after the last token of each. Raises ValueError if they do not fit.
    """
    cache.begin(lengths)
    last = prompts.new_zeros(prompts.shape[0], model.config.dim, dtype=model.tokens.weight.dtype)
    for start in range(0, prompts.shape[1], chunk):
        x = model.hidden(prompts[:, start : start + chunk], cache)
        at = cache.lengths - 1 - start
        rows = x[torch.arange(x.shape[0], device=x.device), at.clamp(0, x.shape[1] - 1)]
        last = torch.where(((at >= 0) & (at < x.shape[1]))[:, None], rows, last)
        cache.start += x.shape[1]
    cache.end(model)
    return model.logits(last)


@torch.no_grad()
def step(model: Transformer, cache: Cache, tokens: Tensor) -> Tensor:
    """One more token of each sequence, `[B]`, into the cache: logits `[B, vocabulary]` of those after them."""
    cache.advance()
    return model.logits(model.hidden(tokens[:, None], cache)[:, 0])


class Generator:
    """Takes the most likely token of every sequence, again and again; on a GPU by replaying one CUDA graph.

    `tokens [B]` are those that come next, to begin with those after the prompts, whose logits are given. `room` is how
    many more the cache holds of the longest sequence.
    """

    def __init__(self, model: Transformer, cache: Cache, logits: Tensor) -> None:
        self.cache, self.tokens = cache, logits.argmax(-1)
        self.room = cache.capacity - int(cache.lengths.max())
        self._model = model
        self._graph: torch.cuda.CUDAGraph | None = None
        if logits.is_cuda and self.room > 0:
            self._record()

    def next(self) -> Tensor:
        """The next token of each sequence, `[B]`, which the cache then holds; raises ValueError if it is full."""
        if self.room < 1:
            raise ValueError(f"the cache is full: it has room for {self.cache.capacity} tokens; make it larger")
        self.room -= 1
        taken = self.tokens.clone()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()
        return taken

    def _step(self) -> None:
        self.tokens.copy_(step(self._model, self.cache, self.tokens).argmax(-1))

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Within, a step may be taken in vain: it is undone, and may be repeated from the same lengths and queries."""
        changed = self.tokens, self.cache.lengths, self.cache.queries
        kept = [x.clone() for x in changed]
        yield
        for x, before in zip(changed, kept, strict=True):
            x.copy_(before)

    def _record(self) -> None:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with self._undone():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                self._step()
        self._graph = graph
