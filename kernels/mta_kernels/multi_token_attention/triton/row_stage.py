"""Rows that are mixed, normalised and mixed again, by CUDA's kernels or Triton's, as `stages` chooses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mta_kernels.multi_token_attention import stages
from mta_kernels.multi_token_attention.rows_cuda import rows as cuda_rows
from mta_kernels.multi_token_attention.triton import rows, rows_backward
from mta_kernels.multi_token_attention.triton.chunks import BLOCK, Chunk
from mta_kernels.multi_token_attention.triton.rows_backward import MixingGradients


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
    gradients: MixingGradients, chunk: Chunk, loss_scale: Tensor | None,
) -> None:  # fmt: skip
    """`rows_backward.mix_rows_backward`, by whichever kernels."""
    if _by_cuda(scores, chunk, backward=True):
        sums = _of_chunk(logsumexp, chunk)
        given = scores, grad, pre_mix, post_mix, sums
        gradients.add(*cuda_rows.mix_rows_backward(*given, loss_scale=loss_scale, **_options(chunk)))
    else:
        given = scores, grad, pre_mix, post_mix, logsumexp
        rows_backward.mix_rows_backward(*given, gradients, chunk=chunk, loss_scale=loss_scale)


def _by_cuda(scores: Tensor, chunk: Chunk, *, backward: bool) -> bool:
    """Whether CUDA's kernels are to run this."""
    gpu, heads = stages.cuda_gpu(scores.device), scores.shape[1]
    return not chunk.convolved and stages.mixes_rows(gpu, scores.dtype, heads, chunk.keys, backward=backward)


def _of_chunk(logsumexp: Tensor, chunk: Chunk) -> Tensor:
    return logsumexp[:, :, chunk.first_row : chunk.first_row + chunk.rows]


def _options(chunk: Chunk) -> dict[str, Any]:
    return {
        "first_position": chunk.first_position, "keys": chunk.keys, "causal": chunk.causal,
        "documents": chunk.documents, "block": BLOCK.value,
    }  # fmt: skip
