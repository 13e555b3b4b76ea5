"""Plain attention by the packages of FlashAttention's authors."""

from __future__ import annotations

from functools import partial

from mtabench.implementations import Style
from mtabench.implementations._calls import ladder_rung

_package = partial(ladder_rung, passes=("fwd", "bwd"), devices=("cuda",), work="tiled", yardstick=True)

ENTRIES = (
    _package(
        order=240, name="flash-attn",
        summary="plain attention: FlashAttention-2, the package of its authors",
        style=Style("#0072B2", "#4FA3FF", "v", (0, (4, 1.6)), alone=True),
    ),
    _package(
        order=250, name="flash-attn-3",
        summary="plain attention: FlashAttention-3, the package of its authors",
        style=Style("#0072B2", "#4FA3FF", "X", (0, (1.2, 1.2)), alone=True),
    ),
    _package(
        order=255, name="flash-attn-4",
        summary="plain attention: FlashAttention-4, the package of its authors",
        style=Style("#0072B2", "#4FA3FF", "P", (0, (4, 1.2, 1.2, 1.2)), alone=True),
    ),
)  # fmt: skip
