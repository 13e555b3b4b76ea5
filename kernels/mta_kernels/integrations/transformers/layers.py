"""Adds the parameters of multi-token attention to the attention layers of a model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel, cache_utils

from mta_kernels.integrations.transformers.options import FIRST, KEYS, NAME, options_of, with_group
from mta_kernels.multi_token_attention import MultiTokenAttention

KINDS = {"full_attention": "hybrid", "sliding_attention": "hybrid_sliding"}  # types of layers, and those with states


def reserve_states() -> None:
    """From now on new caches of models with `attn_implementation="mta"` have layers that keep states too.

    `config.layer_types` cannot request them: models find their masks by it.
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
    """The queries that layer `index` of a cache keeps, and after them `query [B, heads, M, head_dim]`.

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


def add_multi_token_attention(model: PreTrainedModel, *, layers: Sequence[int] | None = None, **options: Any) -> None:
    """Give an existing model multi-token attention, which at first changes nothing.

    `layers` get it, all if not given; another call may give other layers other options. `options` are arguments of
    `MultiTokenAttention`, by default one convolution of scores: `pre_conv=(6, 11)`; `depth="layer"` is each layer's own
    index. All are kept as `config.mta` and saved with the model. A norm or a gate changes the model at once. Raises
    ValueError for a model without causal attention layers that transformers' `AttentionInterface` reaches, for layers
    that it does not have or that have multi-token attention, and for options that do not fit; the model is then
    unchanged.
    """
    _check_interface(model)
    found: list[Any] = [module for module in model.modules() if is_attention(module)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no causal attention layer with a layer_idx, head_dim and scaling")
    there = {module.layer_idx for module in found}
    if layers is not None and not there.issuperset(layers):
        raise ValueError(f"layers is {list(layers)}; expected some of 0 to {max(there)}")
    if unknown := [name for name in options if name not in KEYS]:
        raise ValueError(f"there is no option {unknown[0]!r}; expected some of {', '.join(KEYS)}")
    chosen = [module for module in found if layers is None or module.layer_idx in layers]
    if has := [module.layer_idx for module in chosen if hasattr(module, NAME)]:
        raise ValueError(f"layer {has[0]} has multi-token attention already; give the layers that do not have it")
    configs = {id(module.config): module.config for module in chosen}.values()
    before = [getattr(config, NAME, None) for config in configs]
    try:
        for config in configs:
            config.mta = with_group(config, layers, options)
        made = [(module, _made(module)) for module in chosen]
    except Exception:
        for config, value in zip(configs, before, strict=True):
            config.mta = value
        raise
    model.set_attn_implementation(NAME)
    for module, added in made:
        _attach(module, added)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            _take_care_of(part)


def watch_registrations() -> None:
    """From now on attention layers of models that are built with `attn_implementation="mta"` get their parameters.

    PyTorch calls a hook whenever a module becomes part of another: a model is complete when its weights are loaded.
    """
    register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None:
        return
    if isinstance(parent, PreTrainedModel) and _implementation(parent) == NAME:
        _check_interface(parent)
    if is_attention(child) and options_of(child.config, child.layer_idx) is not None:  # type: ignore[union-attr, arg-type]
        if _implementation(child) == NAME:
            if not hasattr(child, NAME):
                _attach(child, _made(child))
        elif getattr(child.config, NAME, None) is not None:
            warnings.warn(
                f"config.mta is set, and attn_implementation is {_implementation(child)!r}: the model computes plain "
                "attention and leaves out its trained mixers; pass attn_implementation='mta'", stacklevel=2,
            )  # fmt: skip
    if isinstance(parent, PreTrainedModel) and any(isinstance(part, MultiTokenAttention) for part in child.modules()):
        _take_care_of(parent)


def _implementation(module: Any) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def is_attention(module: Any) -> bool:
    """Whether a module is a causal attention layer as transformers' models with `AttentionInterface` have them."""
    names = ("config", "layer_idx", "scaling", "is_causal")
    return all(hasattr(module, name) for name in names) and _head_dim(module) is not None and module.is_causal


def _head_dim(module: Any) -> int | None:
    return getattr(module, "head_dim", None) or getattr(module, "head_size", None)  # the latter in GPT-NeoX


def uses_interface(modeling: str) -> bool:
    """Whether a modeling module leaves attention to `AttentionInterface`, as far as it has attention of its own."""
    module = sys.modules.get(modeling)
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return True
    return not any(name.endswith("Attention") and isinstance(x, type) for name, x in vars(module).items())


def _check_interface(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that would lose its causal mask, or find no attention of this name."""
    if not uses_interface(type(model).__module__):
        raise ValueError(
            f"{type(model).__name__} computes attention by itself and not by transformers' AttentionInterface; "
            "attn_implementation='mta' needs a model that does, such as Llama"
        )


def _made(attention: Any) -> MultiTokenAttention:
    """The parameters of a layer, in float32."""
    device = next(attention.parameters()).device
    options = options_of(attention.config, attention.layer_idx) or FIRST
    return MultiTokenAttention(
        attention.config.num_attention_heads, _head_dim(attention), scale=attention.scaling,  # type: ignore[arg-type]
        dtype=torch.float32, device=device, **options,
    )  # fmt: skip


def _attach(attention: Any, added: MultiTokenAttention) -> None:
    """Give a layer its parameters, and its attention the cache."""
    setattr(attention, NAME, added)
    attention.register_forward_pre_hook(_with_cache, with_kwargs=True)


def _with_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Passes the cache on to the attention function, which transformers does not."""
    names = ("cache", "past_key_values", "layer_past")  # in transformers to come, in most models, in GPT-NeoX
    cache = next((kwargs[name] for name in names if name in kwargs), None)
    return args, kwargs | {"mta_cache": cache}


def _take_care_of(model: Any) -> None:
    """Let a model initialise these parameters as the identity, and load them in float32."""
    if not isinstance(model._init_weights, partial):
        model._init_weights = partial(_init_weights, model._init_weights)
        model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), NAME}
        model.register_forward_pre_hook(_with_mask, with_kwargs=True)


def _with_mask(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Gives a compiled call a mask. Without one transformers looks for documents, which breaks the graph."""
    names = ("attention_mask", "position_ids", "cache", "past_key_values")
    if torch.compiler.is_compiling() and len(args) < 2 and all(kwargs.get(name) is None for name in names):
        tokens = (
            args[0] if args else next(kwargs[x] for x in ("input_ids", "inputs_embeds") if kwargs.get(x) is not None)
        )
        kwargs = kwargs | {"attention_mask": torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)}
    return args, kwargs


def _init_weights(of_the_model: Any, module: nn.Module) -> None:
    """Initialise a module; of multi-token attention only the parameters that no checkpoint had."""
    if not isinstance(module, MultiTokenAttention):
        of_the_model(module)
        return
    loaded: list[tuple[nn.Parameter, Tensor]] = [
        (x, x.detach().clone()) for x in module.parameters() if getattr(x, "_is_hf_initialized", False)
    ]
    module.reset_parameters()
    with torch.no_grad():
        for parameter, value in loaded:
            parameter.copy_(value)
