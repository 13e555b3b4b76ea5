"""Convolutions of stored scores and mixed rows, and their gradients, by CUDA's kernels or Triton's: see `stages`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mta_kernels.multi_token_attention import stages
from mta_kernels.multi_token_attention.bands_cuda import BandsGradient, bands
from mta_kernels.multi_token_attention.rows_cuda import rows as cuda_rows
from mta_kernels.multi_token_attention.triton import convolution as triton_convolution
from mta_kernels.multi_token_attention.triton import rows, rows_backward
from mta_kernels.multi_token_attention.triton.chunks import BLOCK, Chunk
from mta_kernels.multi_token_attention.triton.rows_backward import MixingGradients
from mta_kernels.multi_token_attention.triton.taps_gradient import TapsGradient
from mta_kernels.operation import Convolution


def mix_rows(
    scores: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor, chunk: Chunk
) -> None:  # fmt: skip
    """`rows.mix_rows` in place, by CUDA's kernels or Triton's."""
    if _mixes_by_cuda(scores, chunk, backward=False):
        cuda_rows.mix_rows(scores, pre_mix, post_mix, _of_chunk(logsumexp, chunk), **_options(chunk))
    else:
        rows.mix_rows(scores, pre_mix, post_mix, logsumexp, chunk=chunk)


def mix_rows_backward(
    scores: Tensor, grad: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor,
    gradients: MixingGradients, chunk: Chunk, loss_scale: Tensor | None,
) -> None:  # fmt: skip
    """`rows_backward.mix_rows_backward`, by CUDA's kernels or Triton's."""
    if _mixes_by_cuda(scores, chunk, backward=True):
        sums = _of_chunk(logsumexp, chunk)
        given = scores, grad, pre_mix, post_mix, sums
        gradients.add(*cuda_rows.mix_rows_backward(*given, loss_scale=loss_scale, **_options(chunk)))
    else:
        given = scores, grad, pre_mix, post_mix, logsumexp
        rows_backward.mix_rows_backward(*given, gradients, chunk=chunk, loss_scale=loss_scale)


def _mixes_by_cuda(scores: Tensor, chunk: Chunk, *, backward: bool) -> bool:
    """Whether CUDA's kernels run this."""
    gpu, heads = stages.cuda_gpu(scores.device), scores.shape[1]
    return not chunk.convolved and stages.mixes_rows(gpu, scores.dtype, heads, chunk.keys, backward=backward)


def _of_chunk(logsumexp: Tensor, chunk: Chunk) -> Tensor:
    return logsumexp[:, :, chunk.first_row : chunk.first_row + chunk.rows]


def _options(chunk: Chunk) -> dict[str, Any]:
    return {
        "first_position": chunk.first_position, "keys": chunk.keys, "causal": chunk.causal,
        "documents": chunk.documents, "block": BLOCK.value,
    }  # fmt: skip


def convolution_of(
    convolution: Convolution | None, taps: Tensor | None, q: Tensor
) -> Callable[[Tensor, Tensor, Chunk], None] | None:  # fmt: skip
    """`convolve(x, out, chunk)` by `taps [H, cq, ck]`, of scores in q's dtype; None where nothing is convolved."""
    if convolution is None or taps is None:
        return None
    if _by_cuda(q, convolution):
        rounded = taps.to(q.dtype).contiguous()  # once, for all chunks
        return lambda x, out, chunk: bands.convolve(x, out, rounded, convolution, rows_of_chunk(chunk))
    matrices = triton_convolution.bands_of(taps, convolution, q.dtype)
    return lambda x, out, chunk: triton_convolution.convolve(x, out, matrices, chunk)


class ConvolutionGradient:
    """The gradients of a convolution, chunk after chunk of `plan` and of up to `sequences` sequences each."""

    def __init__(
        self, convolution: Convolution, taps: Tensor, q: Tensor, sequences: int, plan: list[Chunk], *, delta: bool
    ) -> None:
        self.cuda = None
        if _by_cuda(q, convolution):
            some, shapes = plan[0], [chunk.shape for chunk in plan]
            self.cuda = BandsGradient(
                taps, convolution, q.dtype, some.causal, some.documents is not None, sequences, shapes, delta=delta
            )
            return
        self.transposed = triton_convolution.bands_of(taps, convolution, q.dtype, transposed=True)
        matrices = triton_convolution.bands_of(taps, convolution, q.dtype)
        self.taps = TapsGradient(convolution, matrices, sequences, q.shape[1])

    def add(
        self, x: Tensor, grad: Tensor, out: Tensor, chunk: Chunk, loss_scale: Tensor | None
    ) -> Tensor | None:  # fmt: skip
        """`out` becomes the gradient of `x`; `grad` is the convolved x's: `[B, H, rows, pitch]` of a chunk.

        Both are times `loss_scale`; the gradient of the taps is not.

        With `delta`, CUDA's kernels also return `sum_j x * out` of each row, `[B, H, rows]`.
        """
        if self.cuda is not None:
            where = rows_of_chunk(chunk, loss_scale)
            return self.cuda.add(x, grad, out, where, above=chunk.above, owned=chunk.owned)
        self.taps.add(x, grad, chunk, loss_scale)
        triton_convolution.convolve(grad, out, self.transposed, chunk)
        return None

    def dtaps(self) -> Tensor:
        """`[H, cq, ck]` float32."""
        return self.taps.dtaps() if self.cuda is None else self.cuda.dtaps()


def _by_cuda(q: Tensor, convolution: Convolution) -> bool:
    return stages.convolves(convolution, stages.cuda_gpu(q.device), q.dtype)


def rows_of_chunk(chunk: Chunk, loss_scale: Tensor | None = None) -> bands.BandRows:
    """The place of a chunk's rows, as CUDA's kernels take it."""
    return bands.BandRows(
        chunk.first_position, chunk.first_row, chunk.query_rows, chunk.key_rows, chunk.causal, chunk.documents,
        loss_scale,
    )  # fmt: skip
