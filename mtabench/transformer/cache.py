"""What a model keeps of the tokens before: keys and values in pages, the last queries, rows of probabilities.

Generating with it: prompts in chunks, then a token of every sequence at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mta_kernels.multi_token_attention import DecodeState, MultiTokenAttention, multi_token_attention_decode
from mtabench.problem.layers import PAGE
from mtabench.transformer.model import Config, Transformer, plain_attention

CHUNK = 2048  # tokens of a prompt at a time


class Cache:
    """The tokens of `batch` sequences, of lengths of their own, with room for `capacity` each.

    `begin`, the prompts in chunks, `end`; then `advance` and one token of each sequence, again and again. Every tensor
    stays where it is, so that a CUDA graph can replay a step. `pages`, keys and values `[2, layers, pages, heads, PAGE,
    head dim]`, may be given, so that several models share them in turns.
    """

    def __init__(
        self, model: Transformer, batch: int, capacity: int, dtype: torch.dtype, pages: Tensor | None = None
    ) -> None:
        config, device = model.config, model.table.device
        self.batch, self.capacity = batch, capacity
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.pages = new_pages(config, batch, capacity, dtype, device) if pages is None else pages
        count = -(-capacity // PAGE)
        self.block_table = torch.arange(batch * count, dtype=torch.int32, device=device).view(batch, count)
        backs = [0 if mta is None else looks_back(mta) for mta in model.attentions()]
        self.rows = max(1, *backs)
        # The last queries of each sequence, oldest first, of the layers that look back on them.
        self.windows = {layer: number for number, layer in enumerate(one for one, back in enumerate(backs) if back)}
        size = len(self.windows), batch, config.heads, self.rows, config.head_dim
        self.queries = torch.zeros(size, dtype=dtype, device=device)
        self.states: dict[int, DecodeState] = {}
        for layer, mta in enumerate(model.attentions()):
            if mta is not None and mta.mta_kernel_after_sm is not None and mta.mta_kernel_after_sm.shape[2] > 1:
                taps = mta.mta_kernel_after_sm.shape[2]
                self.states[layer] = DecodeState.empty(
                    batch, config.heads, taps, count * PAGE, dtype=dtype, device=device
                )
        self._one_tap = torch.ones(config.heads, 1, 1, dtype=dtype, device=device)  # plain attention
        self.decoding = False
        self.begin(self.lengths)

    def begin(self, lengths: Tensor) -> None:
        """Forget everything and expect prompts of these lengths `[B]`, padded on the right to the longest."""
        self.lengths.copy_(lengths)
        self.start, self.decoding = 0, False
        self._history: dict[int, Tensor] = {}

    def end(self, model: Transformer) -> None:
        """The prompts are in: what decode steps look back on is computed of their last rows."""
        self.decoding, self._history = True, {}
        for layer, state in self.states.items():
            mta = model.attentions()[layer]
            assert mta is not None
            new = mta.prefill_state(
                self.queries[self.windows[layer]], self.pages[0, layer], lengths=self.lengths,
                block_table=self.block_table,
            )  # fmt: skip
            for name in ("logits", "logsumexp", "lengths"):
                getattr(state, name).copy_(getattr(new, name))

    def advance(self) -> None:
        """Make room for the next token of each sequence: where, all layers share."""
        self.lengths += 1
        at = (self.lengths - 1).long()
        self._page, self._row = self.block_table.gather(1, (at // PAGE)[:, None])[:, 0].long(), at % PAGE
        if self.rows > 1 and len(self.windows):
            self.queries[..., :-1, :] = self.queries[..., 1:, :].clone()

    def turns(self, table: Tensor, count: int) -> Tensor:
        """The rotary angles of the next `count` tokens, out of the angles of all positions."""
        if self.decoding:
            return table[:, self.lengths - 1][:, :, None, None]  # [2, B, 1, 1, D / 2]
        return table[:, self.start : self.start + count]

    def attend(self, layer: int, attention: MultiTokenAttention | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the next tokens to all up to them, whose keys and values it keeps."""
        return (self._step if self.decoding else self._chunk)(layer, attention, q, k, v)

    def _step(self, layer: int, attention: MultiTokenAttention | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new token of each sequence."""
        for pages, new in zip(self.pages[:, layer], (k, v), strict=True):
            pages[self._page, :, self._row] = new[:, :, 0]
        if layer in self.windows:
            self.queries[self.windows[layer], :, :, -1] = q[:, :, 0]
            q = self.queries[self.windows[layer]]
        options: dict[str, Any] = {"lengths": self.lengths, "block_table": self.block_table}
        keys, values = self.pages[:, layer]
        if attention is None:
            return multi_token_attention_decode(q, keys, values, pre_conv=self._one_tap, **options)
        return attention.decode(q, keys, values, **options, state=self.states.get(layer))

    def _chunk(self, layer: int, attention: MultiTokenAttention | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next tokens of all prompts, at the same positions."""
        stop = self.start + q.shape[2]
        if stop > self.capacity:
            raise ValueError(
                f"the prompts have {stop} tokens or more and the cache has room for {self.capacity}; make it larger"
            )
        at = torch.arange(self.start, stop, device=q.device)
        page, row = self.block_table[:, at // PAGE], (at % PAGE).expand(self.batch, -1)
        for pages, new in zip(self.pages[:, layer], (k, v), strict=True):
            pages[page, :, row] = new.transpose(1, 2).to(pages.dtype)
        if self.start:
            k, v = (self._gathered(pages, stop) for pages in self.pages[:, layer])
        history = self._history.get(layer)
        if layer in self.windows:
            self._history[layer] = q if history is None else torch.cat([history, q], 2)
            self._history[layer] = self._history[layer][:, :, -self.rows :].clone()
            self._keep(self.queries[self.windows[layer]], q)
        if attention is None:
            return plain_attention(q, k, v)
        return attention(q, k, v, q_history=history)

    def _gathered(self, pages: Tensor, stop: int) -> Tensor:
        """`[B, H, stop, D]` of pages `[pages, H, PAGE, D]`."""
        own = pages[self.block_table[:, : -(-stop // PAGE)]]
        return own.transpose(1, 2).flatten(2, 3)[:, :, :stop]

    def _keep(self, window: Tensor, q: Tensor) -> None:
        """Of a chunk's queries, those among the last `rows` of a prompt, each in its place."""
        at = self.lengths[:, None] - self.rows + torch.arange(self.rows, device=q.device) - self.start  # [B, W]
        inside = ((at >= 0) & (at < q.shape[2]))[:, None, :, None]
        index = at.clamp(0, q.shape[2] - 1)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]).long()
        window.copy_(torch.where(inside, q.gather(2, index), window))


def looks_back(attention: MultiTokenAttention) -> int:
    """How many queries a decode step, or the state that it starts from, reads; 0 if the newest is enough."""
    pre, post = (0 if x is None else x.shape[2] - 1 for x in (attention.mta_kernel, attention.mta_kernel_after_sm))
    return max(pre + 1, pre + post) if pre or post else 0


def new_pages(config: Config, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Keys and values of all layers: `[2, layers, pages, heads, PAGE, head dim]`."""
    count = batch * -(-capacity // PAGE)
    return torch.zeros(2, config.layers, count, config.heads, PAGE, config.head_dim, dtype=dtype, device=device)


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
