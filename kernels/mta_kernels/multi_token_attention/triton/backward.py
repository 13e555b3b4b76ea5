"""The backward: chunks of rows through the forward's stages and through the gradients of these stages.

It recomputes the forward's intermediate results from the rows' logsumexp. A chunk has a halo: the rows above that its
own rows depend on, and the rows below that depend on these. The next chunk computes the rows below again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mta_kernels.allocation import empty, new_empty
from mta_kernels.conv_attention.packing import largest_of_documents
from mta_kernels.conv_attention.triton.launch import call_signature
from mta_kernels.gpu_limits import has_large_memory
from mta_kernels.multi_token_attention import stages
from mta_kernels.multi_token_attention.heads_cuda import HeadMixings, rebuild_probabilities
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton import band_stage
from mta_kernels.multi_token_attention.triton.band_stage import ConvolutionGradient, convolution_of, rows_of_chunk
from mta_kernels.multi_token_attention.triton.chunks import Chunk, chunks
from mta_kernels.multi_token_attention.triton.heads import mix_heads_backward
from mta_kernels.multi_token_attention.triton.products import (
    add_transposed_product,
    row_product,
    rows_of,
    score_product,
)
from mta_kernels.multi_token_attention.triton.rows import mix_rows
from mta_kernels.multi_token_attention.triton.rows_backward import MixingGradients, mix_rows_backward
from mta_kernels.operation import Operation
from mta_kernels.score_chunks import chunk_rows, halo_rows

LARGEST_GRADIENT = 2.0**15  # of scaled float16 gradients, of the output and between all steps


def mixed_attention_backward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, logsumexp: Tensor, grad_out: Tensor, *,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Mixers]:  # fmt: skip
    """Gradients of q, k, v and the mixers, in their dtypes: a `Backend.backward`."""
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    dq, dk, dv = (new_empty(x, x.shape) for x in (q, k, v))
    loss_scale = gradient_scale(grad_out, v, mixers, documents)
    if loss_scale is not None:
        of_rows = loss_scale[:, None, None, None] if documents is None else loss_scale[key_rows - query_rows :, None]
        grad_out = (grad_out * of_rows).to(q.dtype)
    q, k, v, grad_out = (rows_of(x) for x in (q, k, v, grad_out))
    # A tile of rows for dv may include several documents; the others' probabilities are zero, so grad must be finite.
    finite_grad = grad_out if documents is None else rows_of(grad_out.where(grad_out.isfinite(), 0))
    halo = halo_rows(operation)
    large = has_large_memory(q.device)
    sequences, rows = chunk_rows(operation, batch, heads, key_rows, q.element_size(), backward=True, large=large)
    signature = call_signature(q, k, v, grad_out, documents, options=operation)
    plan = chunks(operation, query_rows, key_rows, rows, documents, signature, above=halo, below=halo)
    if len(plan) > 1:
        sums = new_empty(q, 2, sequences, kv_heads, key_rows, head_dim, dtype=torch.float32).unbind()
    else:
        sums = dk, dv  # there is nothing to add up
    steps = Stages(operation, mixers, q, sequences, plan)
    size = max(math.prod(chunk.shape) for chunk in plan) * sequences * heads
    memories = new_empty(q, steps.buffers, size).unbind()
    if operation.post_conv is not None:  # the backward recomputes the logsumexp of coarse rows
        logsumexp = logsumexp.clone(memory_format=torch.contiguous_format)
    for first in range(0, batch, sequences):
        part = slice(first, first + sequences)
        dk_sums, dv_sums = (x[: q[part].shape[0]] for x in sums)
        scale = loss_scale if loss_scale is None or documents is not None else loss_scale[part]
        summed_keys = 0  # of the chunks before
        for chunk in plan:
            buffers = [chunk.buffer(memory, q[part].shape[0], heads) for memory in memories]
            score_product(q[part], k[part], buffers[0], chunk, operation.scale)
            score_product(grad_out[part], v[part], buffers[1], chunk, 1.0)
            last = chunk is plan[-1]
            add_to_dv = functools.partial(
                add_transposed_product, right=finite_grad[part], sums=dv_sums, out=dv[part] if last else dv_sums,
                chunk=chunk, loss_scale=scale, summed_keys=summed_keys,
            )  # fmt: skip
            dscores = steps.run(buffers, logsumexp[part], chunk, scale, add_to_dv)
            row_product(dscores, k[part], dq[part], chunk, operation.scale, scale)
            add_transposed_product(
                dscores, q[part], dk_sums, dk[part] if last else dk_sums, chunk, operation.scale, scale,
                summed_keys=summed_keys,
            )  # fmt: skip
            summed_keys = chunk.keys
    return dq, dk, dv, steps.gradients()


class Stages:
    """The stages between the products: from scores and gradients of mixed probabilities to gradients of scores."""

    def __init__(self, operation: Operation, mixers: Mixers, q: Tensor, sequences: int, plan: list[Chunk]) -> None:
        self.mixers = mixers
        self.mixings = MixingGradients(q, q.shape[1])
        self.rebuild, self.convolve_before = None, None  # at most one of them, if there is a convolution before
        if mixers.pre_conv is not None and stages.recomputes_probabilities(
            operation, stages.cuda_gpu(q.device), q.dtype, q.shape[1]
        ):
            taps = mixers.pre_conv.to(q.dtype).contiguous()  # once, for all chunks
            self.rebuild = functools.partial(rebuild_probabilities, taps=taps, conv=operation.conv)
        else:
            self.convolve_before = convolution_of(operation.pre_conv, mixers.pre_conv, q)
        self.convolve_after = convolution_of(operation.post_conv, mixers.post_conv, q)
        self.before, self.after = (
            None
            if convolution is None or taps is None
            else ConvolutionGradient(convolution, taps, q, sequences, plan, delta=after)
            for convolution, taps, after in (
                (operation.pre_conv, mixers.pre_conv, False), (operation.post_conv, mixers.post_conv, True),
            )
        )  # fmt: skip
        self.heads = None
        if stages.mixes_heads_backward(operation, stages.cuda_gpu(q.device), q.dtype, q.shape[1]):
            self.heads = _mixings(operation, mixers, q, sequences, plan)
        self.buffers = 2 + (self.before is not None) + 2 * (self.after is not None)

    def run(
        self, buffers: list[Tensor], logsumexp: Tensor, chunk: Chunk, loss_scale: Tensor | None,
        use_probabilities: Callable[[Tensor], None],
    ) -> Tensor:  # fmt: skip
        """The gradient of a chunk's scores: one of its `buffers [B, H, rows, pitch]`.

        The first two hold the scores and the gradient of the mixed probabilities, times `loss_scale`; the gradients of
        mixers are summed without it. The mixed probabilities are computed again, and `use_probabilities` receives them
        before they are overwritten.
        """
        pre_mix, post_mix = self.mixers.pre_mix, self.mixers.post_mix
        scores, grad, *others = buffers
        convolved = scores
        if self.before is not None:
            convolved = others.pop()
        if self.convolve_before is not None:
            self.convolve_before(scores, convolved, chunk)
        if self.after is None or self.convolve_after is None:
            given = convolved, grad, pre_mix, post_mix, logsumexp
            band_stage.mix_rows_backward(*given, self.mixings, chunk, loss_scale)
            use_probabilities(convolved)
            free = convolved
        else:
            probabilities, mixed = others
            where, own = rows_of_chunk(chunk, loss_scale), {"above": chunk.above, "owned": chunk.owned}
            # Corrections for rounding, and for the logsumexp of rows of the halo, too.
            corrections = empty(2, *scores.shape[:3], dtype=torch.float32, device=scores.device)
            sums, made = None, (probabilities, logsumexp, where)
            if self.heads is not None and self.rebuild is not None:
                sums = self.rebuild(scores, self.heads.pre, convolved, *made)
            elif self.heads is not None:
                sums = self.heads.probabilities(convolved, *made)
            mix_rows(
                convolved, pre_mix, None, logsumexp, chunk=replace(chunk, above=0), out=probabilities,
                corrections=corrections, sums=sums,
            )  # fmt: skip
            if self.heads is not None:
                self.heads.convolve(probabilities, mixed, grad, where, **own)
            else:
                self.convolve_after(probabilities, mixed, chunk)
                if post_mix is not None:
                    mix_heads_backward(mixed, grad, post_mix, self.mixings, chunk, loss_scale)
            use_probabilities(mixed)
            delta = self.after.add(probabilities, grad, mixed, chunk, loss_scale)
            grad, free = mixed, grad
            if self.heads is not None and delta is not None:
                # Divided by the probabilities' sum, as in mix_rows_backward.
                delta /= corrections[1]
                self.heads.differentiate(convolved, grad, logsumexp, corrections[0], delta, where, **own)
            else:
                mix_rows_backward(
                    convolved, grad, pre_mix, None, logsumexp, self.mixings, chunk=chunk, loss_scale=loss_scale,
                    write=False, delta=delta, corrections=corrections,
                )  # fmt: skip
        if self.before is not None:
            self.before.add(scores, grad, free, chunk, loss_scale)
            grad = free
        return grad

    def gradients(self) -> Mixers:
        """The gradients of the mixers, in their dtypes."""
        mixings = self.heads or self.mixings
        found = Mixers(
            self.before.dtaps() if self.before else None,
            mixings.dpre() if self.mixers.pre_mix is not None else None,
            self.after.dtaps() if self.after else None,
            mixings.dpost() if self.mixers.post_mix is not None else None,
        )

        def like(grad: Tensor | None, mixer: Tensor | None) -> Tensor | None:
            if grad is None or mixer is None:
                return None
            return grad.to(mixer.dtype)

        return Mixers(*(like(grad, mixer) for grad, mixer in zip(found, self.mixers, strict=True)))


def _mixings(operation: Operation, mixers: Mixers, q: Tensor, sequences: int, plan: list[Chunk]) -> HeadMixings:
    """CUDA's mixings of the chunks of `plan`, of up to `sequences` sequences each."""
    pre_mix, post_mix, taps, conv = mixers.pre_mix, mixers.post_mix, mixers.post_conv, operation.post_conv
    if pre_mix is None or post_mix is None or taps is None or conv is None:
        raise ValueError("the kernels in which heads meet need both mixings, and taps after the softmax")
    shapes = [chunk.shape for chunk in plan]
    return HeadMixings(pre_mix, post_mix, taps, conv, q.dtype, sequences, shapes)


