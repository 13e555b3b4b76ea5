"""The one place that chooses whose kernels mix rows: CUDA's where they run, else Triton's.

CUDA's kernels take chunks without a halo, the mixing alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mta_kernels.multi_token_attention.rows_cuda import rows as cuda_rows
from mta_kernels.multi_token_attention.triton import rows, rows_backward
from mta_kernels.multi_token_attention.triton.chunks import BLOCK, Chunk
from mta_kernels.multi_token_attention.triton.rows_backward import MixingGradients

CUDA_ROWS = True  # whether to take CUDA's where they run; measurements turn it off


def mix_rows(
    scores: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor, chunk: Chunk
) -> None:  # fmt: skip
    """`rows.mix_rows` in place, by whichever kernels."""
    if _by_cuda(scores, chunk, backward=False):
        cuda_rows.mix_rows(scores, pre_mix, post_mix, _of_chunk(logsumexp, chunk), **_options(chunk))
    else:
        rows.mix_rows(scores, pre_mix, post_mix, logsumexp, chunk=chunk)


def mix_rows_backward(
    scores: Tensor, grad: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor,
    gradients: MixingGradients, chunk: Chunk,
) -> None:  # fmt: skip
    """`rows_backward.mix_rows_backward`, by whichever kernels."""
    if _by_cuda(scores, chunk, backward=True):
        sums = _of_chunk(logsumexp, chunk)
        gradients.add(*cuda_rows.mix_rows_backward(scores, grad, pre_mix, post_mix, sums, **_options(chunk)))
    else:
        rows_backward.mix_rows_backward(scores, grad, pre_mix, post_mix, logsumexp, gradients, chunk=chunk)


def _by_cuda(scores: Tensor, chunk: Chunk, *, backward: bool) -> bool:
    """Whether CUDA's kernels are to run this."""
    if not CUDA_ROWS or chunk.convolved or not scores.is_cuda:
        return False
    return _cuda_can(scores.device, scores.dtype, scores.shape[1], chunk.keys, backward)


@functools.cache
def _cuda_can(device: torch.device, dtype: torch.dtype, heads: int, keys: int, backward: bool) -> bool:
    """`rows_unsupported`, asked once."""
    return cuda_rows.rows_unsupported(device, dtype, heads, keys, backward=backward) is None


def _of_chunk(logsumexp: Tensor, chunk: Chunk) -> Tensor:
    return logsumexp[:, :, chunk.first_row : chunk.first_row + chunk.rows]


def _options(chunk: Chunk) -> dict[str, Any]:
    return {
        "first_position": chunk.first_position, "keys": chunk.keys, "causal": chunk.causal,
        "documents": chunk.documents, "block": BLOCK.value,
    }  # fmt: skip
