"""The one place that chooses whose kernels mix heads in a backward with a convolution of probabilities: CUDA's where
they run, else Triton's."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mta_kernels.multi_token_attention.heads_cuda import HeadMixings, heads_unsupported
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton.chunks import Chunk
from mta_kernels.operation import Convolution, Operation

CUDA_HEADS = True  # whether to take CUDA's where they run; measurements turn it off


def mixings_of(
    operation: Operation, mixers: Mixers, q: Tensor, sequences: int, plan: list[Chunk], *, round_logits: bool
) -> HeadMixings | None:
    """CUDA's mixings of chunks of `plan`, of up to `sequences` sequences each; None where Triton's are to be taken.

    These are for both mixings with a convolution in between. They need delta, which CUDA's convolution gives.
    """
    pre_mix, post_mix, taps, conv = mixers.pre_mix, mixers.post_mix, mixers.post_conv, operation.post_conv
    if not CUDA_HEADS or pre_mix is None or post_mix is None or taps is None or conv is None:
        return None
    if unsupported(q.device, q.dtype, q.shape[1], conv) is not None:
        return None
    most = max(chunk.rows for chunk in plan), max(chunk.pitch for chunk in plan)
    return HeadMixings(pre_mix, post_mix, taps, conv, q.dtype, sequences, *most, round_logits=round_logits)


@functools.lru_cache(256)
def unsupported(device: torch.device, dtype: torch.dtype, heads: int, conv: Convolution) -> str | None:
    """`heads_unsupported`, asked once."""
    return heads_unsupported(device, dtype, heads, {"heads": conv})
