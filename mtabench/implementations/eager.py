"""The definition in PyTorch, operation by operation: the baseline of every speedup."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mtabench.implementations import Closure, Implementation, Style
from mtabench.implementations._calls import conv_attention_by
from mtabench.model import dense
from mtabench.problem.case import Case

if TYPE_CHECKING:
    from mtabench.problem.inputs import Inputs


def build(case: Case, inputs: Inputs) -> Closure:
    """The reference, which splits no keys, whatever the case says of that."""
    return conv_attention_by("reference", replace(case, splits=None), inputs)


ENTRIES = (
    Implementation(
        order=10, name="eager", op="conv-attention", passes=("fwd", "bwd", "decode"), devices=("cuda", "cpu"),
        work="dense",
        summary="the definition in eager PyTorch; stores the N x N scores",
        build=build, why_not=lambda case: None, ranks_backend="reference",
        style=Style("#000000", "#F5F5F5", "o", "-", series=5),
        kernels=lambda case, tiles, sm_count: dense.kernels(case),
    ),
)  # fmt: skip
