"""This project's kernels: Triton's, and those in CUDA C++ for Hopper GPUs and for every NVIDIA GPU from sm_80 on.

`auto` is what a model runs that names no backend: the fastest that can, which differs from call to call and GPU to GPU.
"""

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


def triton_why_not(case: Case) -> str | None:
    """Why the Triton kernels cannot be timed, or None."""
    return triton_untimed(case) or (mta_why_not if case.op == "mta" else backend_why_not)("triton", case)


_triton = partial(
    Implementation, name="triton", passes=("fwd", "bwd", "decode"), devices=("cuda",), why_not=triton_why_not,
    pages=True, style=Style("#D55E00", "#FF8533", "^", "-"), compiles=True, planned=True,
)  # fmt: skip
_auto = partial(
    Implementation, name="auto", passes=("fwd", "bwd", "decode"), devices=("cuda",), by_name=True, compiles=True,
    pages=True, why_not=lambda case: None, summary="the backend that a call takes by itself, as in a model",
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
    Implementation(
        order=40, name="hopper", op="conv-attention", passes=("fwd", "bwd"), devices=("cuda",), work="banded",
        summary="fused CUDA kernels for H100 and H200, the convolution as banded products on the tensor cores",
        note="above head dim 128 with the backward of cuda",
        build=partial(conv_attention_by, "hopper"), why_not=partial(backend_why_not, "hopper"),
        style=Style("#0072B2", "#4FA3FF", "X", "-"), compiles=True,
        planned=True,
    ),
    Implementation(
        order=50, name="cuda", op="conv-attention", passes=("fwd", "bwd", "decode"), devices=("cuda",), work="banded",
        summary="fused CUDA kernels for every NVIDIA GPU from sm_80 on, the convolution as banded products on the "
        "tensor cores; in decode, the keys shared evenly by all programs",
        build=partial(conv_attention_by, "cuda"), why_not=partial(backend_why_not, "cuda"), splits=True,
        pages=True,
        style=Style("#00796B", "#2BC4B0", "p", "-"),
        compiles=True, planned=True,
    ),
    # Of whichever backend: what any of them has to do.
    _auto(order=65, op="conv-attention", work="tiled", build=partial(conv_attention_by, "auto"), planned=True),
    # The one backend of all steps is Triton's.
    _auto(order=95, op="mta", work="staged", build=partial(mta_by_backend, "auto"), planned=True),
)  # fmt: skip
