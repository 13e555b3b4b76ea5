"""What a backend of the whole multi-token attention is to all who ask it: one object, which its folder exports.

`api`, `choice` and the operators know no backend by name; `backends` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.operation import Operation

Gradients = tuple[Tensor, Tensor, Tensor, Mixers]  # of q, k, v and the mixers


class Request(NamedTuple):
    """What a backend is asked to run, as far as it may refuse it.

    Normalisation and gate are no part of it: no backend refuses them.
    """

    operation: Operation
    device: torch.device | str
    dtype: torch.dtype
    head_dim: int
    heads: int  # of the queries
    gradients: bool = False
    dropout: float = 0.0  # the share of mixed probabilities that are dropped
    documents: bool = False  # whether several are packed into a row of tokens
    decode: tuple[Tensor, Tensor, Tensor] | None = None  # q_window and the caches of keys and values


@dataclass(frozen=True)
class MtaBackend:
    """Kernels of the whole multi-token attention.

    - `why_not(request)`: why it cannot run a request on this machine, in a clause, or None if it can.
    - `rank(request)`: its place among those that "auto" tries, the lowest first; None if "auto" passes it over.
    - `forward(operation, q, k, v, mixers, *, documents=None)`: out `[B, Hq, M, D]` in q's dtype, and `[B, Hq, M]`
      float32, the natural logarithm of the sum of the exponentials of each row's visible logits, after the convolution
      of scores and the mixing of their heads. The queries are the last M of N positions. What the convolutions would
      read above the first row of q is zero.
    - `backward(operation, q, k, v, mixers, logsumexp, grad_out, *, documents=None)`: the gradients, each in the dtype
      and shape of what it is the gradient of, those of the mixers as a `Mixers`, None where there is no mixer.
    - `decode(operation, q_window, k_cache, v_cache, mixers, after, lengths, state, block_table, splits)`: the newest
      row `[B, Hq, 1, D]`, with the norm and gate of `after`, the state updated; `splits` is a number or "auto". None
      stands for a backend without it.

    `documents` is None or `[2, N]` int32: for each position the first of its document and one past the last. Row i sees
    key j only if `documents[0, i] <= j < documents[1, i]`, and a convolution sees zeros at rows and keys of other
    documents. To hide such keys from each row is not enough: at the first rows of a document the taps reach rows of the
    one before, at keys that those rows see. Tensors have any strides; the KV heads divide the query heads.
    """

    name: str
    why_not: Callable[[Request], str | None]
    rank: Callable[[Request], int | None]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    decode: Callable[..., Tensor] | None = None
