"""The ladder's rungs in Triton."""

from __future__ import annotations

from functools import partial

from mtabench.implementations import Style
from mtabench.implementations._calls import gpu_rung, rung_why_not, triton_untimed
from mtabench.problem.case import Case
from mtabench.problem.rungs import Rung


def why_not(case: Case) -> str | None:
    """Why a rung in Triton cannot be timed, or None."""
    return triton_untimed(case) or rung_why_not(case)


_rung = partial(gpu_rung, why_not=why_not, interpreted=rung_why_not)

ENTRIES = (
    _rung(
        order=160, name="triton-pointer", work="dense",
        summary="plain attention: fused in Triton, pointers and masks over the packed layout",
        style=Style("#7B3FA0", "#C58CF0", "o", (0, (1.2, 1.2)), alone=True),
        flops=1.5e14,  # a guess, as that of triton-descriptor
        stores=Rung(copies="qkv"),  # the packed layout [B, N, heads * head_dim]
    ),
    _rung(
        order=170, name="triton-descriptor", work="dense",
        summary="plain attention: fused in Triton, tensor descriptors, keys stored transposed",
        style=Style("#7B3FA0", "#C58CF0", "s", (0, (4, 1.6)), alone=True), flops=1.5e14,
        stores=Rung(copies="k"),  # transposed
    ),
    _rung(
        order=180, name="triton-fmha", work="tiled",
        summary="plain attention: fused in Triton as it is run: exp2, skipped tiles, grouped heads",
        style=Style("#7B3FA0", "#C58CF0", "^", "-", alone=True),
        stores=Rung(),
    ),
)  # fmt: skip
