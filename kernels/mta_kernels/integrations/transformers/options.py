"""What a model's config says of multi-token attention: `config.mta`."""

from __future__ import annotations

from typing import Any

# The first version of the paper's attention: one convolution of scores. The module's other parts are options.
FIRST = {"pre_conv": (6, 11), "pre_mix": False, "post_conv": None, "post_mix": False, "norm": False, "gate": False}


def options_of(config: Any) -> tuple[list[int] | None, dict[str, Any]]:
    """The layers that have multi-token attention, None for all, and the options of their `MultiTokenAttention`."""
    options = FIRST | (getattr(config, "mta", None) or {})
    return options.pop("layers", None), options


def has_parameters(config: Any, layer: int) -> bool:
    """Whether a model of this config has multi-token attention in a layer."""
    layers, _ = options_of(config)
    return layers is None or layer in layers
