"""The published approach to conv attention in CUDA: overlapping tiles, the convolution on the CUDA cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtabench.implementations import Closure, Implementation, Style
from mtabench.implementations._calls import options_of, typical_conv_call, weight_of
from mtabench.problem.case import Case

if TYPE_CHECKING:
    from mtabench.problem.inputs import Inputs


def build(case: Case, inputs: Inputs) -> Closure:
    """Its functions of their own: it is no backend of `conv_attention`."""
    from mta_ladder import cuda_conv

    q, k, v, weight, options = inputs.q, inputs.k, inputs.v, weight_of(inputs), options_of(case, inputs)
    function = cuda_conv.conv_attention_decode if case.pass_ == "decode" else cuda_conv.conv_attention
    return lambda: function(q, k, v, weight, **options)


def why_not(case: Case) -> str | None:
    """Why it cannot run this case, or None."""
    from mta_ladder import cuda_conv

    return cuda_conv.unsupported(**typical_conv_call(case))


ENTRIES = (
    Implementation(
        order=60, name="cuda-conv", op="conv-attention", passes=("fwd", "bwd", "decode"), devices=("cuda",),
        work="overlapped",
        summary="the published approach in CUDA: overlapping tiles, the convolution on the CUDA cores",
        build=build, why_not=why_not, splits=True, by_name=True,
        style=Style("#7A7A00", "#C9C93A", "*", "-"), compiles=True,
    ),
)  # fmt: skip
