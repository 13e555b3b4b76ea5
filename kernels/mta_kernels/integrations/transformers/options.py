"""A model config's options of multi-token attention: `config.mta`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mta_kernels.multi_token_attention import MultiTokenAttention

NAME = "mta"  # of the attention implementation, of the submodule in an attention layer, and in a config
# The first version of the paper's attention: one convolution of scores. The module's other parts are options.
FIRST = {"pre_conv": (6, 11), "pre_mix": False, "post_conv": None, "post_mix": False, "norm": False, "gate": False}
OF_THE_MODEL = ("causal", "scale", "dtype", "device")  # options of the module that a config cannot set
KEYS = (
    "layers",
    *(
        name
        for name, one in inspect.signature(MultiTokenAttention).parameters.items()
        if one.kind is one.KEYWORD_ONLY and name not in OF_THE_MODEL
    ),
)
OWN_INDEX = "layer"  # as `depth`: a layer's own index


def layer_groups(config: Any) -> list[tuple[list[int] | None, dict[str, Any]]]:
    """Groups of layers with the options of their `MultiTokenAttention`; None stands for all layers.

    `config.mta` is a group or a list of groups. Raises ValueError for a key that there is not, for layers that the
    model does not have, and for a layer in two groups.
    """
    given = getattr(config, "mta", None) or {}
    count: int = config.num_hidden_layers
    found: list[tuple[list[int] | None, dict[str, Any]]] = []
    seen: set[int] = set()
    for group in [given] if isinstance(given, Mapping) else given:
        if unknown := [name for name in group if name not in KEYS]:
            raise ValueError(f"config.mta has {unknown[0]!r}; expected some of {', '.join(KEYS)}")
        options = {**FIRST, **group}
        layers = options.pop("layers", None)
        if layers is not None and not set(layers) <= set(range(count)):
            raise ValueError(f"config.mta has the layers {list(layers)}; expected some of 0 to {count - 1}")
        if twice := sorted(seen & set(range(count) if layers is None else layers)):
            raise ValueError(f"config.mta has layer {twice[0]} in two groups; expected each layer in one")
        seen |= set(range(count) if layers is None else layers)
        found.append((layers, options))
    return found


def options_of(config: Any, layer: int) -> dict[str, Any] | None:
    """The options of a layer's `MultiTokenAttention`; None for plain attention. Errors as `layer_groups`."""
    for layers, options in layer_groups(config):
        if layers is None or layer in layers:
            own = {"depth": layer} if options.get("depth") == OWN_INDEX else {}
            return options | own
    return None


def with_group(config: Any, layers: Sequence[int] | None, options: Mapping[str, Any]) -> Any:
    """`config.mta` with a group for these layers added; no layer's earlier options change."""
    group = dict(options) | ({} if layers is None else {"layers": list(layers)})
    before = getattr(config, "mta", None)
    if before is None:
        return group
    return [*([before] if isinstance(before, Mapping) else before), group]
