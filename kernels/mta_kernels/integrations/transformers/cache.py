"""The queries that convolutions look back on, where transformers' caches keep states of convolutions."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor
from transformers import cache_utils

from mta_kernels.integrations.transformers.options import NAME, options_of

KINDS = {"full_attention": "hybrid", "sliding_attention": "hybrid_sliding"}  # types of layers, and those with states


def reserve_states() -> None:
    """From now on new caches of models with `attn_implementation="mta"` have layers that keep states too.

    `config.layer_types` cannot ask for them: models find their masks by it.
    """
    plain = cache_utils.get_layer_types_and_kwargs

    @wraps(plain)
    def with_states(config: Any) -> tuple[list[str], Any]:
        types, options = plain(config)
        if config._attn_implementation == NAME:
            types = [kind if options_of(config, i) is None else KINDS.get(kind, kind) for i, kind in enumerate(types)]
        return types, options

    cache_utils.get_layer_types_and_kwargs = with_states


def with_older_queries(cache: Any, index: int, query: Tensor, count: int) -> Tensor:
    """The queries that layer `index` of a cache keeps, and behind them `query [B, heads, M, head_dim]`.

    The last `count` are kept from now on. Raises ValueError for a cache that keeps none, or was filled without them.
    """
    expected = "make it by DynamicCache(config=model.config) and fill it by the model itself"
    layer = cache.layers[index] if hasattr(cache, "layers") else cache  # continuous batching has one for all layers
    is_offloaded = getattr(cache, "offloading", False)
    if is_offloaded or not hasattr(layer, "conv_states"):
        kind = "an offloaded cache" if is_offloaded else f"a {type(layer).__name__}"
        raise ValueError(
            f"layer {index} has its keys in {kind}, which keeps no queries for attn_implementation='mta'; {expected}"
        )
    seen = cache.get_seq_length(index)
    if not layer.has_previous_state[0] and isinstance(seen, int) and seen > query.shape[2]:
        raise ValueError(f"the cache has {seen - query.shape[2]} keys and no queries of layer {index}; {expected}")
    states = cache.update_conv_state(query.transpose(2, 3), index, conv_kernel_size=max(count, 1))
    return states.transpose(2, 3)
