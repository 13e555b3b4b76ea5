"""The ladder's rungs in Triton."""

from __future__ import annotations

from functools import partial

from mtabench.implementations import Style
from mtabench.implementations._calls import gpu_rung, rung_why_not, triton_untimed
from mtabench.problem.case import Case
from mtabench.problem.rungs import Rung
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape
from mtabench.static.sources import Source, qkv_and_weight


def why_not(case: Case) -> str | None:
    """Why a rung in Triton cannot be timed, or None."""
    return triton_untimed(case) or rung_why_not(case)


def source(shape: Shape, limits: Limits) -> None:
    """The kernels of all three."""
    if not shape.by_name:
        return
    from mta_kernels.attention import triton_descriptor, triton_fmha, triton_pointer
    from mta_kernels.operation import softmax_scale

    q, k, v, _ = qkv_and_weight(shape)
    for rung in (triton_pointer, triton_descriptor, triton_fmha):
        rung.attention(q, k, v, causal=shape.causal, scale=softmax_scale(None, shape.head_dim))


KERNELS = ("attention_pointer", "attention_descriptor", "attention_fmha")

SOURCES = (Source("attention", source, KERNELS, order=70),)
_rung = partial(gpu_rung, why_not=why_not, interpreted=rung_why_not, sources=SOURCES)

ENTRIES = (
    _rung(
        order=160, name="triton-pointer", work="dense",
        summary="plain attention: fused in Triton, pointers and masks over the packed layout",
        style=Style("#7B3FA0", "#C58CF0", "o", (0, (1.2, 1.2)), alone=True),
        flops=1.5e14,  # a guess, as that of triton-descriptor
        stores=Rung(copies="qkv"),  # the packed layout [B, N, heads * head_dim]
    ),
    _rung(
        order=170, name="triton-descriptor", work="dense",
        summary="plain attention: fused in Triton, tensor descriptors, keys stored transposed",
        style=Style("#7B3FA0", "#C58CF0", "s", (0, (4, 1.6)), alone=True), flops=1.5e14,
        stores=Rung(copies="k"),  # transposed
    ),
    _rung(
        order=180, name="triton-fmha", work="tiled",
        summary="plain attention: fused in Triton as it is run: exp2, skipped tiles, grouped heads",
        style=Style("#7B3FA0", "#C58CF0", "^", "-", alone=True),
        stores=Rung(),
    ),
)  # fmt: skip
