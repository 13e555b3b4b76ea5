"""The fused Triton kernels in the expanded form."""

from __future__ import annotations

from functools import partial

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import backend_why_not, conv_attention_by, triton_untimed
from mtabench.problem.case import Case


def why_not(case: Case) -> str | None:
    """Why the kernels cannot be timed, or None."""
    return triton_untimed(case) or backend_why_not("triton", case)


def splits_used(case: Case) -> int:
    """The programs that share the keys of a KV head in this decode step."""
    import torch

    from mta_kernels.conv_attention.triton.decode import auto_tiles
    from mta_kernels.conv_attention.triton.decode_plan import bulk_pays
    from mta_kernels.gpu_limits import compiled_capability
    from mtabench.problem.inputs import DTYPES

    if isinstance(case.splits, int):
        return case.splits
    dtype, device, group = DTYPES[case.dtype], torch.device(case.device), case.heads // case.kv_heads
    taps = case.conv.taps
    bulk = not case.page_size and bulk_pays(case.head_dim, group, dtype.itemsize, compiled_capability(device))
    return auto_tiles(dtype, case.head_dim, taps, case.capacity, group, case.batch * case.kv_heads, device, bulk)[0]


STYLE = Style("#D55E00", "#FF8533", "^", "-")

ENTRIES = (
    Implementation(
        order=30, name="triton", op="conv-attention", passes=("fwd", "bwd", "decode"), devices=("cuda",),
        work="expanded",
        summary="fused Triton kernels in the expanded form, O(N) memory",
        note="backward keeps scores of 2048 query rows at a time",
        build=partial(conv_attention_by, "triton"), why_not=why_not, interpreted=partial(backend_why_not, "triton"),
        splits_used=splits_used, pages=True, ranks_backend="triton",
        style=STYLE, compiles=True,
        planned=True,
    ),
)  # fmt: skip
