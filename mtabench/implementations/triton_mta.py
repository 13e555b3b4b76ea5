"""The staged pipeline of the whole multi-token attention in Triton: chunks of stored scores, all heads together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mtabench.implementations import Closure, Implementation
from mtabench.implementations._calls import mta_by, mta_why_not, triton_untimed
from mtabench.implementations.triton import STYLE
from mtabench.problem.case import Case

if TYPE_CHECKING:
    from mtabench.problem.inputs import Inputs


def build(case: Case, inputs: Inputs) -> Closure:
    """The public functions by that backend."""
    from mta_kernels.multi_token_attention import multi_token_attention, multi_token_attention_decode

    decode = case.pass_ == "decode"
    return mta_by(multi_token_attention_decode if decode else multi_token_attention, case, inputs, backend="triton")


def why_not(case: Case) -> str | None:
    """Why the kernels cannot be timed, or None."""
    return triton_untimed(case) or mta_why_not("triton", case)


ENTRIES = (
    Implementation(
        order=90, name="triton", op="mta", passes=("fwd", "bwd", "decode"), devices=("cuda",), work="staged",
        summary="Triton kernels that keep scores of a chunk of query rows, of all heads, O(N) memory",
        build=build, why_not=why_not, interpreted=partial(mta_why_not, "triton"), pages=True, style=STYLE,
        compiles=True, planned=True,
    ),
)  # fmt: skip
