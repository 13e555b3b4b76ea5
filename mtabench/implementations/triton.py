"""Triton kernels: conv attention fused in the expanded form, and all of multi-token attention in stages."""

from functools import partial

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import (
    backend_why_not,
    conv_attention_by,
    mta_by_backend,
    mta_why_not,
    triton_untimed,
)
from mtabench.problem.case import Case


def why_not(case: Case) -> str | None:
    """Why the kernels cannot be timed, or None."""
    return triton_untimed(case) or (mta_why_not if case.op == "mta" else backend_why_not)("triton", case)


_triton = partial(
    Implementation, name="triton", passes=("fwd", "bwd", "decode"), devices=("cuda",), why_not=why_not, pages=True,
    style=Style("#D55E00", "#FF8533", "^", "-"), compiles=True, planned=True,
)  # fmt: skip

ENTRIES = (
    _triton(
        order=30, op="conv-attention", work="expanded",
        summary="fused Triton kernels in the expanded form, O(N) memory",
        note="backward keeps scores of 2048 query rows at a time",
        build=partial(conv_attention_by, "triton"), interpreted=partial(backend_why_not, "triton"), splits=True,
    ),
    _triton(
        order=90, op="mta", work="staged",
        summary="Triton kernels that keep scores of a chunk of query rows, of all heads, O(N) memory",
        build=partial(mta_by_backend, "triton"), interpreted=partial(mta_why_not, "triton"),
    ),
)  # fmt: skip