def gradient_scale(grad_out: Tensor, v: Tensor, mixers: Mixers, documents: Tensor | None) -> Tensor | None:
    """Powers of two that keep the gradients of scores within float16, float32; None for other dtypes.

    One for each sequence, `[B]`, or with documents the same at all positions of each, `[N]`: other sequences and
    documents have no influence. One for all heads, which the mixings connect. Rows that are not finite are ignored.
    """
    if grad_out.dtype != torch.float16:
        return None

    def lengths(x: Tensor) -> Tensor:
        """The largest norm of any head at each position, `[B, N]`."""
        found = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        return found.where(found.isfinite(), 0.0).amax(1)

    def largest(x: Tensor) -> Tensor:
        return x.amax(1) if documents is None else largest_of_documents(x, documents)[0]

    length, value = largest(lengths(grad_out)), largest(lengths(v))
    # A softmax's gradient is at most twice its probabilities'; `growth` bounds by how much each step enlarges it.
    growth = torch.full_like(length, 2.0)
    for taps in (mixers.pre_conv, mixers.post_conv):
        if taps is not None:
            growth *= taps.float().abs().sum((1, 2)).amax().clamp_min(1.0)
    for mix, dim in ((mixers.pre_mix, -2), (mixers.post_mix, -1)):  # sums over the output heads
        if mix is not None:
            growth *= mix.float().abs().sum(dim).amax().clamp_min(1.0)
    scale = LARGEST_GRADIENT / (length.clamp_min(1e-10) * (value * growth).clamp_min(1.0))
    return torch.exp2(torch.floor(torch.log2(scale)))
