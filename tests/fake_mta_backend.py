"""A backend of the whole multi-token attention in PyTorch, for tests without kernels: it keeps their contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mta_kernels.backend import Backend, Request
from mta_kernels.conv_attention.reference import repeat_heads
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.operation import Convolution, Operation


class _Places:
    """What a row does not see: documents are masked, not cut out as in the reference."""

    def __init__(self, operation: Operation, q: Tensor, k: Tensor, documents: Tensor | None) -> None:
        rows, keys = q.shape[2], k.shape[2]
        row, key = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
        first, end = torch.zeros_like(row), torch.full_like(row, keys)
        if documents is not None:
            first, end = documents[:, keys - rows :, None]
        self.rows_of_document = row - first  # above a row
        self.hidden = (key < first) | (key >= end) | (key > row if operation.causal else False)

    def taps(self, convolution: Convolution) -> Iterator[tuple[int, int, Tensor, tuple[Any, ...]]]:
        """Each tap, for which rows it counts, and where what it reads lies in a padded matrix."""
        rows, keys = self.hidden.shape
        for a in range(convolution.query_taps):
            counts = self.rows_of_document >= convolution.query_taps - 1 - a
            for b in range(convolution.key_taps):
                yield a, b, counts, (..., slice(a, a + rows), slice(b, b + keys))

    def convolved(self, x: Tensor, taps: Tensor, convolution: Convolution) -> Tensor:
        padded, out = _padded(x, convolution), torch.zeros_like(x)
        for a, b, counts, at in self.taps(convolution):
            out += taps[:, a, b, None, None].to(x.dtype) * padded[at] * counts
        return out

    def through_convolution(
        self, grad: Tensor, x: Tensor, taps: Tensor, convolution: Convolution
    ) -> tuple[Tensor, Tensor]:
        """The gradients of what was convolved and of the taps."""
        padded, of_taps = _padded(x, convolution), torch.zeros_like(taps)
        of_padded = torch.zeros_like(padded)
        for a, b, counts, at in self.taps(convolution):
            of_taps[:, a, b] = (padded[at] * grad * counts).sum((0, 2, 3))
            of_padded[at] += taps[:, a, b, None, None].to(x.dtype) * grad * counts
        return of_padded[:, :, convolution.query_taps - 1 :, convolution.pad :][..., : x.shape[3]], of_taps


def _padded(x: Tensor, convolution: Convolution) -> Tensor:
    return F.pad(x, (convolution.pad, convolution.key_taps - 1 - convolution.pad, convolution.query_taps - 1, 0))


def _steps(operation: Operation, q: Tensor, k: Tensor, mixers: Mixers, places: _Places) -> tuple[Tensor, ...]:
    """Scores, convolved scores, logits, probabilities, convolved ones and mixed ones."""
    scores = (q @ repeat_heads(k, q.shape[1]).mT * operation.scale).masked_fill(places.hidden, 0)
    convolved = scores
    if mixers.pre_conv is not None and operation.pre_conv is not None:
        convolved = places.convolved(scores, mixers.pre_conv, operation.pre_conv)
    logits = convolved
    if mixers.pre_mix is not None:
        logits = torch.einsum("hg,bgij->bhij", mixers.pre_mix.to(q.dtype), convolved)
    logits = logits.masked_fill(places.hidden, float("-inf"))
    probabilities = logits.softmax(-1)
    spread = probabilities
    if mixers.post_conv is not None and operation.post_conv is not None:
        spread = places.convolved(probabilities, mixers.post_conv, operation.post_conv).masked_fill(places.hidden, 0)
    mixed = spread
    if mixers.post_mix is not None:
        mixed = torch.einsum("bgij,gh->bhij", spread, mixers.post_mix.to(q.dtype))
    return scores, convolved, logits, probabilities, spread, mixed


def forward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, *, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `Backend` says."""
    _, _, logits, _, _, mixed = _steps(operation, q, k, mixers, _Places(operation, q, k, documents))
    return mixed @ repeat_heads(v, q.shape[1]), logits.float().logsumexp(-1)


def backward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers, logsumexp: Tensor, grad_out: Tensor, *,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Mixers]:  # fmt: skip
    """By formulas, as kernels: autograd is off where an operator runs."""
    places = _Places(operation, q, k, documents)
    scores, convolved, logits, _, spread, mixed = _steps(operation, q, k, mixers, places)
    probabilities = torch.exp(logits - logsumexp[..., None].to(q.dtype))
    keys, values = (repeat_heads(x, q.shape[1]) for x in (k, v))
    of_pre_conv = of_pre_mix = of_post_conv = of_post_mix = None

    grad = (grad_out @ values.mT).masked_fill(places.hidden, 0)
    if mixers.post_mix is not None:
        of_post_mix = torch.einsum("bgij,bhij->gh", spread, grad).to(mixers.post_mix.dtype)
        grad = torch.einsum("gh,bhij->bgij", mixers.post_mix.to(q.dtype), grad)
    if mixers.post_conv is not None and operation.post_conv is not None:
        grad, of_post_conv = places.through_convolution(grad, probabilities, mixers.post_conv, operation.post_conv)
    grad = probabilities * (grad - (probabilities * grad).sum(-1, keepdim=True))
    if mixers.pre_mix is not None:
        of_pre_mix = torch.einsum("bhij,bgij->hg", grad, convolved).to(mixers.pre_mix.dtype)
        grad = torch.einsum("hg,bhij->bgij", mixers.pre_mix.to(q.dtype), grad)
    if mixers.pre_conv is not None and operation.pre_conv is not None:
        grad, of_pre_conv = places.through_convolution(grad, scores, mixers.pre_conv, operation.pre_conv)
    grad = grad.masked_fill(places.hidden, 0) * operation.scale
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (grad.mT @ q, mixed.mT @ grad_out))
    return grad @ keys, dk, dv, Mixers(of_pre_conv, of_pre_mix, of_post_conv, of_post_mix)


def why_not(request: Request) -> str | None:
    return "the fake has no dropout" if request.dropout else None


FAKE = Backend("fake", why_not, lambda request: 0, forward, backward)
