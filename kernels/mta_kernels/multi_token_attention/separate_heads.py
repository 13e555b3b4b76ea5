"""Runs independent groups of heads as separate calls, so that no number of one group can reach another group.

A mixing connects heads, and so does a shared key head. In one call, the product with the dense mixing multiplies
other groups' numbers by zero, which leaves NaN where they are infinite. And float16 has one loss scale for all heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mta_kernels.multi_token_attention.mixers import MixerGradients, Mixers
from mta_kernels.operation import HeadMix, Operation


def heads_that_meet(operation: Operation, heads: int, kv_heads: int) -> int:
    """Query heads in a connected group: a divisor of `heads`, and a multiple of the heads that share a key head."""
    mixings = [mix for mix in (operation.pre_mix, operation.post_mix) if mix is not None]
    return math.lcm(heads // kv_heads, *(heads // mix.groups for mix in mixings))


def one_of(operation: Operation, heads: int, together: int) -> Operation:
    """The operation of `together` of the heads."""

    def part(mix: HeadMix | None) -> HeadMix | None:
        return mix and HeadMix(mix.groups * together // heads)

    return replace(operation, pre_mix=part(operation.pre_mix), post_mix=part(operation.post_mix))


def forward(
    run: Callable[..., tuple[Tensor, Tensor]], operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`run`, a `Backend.forward`, a group of connected heads at a time; all heads in one call without a mixing."""
    heads, kv_heads = q.shape[1], k.shape[1]
    together = heads_that_meet(operation, heads, kv_heads)
    if together == heads or operation.pre_mix is operation.post_mix is None:
        return run(operation, q, k, v, mixers, **options)
    one = one_of(operation, heads, together)
    found = [run(one, *given, **options) for given in _parts(together, q, k, v, mixers)]
    out, logsumexp = (torch.cat(x, dim=1) for x in zip(*found, strict=True))
    return out, logsumexp


def backward(
    run: Callable[..., MixerGradients], operation: Operation, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers,
    logsumexp: Tensor, grad_out: Tensor, **options: Any,
) -> MixerGradients:  # fmt: skip
    """`run`, a `Backend.backward`, a group of connected heads at a time; without a mixing in float16 alone."""
    heads, kv_heads = q.shape[1], k.shape[1]
    together = heads_that_meet(operation, heads, kv_heads)
    unmixed = operation.pre_mix is operation.post_mix is None
    if together == heads or (unmixed and q.dtype != torch.float16):
        return run(operation, q, k, v, mixers, logsumexp, grad_out, **options)
    one = one_of(operation, heads, together)
    rows = zip(logsumexp.split(together, dim=1), grad_out.split(together, dim=1), strict=True)
    parts = zip(_parts(together, q, k, v, mixers), rows, strict=True)
    found = [run(one, *given, *of_rows, **options) for given, of_rows in parts]
    *of_inputs, of_mixers = zip(*found, strict=True)
    dq, dk, dv = (torch.cat(x, dim=1) for x in of_inputs)
    mixers = Mixers(*(
        None if some[0] is None else torch.cat(some) if some[0].dim() == 3 else torch.block_diag(*some)
        for some in zip(*of_mixers, strict=True)
    ))  # fmt: skip
    return dq, dk, dv, mixers


def _parts(
    together: int, q: Tensor, k: Tensor, v: Tensor, mixers: Mixers
) -> list[tuple[Tensor, Tensor, Tensor, Mixers]]:
    """q, k, v and the mixers of `together` query heads each."""
    heads, kv_heads = q.shape[1], k.shape[1]
    found = []
    for first in range(0, heads, together):
        own = slice(first, first + together)
        of_keys = slice(first * kv_heads // heads, (first + together) * kv_heads // heads)
        of_mixers = Mixers(*(None if x is None else x[own] if x.dim() == 3 else x[own, own] for x in mixers))
        found.append((q[:, own], k[:, of_keys], v[:, of_keys], of_mixers))
    return found
