"""The CUDA forward, backward and decode, for every NVIDIA GPU from sm_80 on."""

from __future__ import annotations

from functools import partial

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import backend_why_not, conv_attention_by
from mtabench.problem.case import Case


def splits_used(case: Case) -> int:
    """The programs that share the keys of a KV head in this decode step, rounded up."""
    import torch

    from mta_kernels.conv_attention.cuda_decode.decode import choose_splits
    from mtabench.problem.inputs import DTYPES

    if isinstance(case.splits, int):
        return case.splits
    return choose_splits(
        case.batch, case.heads, case.kv_heads, case.capacity, DTYPES[case.dtype], case.head_dim,
        case.conv.taps, torch.device(case.device), page_size=case.page_size,
    )  # fmt: skip


ENTRIES = (
    Implementation(
        order=50, name="cuda", op="conv-attention", passes=("fwd", "bwd", "decode"), devices=("cuda",), work="banded",
        summary="fused CUDA kernels for every NVIDIA GPU from sm_80 on, the convolution as banded products on the "
        "tensor cores; in decode, the keys shared evenly by all programs",
        build=partial(conv_attention_by, "cuda"), why_not=partial(backend_why_not, "cuda"), splits_used=splits_used,
        pages=True,
        style=Style("#00796B", "#2BC4B0", "p", "-"),
        compiles=True, planned=True,
    ),
)  # fmt: skip
