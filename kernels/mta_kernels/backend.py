"""What a backend is to all who ask it: one object, which its folder exports.

`api`, `choice` and the operators know no backend by name; `backends` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mta_kernels.operation import Operation
from mta_kernels.torch_compile import statically_true

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # of q, k, v and the weight


class Request(NamedTuple):
    """What a backend is asked to run, as far as it may refuse it."""

    operation: Operation
    device: torch.device | str
    dtype: torch.dtype
    head_dim: int
    gradients: bool = False
    decode: tuple[Tensor, Tensor, Tensor] | None = None  # q_window and the caches of keys and values
    over_ranks: bool = False
    key_rows: int = 0  # N, by which the choice differs where it was tuned

    def has_strided_head_dim(self) -> bool:
        """Whether the numbers of a key, or of a value, of a decode's caches do not lie side by side."""
        return self.decode is not None and caches_unsupported(*self.decode[1:]) is not None


HEAD_DIMS, QUERY_TAPS, KEY_TAPS = range(16, 257), 16, 31  # of the Triton kernels and of the CUDA decode; taps at most


def caches_unsupported(k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why Triton's kernels cannot read caches, in a clause, or None if the numbers of a key lie side by side."""
    if not (statically_true(k_cache.stride(3) != 1) or statically_true(v_cache.stride(3) != 1)):
        return None
    strides = " and ".join(str(tuple(x.stride())) for x in (k_cache, v_cache))
    return f"the caches have strides {strides}, and it needs the numbers of a key side by side (stride 1)"


def size_unsupported(head_dim: int, query_taps: int, key_taps: int) -> str | None:
    """Why a head dim or so many taps are outside these, in a clause, or None."""
    if not HEAD_DIMS.start <= head_dim < HEAD_DIMS.stop:  # not `in`, which torch.compile cannot ask of a symbol
        return f"head_dim {head_dim} is outside {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
    if query_taps > QUERY_TAPS or key_taps > KEY_TAPS:
        return f"{query_taps}x{key_taps} taps are outside 1x1 to {QUERY_TAPS}x{KEY_TAPS} (query taps x key taps)"
    return None


class ForwardReplay(Protocol):
    """The forward for tensors that differ from earlier ones in addresses and values alone."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the logsumexp of its rows."""

    def out_alone(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        """The output."""


@dataclass(frozen=True)
class Backend:
    """Kernels of conv attention; None stands for what a backend does not have.

    - `why_not(request)`: why it cannot run a request on this machine, in a clause, or None if it can.
    - `rank(request)`: its place among those that "auto" tries, the lowest first; None if "auto" passes it over.
    - `forward(operation, q, k, v, weight, head_chunk=, spans=)`: out `[B, Hq, M, D]` in q's dtype and the logsumexp of
      its rows `[B, Hq, M]` float32. The queries are the last M of N positions.
    - `backward(operation, q, k, v, weight, out, logsumexp, grad_out, head_chunk=, spans=)`: the gradients.
    - `decode(operation, q_window, k_cache, v_cache, weight, lengths=, splits=, block_table=)`: the newest row
      `[B, Hq, 1, D]`; `splits` is a number or "auto".
    - `replay(operation, q, k, v, weight)`: the launches for tensors like these, or None.
    - `replay_backward(operation, q, k, v, weight, out, grad_out)`: the same of the backward, a function of q, k, v,
      weight, out, logsumexp and grad_out that gives the gradients, each in the dtype of what it is the gradient of.
    - `tiles(head_chunk)`: what computes a tile of a sequence that ranks share, a `context_parallel.ring.Tiles`.
    """

    name: str
    why_not: Callable[[Request], str | None]
    rank: Callable[[Request], int | None]
    forward: Callable[..., tuple[Tensor, Tensor]] | None = None
    backward: Callable[..., Gradients] | None = None
    decode: Callable[..., Tensor] | None = None
    replay: Callable[..., ForwardReplay | None] | None = None
    replay_backward: Callable[..., Callable[..., Gradients]] | None = None
    tiles: Callable[[int], Any] | None = None
