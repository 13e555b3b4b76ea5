"""The ladder's rungs in C, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mtabench.implementations import Style
from mtabench.implementations._calls import ladder_rung
from mtabench.model.devices import Device
from mtabench.model.on_chip import Tile, blocks, constants_in
from mtabench.model.rungs import Rung
from mtabench.problem.case import Case


def tile(case: Case, device: Device) -> Tile:
    """Of c-tiled, in a core's caches."""
    from mta_kernels.attention.c_compiler import FOLDER

    sizes = constants_in(FOLDER / "c_tiled.c")
    return blocks(replace(case, dtype="fp32"), sizes["QUERIES"], sizes["KEYS"], case.head_dim, case.head_dim)


_rung = partial(ladder_rung, passes=("fwd",), devices=("cpu",))

ENTRIES = (
    _rung(
        order=110, name="c-loops", work="dense",
        summary="plain attention: three loops in C; stores the N x N scores of a head",
        style=Style("#8A4B08", "#D8A05B", "o", (0, (1.2, 1.2)), alone=True), flops=2.5e9,
        # Scores written; read for the maximum; exponentials, and then the division, in place.
        stores=Rung(score_bytes=4, passes=6, one_head=True, float32=True),
    ),
    _rung(
        order=120, name="c-tiled", work="tiled",
        summary="plain attention: C in tiles that fit the caches, all cores and their vector units",
        style=Style("#8A4B08", "#D8A05B", "s", "-", alone=True),
        stores=Rung(float32=True), tile=tile,
    ),
)  # fmt: skip
