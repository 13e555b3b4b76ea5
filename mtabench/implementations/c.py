"""The ladder's rungs in C, on a CPU."""

from __future__ import annotations

from functools import partial

from mtabench.implementations import Style
from mtabench.implementations._calls import ladder_rung
from mtabench.problem.rungs import Rung

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
        stores=Rung(float32=True),
    ),
)  # fmt: skip
