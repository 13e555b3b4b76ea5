"""Plain attention by PyTorch's FlexAttention."""

from __future__ import annotations

from mtabench.implementations import Style
from mtabench.implementations._calls import ladder_rung, rung_why_not
from mtabench.problem.case import Case
from mtabench.problem.rungs import Rung


def why_not(case: Case) -> str | None:
    """Why FlexAttention cannot run this case, or None."""
    if case.pass_ == "bwd" and case.device == "cpu":
        return "FlexAttention has no backward on a CPU"
    return rung_why_not(case)


ENTRIES = (
    ladder_rung(
        order=230, name="flex", passes=("fwd", "bwd"), devices=("cuda", "cpu"), work="tiled",
        summary="plain attention: PyTorch's FlexAttention, written by torch.compile",
        why_not=why_not, yardstick=True,
        style=Style("#B8558F", "#E58FC2", "D", (0, (4, 1.6)), alone=True), compiles=True, slow_to_compile=True,
        stores=Rung(mask_bytes=2),  # two masks of booleans, of which the blocks to visit are made
    ),
)  # fmt: skip
