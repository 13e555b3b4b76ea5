"""The definition in PyTorch, operation by operation: the baseline of every speedup."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mtabench.implementations import Closure, Implementation, Style
from mtabench.implementations._calls import conv_attention_by, mta_by
from mtabench.problem.case import Case

if TYPE_CHECKING:
    from mtabench.problem.inputs import Inputs


def build(case: Case, inputs: Inputs) -> Closure:
    """The reference, which splits no keys, whatever the case says of that."""
    return conv_attention_by("reference", replace(case, splits=None), inputs)


def build_mta(case: Case, inputs: Inputs) -> Closure:
    """The reference of all steps, or of a decode step."""
    from mta_kernels import multi_token_attention as mta

    decode = case.pass_ == "decode"
    reference = mta.multi_token_attention_decode_reference if decode else mta.multi_token_attention_reference
    return mta_by(reference, case, inputs)


_eager = partial(
    Implementation, name="eager", passes=("fwd", "bwd", "decode"), devices=("cuda", "cpu"), work="dense",
    summary="the definition in eager PyTorch; stores the N x N scores", why_not=lambda case: None,
    pages=True, style=Style("#000000", "#F5F5F5", "o", "-"), planned=True,
)  # fmt: skip

ENTRIES = (
    _eager(order=10, op="conv-attention", build=build),
    _eager(order=70, op="mta", build=build_mta),
)
