"""What a model's config says of multi-token attention: `config.mta`."""

from __future__ import annotations

import inspect
from typing import Any

from mta_kernels.multi_token_attention import MultiTokenAttention

# The first version of the paper's attention: one convolution of scores. The module's other parts are options.
FIRST = {"pre_conv": (6, 11), "pre_mix": False, "post_conv": None, "post_mix": False, "norm": False, "gate": False}
OF_THE_MODEL = ("causal", "scale", "dtype", "device")  # options of the module that no config says
KEYS = (
    "layers",
    *(
        name
        for name, one in inspect.signature(MultiTokenAttention).parameters.items()
        if one.kind is one.KEYWORD_ONLY and name not in OF_THE_MODEL
    ),
)


def options_of(config: Any) -> tuple[list[int] | None, dict[str, Any]]:
    """The layers that have multi-token attention, None for all, and the options of their `MultiTokenAttention`.

    Raises ValueError for a key that there is not, and for layers that the model does not have.
    """
    given = getattr(config, "mta", None) or {}
    if unknown := [name for name in given if name not in KEYS]:
        raise ValueError(f"config.mta has {unknown[0]!r}; expected some of {', '.join(KEYS)}")
    options = FIRST | given
    layers = options.pop("layers", None)
    if layers is not None and not set(layers) <= set(range(config.num_hidden_layers)):
        raise ValueError(f"config.mta has the layers {layers}; expected some of 0 to {config.num_hidden_layers - 1}")
    return layers, options


def has_parameters(config: Any, layer: int) -> bool:
    """Whether a model of this config has multi-token attention in a layer."""
    layers, _ = options_of(config)
    return layers is None or layer in layers
