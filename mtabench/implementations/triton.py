"""The fused Triton kernels in the expanded form."""

from __future__ import annotations

from functools import partial

from mtabench.implementations import Implementation, Style
from mtabench.implementations._calls import backend_why_not, conv_attention_by, triton_untimed
from mtabench.problem.case import Case
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape
from mtabench.static.sources import Source, qkv_and_weight, spans


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


def forward_source(shape: Shape, limits: Limits) -> None:
    """The forward pass."""
    from mta_kernels.conv_attention.triton.forward import conv_attention_forward

    conv_attention_forward(shape.operation, *qkv_and_weight(shape), spans=spans(shape))


def backward_source(shape: Shape, limits: Limits) -> None:
    """The backward pass, which prepares again what the forward had prepared."""
    import torch

    from mta_kernels.conv_attention.triton.backward import conv_attention_backward
    from mtabench.static.absent_gpu import tensor

    q, k, v, weight = qkv_and_weight(shape)
    logsumexp = tensor(*q.shape[:3], dtype=torch.float32)
    conv_attention_backward(shape.operation, q, k, v, weight, q, logsumexp, q, spans=spans(shape))


def decode_source(shape: Shape, limits: Limits) -> None:
    """One decode step, with as many splits as a call takes on its own."""
    import torch

    from mta_kernels.conv_attention.triton.decode import conv_attention_decode
    from mtabench.static.absent_gpu import tensor

    q, k, _, weight = qkv_and_weight(shape)
    table = None
    if shape.page_size:
        pages = -(-shape.seq // shape.page_size)
        k = tensor(pages, shape.kv_heads, shape.page_size, shape.head_dim, dtype=k.dtype)
        table = tensor(1, pages, dtype=torch.int32)
    q, lengths = q[:, :, : shape.conv[0]], tensor(1, dtype=torch.int32)
    conv_attention_decode(shape.operation, q, k, k, weight, lengths=lengths, block_table=table)


SOURCES = (
    Source("forward", forward_source, (
        "near_scores", "band", "prepare", "conv_attention_fwd", "pad_rows",
    ), order=10),
    Source("backward", backward_source, (
        "output_gradient", "probabilities", "value_gradients", "transposed_product", "row_product", "overlap_add",
        "expand_transposed", "weight_gradient", "band_gradients", "band_transposed", "near_transposed",
        "band_weight_gradient",
    ), order=20),
    Source("decode", decode_source, ("conv_attention_decode", "combine_splits"), order=30),
)  # fmt: skip

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
        sources=SOURCES,
        planned=True,
    ),
)  # fmt: skip
