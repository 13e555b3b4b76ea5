"""The fused Triton kernels in the expanded form."""

from __future__ import annotations

from functools import partial

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import backend_why_not, conv_attention_by, triton_untimed
from mtabench.problem.case import Case


def why_not(case: Case) -> str | None:
    """Why the kernels cannot be timed, or None."""
    return triton_untimed(case) or backend_why_not("triton", case)


STYLE = Style("#D55E00", "#FF8533", "^", "-")

ENTRIES = (
    Implementation(
        order=30, name="triton", op="conv-attention", passes=("fwd", "bwd", "decode"), devices=("cuda",),
        work="expanded",
        summary="fused Triton kernels in the expanded form, O(N) memory",
        note="backward keeps scores of 2048 query rows at a time",
        build=partial(conv_attention_by, "triton"), why_not=why_not, interpreted=partial(backend_why_not, "triton"),
        splits=True, pages=True, ranks_backend="triton",
        style=STYLE, compiles=True,
        planned=True,
    ),
)  # fmt: skip
