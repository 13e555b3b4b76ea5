"""The ladder's rung in NVIDIA's cuTile."""

from __future__ import annotations

from mtabench.implementations import Style
from mtabench.implementations._calls import gpu_rung
from mtabench.model import on_chip
from mtabench.model.devices import Device
from mtabench.model.fused import power_of_two
from mtabench.model.on_chip import Tile
from mtabench.model.rungs import Rung
from mtabench.problem.case import Case


def tile(case: Case, device: Device) -> Tile | None:
    """In 16 bits: float32 has no such kernel."""
    from mta_kernels.attention.cutile_fmha import tile_rows

    if case.dtype == "fp32":
        return None
    columns = max(16, power_of_two(case.head_dim))
    return on_chip.blocks(case, *tile_rows(columns, device.capability), columns, columns)


ENTRIES = (
    gpu_rung(
        order=190, name="cutile-fmha", work="tiled",
        summary="plain attention: the same in NVIDIA's cuTile for Python",
        style=Style("#0E7C86", "#35C4CF", "^", "-", alone=True),
        stores=Rung(), tile=tile,
    ),
)  # fmt: skip
