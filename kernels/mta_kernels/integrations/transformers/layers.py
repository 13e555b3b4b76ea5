"""Adds the parameters of multi-token attention to the attention layers of a model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from mta_kernels.integrations.transformers.options import has_parameters, options_of
from mta_kernels.multi_token_attention import MultiTokenAttention

NAME = "mta"  # of the attention implementation, of the submodule in an attention layer, and in a config


def add_multi_token_attention(model: PreTrainedModel, *, layers: list[int] | None = None, **options: Any) -> None:
    """Give a model that is already there multi-token attention, which at first changes nothing.

    `layers` are those that get it, all if not given. `options` are those of `MultiTokenAttention`, by default one
    convolution of scores: `pre_conv=(6, 11)`. Both are kept as `config.mta` and saved with the model. A norm or a gate
    changes the model at once. Raises ValueError for a model without causal attention layers that transformers'
    `AttentionInterface` reaches, and for layers that it does not have.
    """
    found: list[Any] = [module for module in model.modules() if _is_attention(module)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no causal attention layer with a layer_idx, head_dim and scaling")
    there = {module.layer_idx for module in found}
    if layers is not None and not there.issuperset(layers):
        raise ValueError(f"layers is {layers}; expected some of 0 to {max(there)}")
    model.set_attn_implementation(NAME)
    for module in found:
        module.config.mta = options | ({} if layers is None else {"layers": list(layers)})
        _add(module)
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
    if getattr(getattr(child, "config", None), "_attn_implementation", None) == NAME and _is_attention(child):
        _add(child)
    if isinstance(parent, PreTrainedModel) and any(isinstance(part, MultiTokenAttention) for part in child.modules()):
        _take_care_of(parent)


def _is_attention(module: Any) -> bool:
    names = ("config", "layer_idx", "head_dim", "scaling", "is_causal")
    return all(hasattr(module, name) for name in names) and module.is_causal


def _add(attention: Any) -> None:
    """Give a layer its parameters, in float32, and its attention the cache; nothing if the config leaves it out."""
    config = attention.config
    if not has_parameters(config, attention.layer_idx) or hasattr(attention, NAME):
        return
    parameter = next(attention.parameters())
    added = MultiTokenAttention(
        config.num_attention_heads, attention.head_dim, scale=attention.scaling, dtype=torch.float32,
        device=parameter.device, **options_of(config)[1],
    )  # fmt: skip
    setattr(attention, NAME, added)
    attention.register_forward_pre_hook(_with_cache, with_kwargs=True)


def _with_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hands the cache on to the attention function, which transformers does not."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return args, kwargs | {"mta_cache": cache}


def _take_care_of(model: Any) -> None:
    """Let a model initialise these parameters as the identity, and load them in float32."""
    if not isinstance(model._init_weights, partial):
        model._init_weights = partial(_init_weights, model._init_weights)
        model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), NAME}


def _init_weights(of_the_model: Any, module: nn.Module) -> None:
    """Initialise a module; of multi-token attention those parameters that no checkpoint had."""
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
