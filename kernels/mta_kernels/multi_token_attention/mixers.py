"""The tensors that mix scores and probabilities, in the one form that every backend takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import check_scale
from mta_kernels.operation import Convolution, HeadMix, Operation, is_causal, key_padding, softmax_scale


class Mixers(NamedTuple):
    """The tensors of an `Operation`, each None where the operation has no such step; H counts the query heads.

    Mixings are dense here: groups of heads are the blocks on the diagonal. Dtypes are q's or float32. The same tuple
    holds the gradients, each in the dtype of its mixer, and the caller's mixers, whose mixings may be `[G, c, c]`.
    """

    pre_conv: Tensor | None = None  # [H, cq, ck], of the scores
    pre_mix: Tensor | None = None  # [H, H], (out, in): l_h = sum_g pre_mix[h, g] c_g
    post_conv: Tensor | None = None  # [H, cq2, ck2], of the probabilities
    post_mix: Tensor | None = None  # [H, H], (in, out): b_h = sum_g a_g post_mix[g, h]


MixerGradients = tuple[Tensor, Tensor, Tensor, Mixers]  # of q, k, v and the mixers


def rows_needed_before(mixers: Mixers) -> int:
    """Queries before a row that its output depends on: both convolutions read earlier rows."""
    return sum(x.shape[1] - 1 for x in (mixers.pre_conv, mixers.post_conv) if x is not None)


def operation_of(given: Mixers, head_dim: int, *, causal: bool, scale: float | None, pad_key: str) -> Operation:
    """The operation of the caller's mixers.

    Raises ValueError for an unknown `pad_key`, TypeError for a scale or `causal` of another kind, and RuntimeError for
    a scale with a tangent.
    """
    check_scale(scale)
    pads = (0 if taps is None else key_padding(taps.shape[2], pad_key) for taps in (given.pre_conv, given.post_conv))
    groups = (1 if mix is None or mix.dim() == 2 else mix.shape[0] for mix in (given.pre_mix, given.post_mix))
    return operation_by_numbers(given, is_causal(causal), softmax_scale(scale, head_dim), *pads, *groups)


def operation_by_numbers(
    mixers: Mixers, causal: bool, scale: float, pre_pad: int, post_pad: int, pre_groups: int = 1, post_groups: int = 1
) -> Operation:
    """The operation of these mixers and numbers: the mixers define the taps, and which steps exist."""

    def convolution(taps: Tensor | None, pad: int) -> Convolution | None:
        return None if taps is None else Convolution(taps.shape[1], taps.shape[2], pad)

    return Operation(
        convolution(mixers.pre_conv, pre_pad), scale, causal,
        None if mixers.pre_mix is None else HeadMix(pre_groups),
        convolution(mixers.post_conv, post_pad),
        None if mixers.post_mix is None else HeadMix(post_groups),
    )  # fmt: skip


def with_dense_mixings(given: Mixers) -> Mixers:
    """The same mixers, the mixings as `[H, H]`; differentiable."""
    pre_mix, post_mix = (None if x is None else dense_mixing(x) for x in (given.pre_mix, given.post_mix))
    return given._replace(pre_mix=pre_mix, post_mix=post_mix)


def dense_mixing(mix: Tensor) -> Tensor:
    """`[H, H]` as it is, and `[G, c, c]` as blocks on the diagonal of `[G * c, G * c]`; differentiable."""
    if mix.dim() == 2:
        return mix
    groups, heads, _ = mix.shape
    if groups == 1:
        return mix.squeeze(0)  # whose gradient is a view
    blocks = torch.diag_embed(mix.permute(1, 2, 0))  # [c, c, G, G]: numbers of other groups are zero
    return blocks.permute(2, 0, 3, 1).reshape(groups * heads, groups * heads)
