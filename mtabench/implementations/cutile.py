"""The ladder's rung in NVIDIA's cuTile."""

from __future__ import annotations

from mtabench.implementations import Style
from mtabench.implementations._calls import gpu_rung
from mtabench.problem.rungs import Rung

ENTRIES = (
    gpu_rung(
        order=190, name="cutile-fmha", work="tiled",
        summary="plain attention: the same in NVIDIA's cuTile for Python",
        style=Style("#0E7C86", "#35C4CF", "^", "-", alone=True),
        stores=Rung(),
    ),
)  # fmt: skip
