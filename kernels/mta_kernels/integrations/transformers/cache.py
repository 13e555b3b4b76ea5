"""The queries that a layer of the cache keeps beside its keys and values, since convolutions look back on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class WithQueries(DynamicLayer):
    """A layer that has the last queries of each sequence too, and moves them wherever its keys go."""

    _layer_type = None  # not a type of layer that a config may name
    is_croppable = False  # queries older than the last are gone
    queries: Tensor | None = None  # [B, heads, as many as are looked back on, head_dim]

    def with_older(self, query: Tensor, count: int) -> Tensor:
        """The kept queries and after them `query [B, heads, M, head_dim]`, whose last `count` are kept from now on."""
        window = query if self.queries is None else torch.cat([self.queries, query], dim=2)
        self.queries = window[:, :, max(0, window.shape[2] - count) :].clone()  # a view would keep all of the window
        return window

    def reset(self) -> None:
        super().reset()
        self.queries = None

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            f"the cache was asked to drop {abs(tokens_to_remove)} tokens and attn_implementation='mta' keeps no older "
            "queries; generate without an assistant model and without prompt lookup"
        )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.queries is not None:
            self.queries = self.queries.index_select(0, beam_idx.to(self.queries.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.queries is not None:
            self.queries = self.queries.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.queries is not None:
            self.queries = self.queries[indices]


class DynamicLayerWithQueries(WithQueries):
    """A `DynamicLayer` with queries."""


class SlidingLayerWithQueries(WithQueries, DynamicSlidingWindowLayer):
    """A `DynamicSlidingWindowLayer` with queries, for as long as its window hides no key: `mta_mask` refuses others."""

    _layer_type = None


KINDS: dict[type, type[WithQueries]] = {
    DynamicLayer: DynamicLayerWithQueries, DynamicSlidingWindowLayer: SlidingLayerWithQueries,
}  # fmt: skip


def layer_with_queries(cache: Any, index: int) -> WithQueries:
    """Layer `index` of a cache, which keeps queries from its first use on; raises ValueError for other caches."""
    layer = cache.layers[index] if hasattr(cache, "layers") else cache
    if type(layer) in KINDS:
        layer.__class__ = KINDS[type(layer)]  # its keys stay where they are
    if not isinstance(layer, WithQueries):
        raise ValueError(
            f"layer {index} has its keys in a {type(layer).__name__}; attn_implementation='mta' needs a DynamicCache: "
            "leave cache_implementation out"
        )
    return layer
