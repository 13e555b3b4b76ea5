"""The staged pipeline of the whole multi-token attention in Triton: chunks of stored scores, all heads together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mta_kernels.operation import Operation
from mtabench.implementations import Closure, Implementation
from mtabench.implementations._calls import mta_by, mta_decode_why_not, mta_why_not, triton_untimed
from mtabench.implementations.triton import STYLE
from mtabench.model import staged
from mtabench.problem.case import Case
from mtabench.problem.operations import make_operation
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape
from mtabench.static.sources import Source, qkv_and_weight

if TYPE_CHECKING:
    from torch import Tensor

    from mta_kernels.multi_token_attention.mixers import Mixers
    from mtabench.problem.inputs import Inputs


def build(case: Case, inputs: Inputs) -> Closure:
    """The public functions by that backend."""
    from mta_kernels.multi_token_attention import multi_token_attention, multi_token_attention_decode

    decode = case.pass_ == "decode"
    return mta_by(multi_token_attention_decode if decode else multi_token_attention, case, inputs, backend="triton")


def interpreted(case: Case) -> str | None:
    """Why the kernels cannot be checked, or None."""
    return mta_decode_why_not(case) if case.pass_ == "decode" else mta_why_not("triton", case)


def why_not(case: Case) -> str | None:
    """Why the kernels cannot be timed, or None."""
    return triton_untimed(case) or interpreted(case)


MOST_TAPS = (8, 17)
INSPECTED_TOKENS = 1024  # a few chunks: the kernels of more are the same


def forward_source(shape: Shape, limits: Limits) -> None:
    """The forward of a layer that mixes heads alone, and of one with all steps."""
    from mta_kernels.multi_token_attention.triton.forward import mixed_attention_forward

    for operation, (q, k, v), mixers in _layers(shape):
        mixed_attention_forward(operation, q, k, v, mixers)


def backward_source(shape: Shape, limits: Limits) -> None:
    """The backward of the same."""
    import torch

    from mta_kernels.multi_token_attention.triton.backward import mixed_attention_backward
    from mtabench.static.absent_gpu import tensor

    for operation, (q, k, v), mixers in _layers(shape):
        logsumexp = tensor(*q.shape[:3], dtype=torch.float32)
        mixed_attention_backward(operation, q, k, v, mixers, logsumexp, q)


def _layers(shape: Shape) -> Iterator[tuple[Operation, tuple[Tensor, Tensor, Tensor], Mixers]]:
    """The operation, the tensors and the mixers of both layers of a model, without memory."""
    from mta_kernels.multi_token_attention.mixers import Mixers
    from mtabench.static.absent_gpu import tensor

    if shape.packed or any(taps > most for taps, most in zip(shape.conv, MOST_TAPS, strict=True)):
        return
    *qkv, taps = qkv_and_weight(replace(shape, seq=min(shape.seq, INSPECTED_TOKENS)))
    mix = tensor(shape.heads, shape.heads, dtype=taps.dtype)
    for conv, mixers in ((None, Mixers(None, mix, None, mix)), (shape.conv, Mixers(taps, mix, taps, mix))):
        operation = make_operation(conv, "heads", conv, heads=shape.heads, head_dim=shape.head_dim, causal=shape.causal)
        yield operation, (qkv[0], qkv[1], qkv[2]), mixers


SOURCES = (
    Source("mta_forward", forward_source, (
        "score_product", "mix_rows", "mix_heads", "convolution", "row_product",
    ), order=70),
    Source("mta_backward", backward_source, (
        "score_product", "mix_rows", "mix_rows_backward", "mix_heads", "convolution", "row_product",
        "transposed_product", "taps_gradient",
    ), order=80),
)  # fmt: skip

ENTRIES = (
    Implementation(
        order=90, name="triton", op="mta", passes=("fwd", "bwd", "decode"), devices=("cuda",), work="staged",
        summary="Triton kernels that keep scores of a chunk of query rows, of all heads, O(N) memory",
        build=build, why_not=why_not, interpreted=interpreted, style=STYLE, compiles=True,
        kernels=lambda case, tiles, sm_count: staged.kernels(case), sources=SOURCES,
    ),
)  # fmt: skip
