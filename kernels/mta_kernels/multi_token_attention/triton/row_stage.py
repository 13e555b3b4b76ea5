"""The one place that chooses whose kernels mix rows: CUDA's where they run, else Triton's.

CUDA's kernels take chunks without a halo, the mixing alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from mta_kernels.multi_token_attention.triton import rows, rows_backward
from mta_kernels.multi_token_attention.triton.chunks import Chunk
from mta_kernels.multi_token_attention.triton.rows_backward import MixingGradients

CUDA_ROWS = True  # whether to take CUDA's where they run; measurements turn it off


def mix_rows(
    scores: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor, chunk: Chunk
) -> None:  # fmt: skip
    """`rows.mix_rows` in place, by whichever kernels."""
    cuda = _cuda_rows(scores, chunk, backward=False)
    if cuda is None:
        rows.mix_rows(scores, pre_mix, post_mix, logsumexp, chunk=chunk)
    else:
        cuda.mix_rows(scores, pre_mix, post_mix, *_of_chunk(logsumexp, chunk), **_options(chunk))


def mix_rows_backward(
    scores: Tensor, grad: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor,
    gradients: MixingGradients, chunk: Chunk,
) -> None:  # fmt: skip
    """`rows_backward.mix_rows_backward`, by whichever kernels."""
    cuda = _cuda_rows(scores, chunk, backward=True)
    if cuda is None:
        rows_backward.mix_rows_backward(scores, grad, pre_mix, post_mix, logsumexp, gradients, chunk=chunk)
    else:
        found = cuda.mix_rows_backward(
            scores, grad, pre_mix, post_mix, *_of_chunk(logsumexp, chunk), **_options(chunk)
        )  # fmt: skip
        gradients.add(*found)


def _cuda_rows(scores: Tensor, chunk: Chunk, *, backward: bool) -> Any:
    """The module of CUDA's kernels if they can run this, or None."""
    if not CUDA_ROWS or chunk.convolved or not scores.is_cuda:
        return None
    return _cuda_rows_for(scores.device, scores.dtype, scores.shape[1], chunk.keys, backward)


@functools.cache
def _cuda_rows_for(device: torch.device, dtype: torch.dtype, heads: int, keys: int, backward: bool) -> Any:
    name = "mta_kernels.multi_token_attention.rows_cuda"
    if importlib.util.find_spec(name) is None:
        return None
    module = importlib.import_module(f"{name}.rows")
    return None if module.rows_unsupported(device, dtype, heads, keys, backward=backward) else module


def _of_chunk(logsumexp: Tensor, chunk: Chunk) -> list[Tensor]:
    return [logsumexp[:, :, chunk.first_row : chunk.first_row + chunk.rows]]


def _options(chunk: Chunk) -> dict[str, Any]:
    return {
        "first_position": chunk.first_position, "keys": chunk.keys, "causal": chunk.causal,
        "documents": chunk.documents,
    }  # fmt: skip
