"""The interface of a backend, and the backends of an operation by name.

The folder of a backend exports one `Backend`; `conv_attention.backends` and `multi_token_attention.backends` list them.
No caller of these lists knows a backend by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mta_kernels.operation import Operation
from mta_kernels.torch_compile import statically_true

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # of q, k, v and the weight of conv attention


class Request(NamedTuple):
    """What decides whether a backend can run a call. Normalisation and gate do not: every backend runs them."""

    operation: Operation
    device: torch.device | str
    dtype: torch.dtype
    head_dim: int
    gradients: bool = False
    decode: tuple[Tensor, Tensor, Tensor] | None = None  # q_window and the caches of keys and values
    heads: int = 0  # of the queries; multi-token attention alone has limits of them
    dropout: float = 0.0  # the share of mixed probabilities that are dropped
    documents: bool = False  # whether several are packed into a row of tokens

    def has_strided_head_dim(self) -> bool:
        """Whether the stride of the head dim of a decode step's key or value cache is not 1."""
        return self.decode is not None and caches_unsupported(*self.decode[1:]) is not None


HEAD_DIMS, QUERY_TAPS, KEY_TAPS = range(16, 257), 16, 31  # of the Triton kernels and of the CUDA decode; taps at most


def caches_unsupported(k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why Triton's kernels cannot read caches, in a clause, or None if the stride of the head dim is 1."""
    if not (statically_true(k_cache.stride(3) != 1) or statically_true(v_cache.stride(3) != 1)):
        return None
    strides = " and ".join(str(tuple(x.stride())) for x in (k_cache, v_cache))
    return f"the caches have strides {strides}, and it needs the numbers of a key side by side (stride 1)"


def size_unsupported(head_dim: int, query_taps: int, key_taps: int) -> str | None:
    """Why a head dim or a number of taps is outside these limits, in a clause, or None."""
    if not HEAD_DIMS.start <= head_dim < HEAD_DIMS.stop:  # not `in`, which torch.compile cannot evaluate for a symbol
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
    """Kernels of an operation; None stands for what a backend does not have.

    - `why_not(request)`: why it cannot run a request on this machine, in a clause, or None if it can.
    - `rank(request)`: its place in the order in which "auto" tries backends, lowest first; None if "auto" skips it.

    Of conv attention:
    - `forward(operation, q, k, v, weight, head_chunk=, spans=)`: out `[B, Hq, M, D]` in q's dtype and the logsumexp of
      its rows `[B, Hq, M]` float32. The queries are the last M of N positions.
    - `backward(operation, q, k, v, weight, out, logsumexp, grad_out, head_chunk=, spans=)`: the gradients of q, k, v
      and the weight.
    - `decode(operation, q_window, k_cache, v_cache, weight, lengths=, splits=, block_table=)`: the newest row
      `[B, Hq, 1, D]`; `splits` is a number or "auto".
    - `replay(operation, q, k, v, weight)`: the launches for tensors like these, or None.
    - `replay_backward(operation, q, k, v, weight, out, grad_out)`: the same for the backward. It takes q, k, v,
      weight, out, logsumexp and grad_out and returns the gradients, each in the dtype of its tensor.

    Of the whole multi-token attention, whose `mixers` are a `Mixers` with dense mixings:
    - `forward(operation, q, k, v, mixers, *, documents=None)`: out and the logsumexp of each row's visible logits,
      after the convolution of scores and the mixing of their heads. Shapes and dtypes are as above, the logarithm is
      natural. What the convolutions would read above the first row of q is zero.
    - `backward(operation, q, k, v, mixers, logsumexp, grad_out, *, documents=None)`: the gradients, each in the dtype
      and shape of its tensor. The mixers' gradients are a `Mixers`, with None where there is no mixer.
    - `decode(operation, q_window, k_cache, v_cache, mixers, after, lengths, state, block_table, splits)`: the newest
      row, with the norm and gate of `after`, the state updated.

    `documents` is None or `[2, N]` int32: for each position the first of its document and one past the last. Row i sees
    key j only if `documents[0, i] <= j < documents[1, i]`, and a convolution sees zeros at rows and keys of other
    documents. Hiding such keys from each row is not enough: at a document's first rows the taps reach rows of the
    document before, which see these keys. Tensors have any strides; the KV heads divide the query heads.
    """

    name: str
    why_not: Callable[[Request], str | None]
    rank: Callable[[Request], int | None]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Any, ...]]
    decode: Callable[..., Tensor] | None = None
    replay: Callable[..., ForwardReplay | None] | None = None
    replay_backward: Callable[..., Callable[..., tuple[Tensor, ...]]] | None = None


@dataclass(frozen=True)
class Choice:
    """The backend that a call takes, and why."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


class Backends:
    """The kernel backends of an operation. The reference, None here, runs whatever they do not."""

    def __init__(self, kernels: Sequence[Backend]) -> None:
        self.kernels = kernels

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a caller may pass, the reference first."""
        return "reference", *(backend.name for backend in self.kernels)

    def any_of(self) -> str:
        """The names to type, in words."""
        return f"'auto' or one of {', '.join(map(repr, self.names))}"

    def named(self, name: str) -> Backend | None:
        """The backend of a name, None for the reference; raises ValueError for an unknown name."""
        for backend in self.kernels:
            if backend.name == name:
                return backend
        if name == "reference":
            return None
        raise ValueError(f"backend is {name!r}; expected {self.any_of()}")

    def part(self, name: str, part: str) -> Callable[..., Any]:
        """`forward`, `backward` or `decode` of the backend of a name; raises ValueError if it has none."""
        kernels = getattr(self.named(name), part, None)
        if kernels is None:
            raise ValueError(f"backend {name!r} has no {part} for this operator")
        return kernels

    def unsupported(self, name: str, request: Request, *, decode: bool) -> str | None:
        """Why the backend of a name cannot run a request, or None; a `decode` step is one on contiguous caches."""
        kernels = self.named(name)
        if kernels is None:
            return None
        if decode:
            if kernels.decode is None:
                return "it has no decode"
            caches = (torch.empty(1, 1, 1, request.head_dim, device="meta"),) * 3
            request = request._replace(decode=caches)
        return kernels.why_not(request)

    def choose(self, name: str, request: Request) -> tuple[Backend | None, str]:
        """The kernels that run a request, None for the reference, and why; `name` may be "auto".

        Raises ValueError for an unknown name, and for a backend that cannot run it.
        """
        return self.fastest(request) if name == "auto" else (self._checked(name, request), "asked for")

    def _checked(self, name: str, request: Request) -> Backend | None:
        kernels = self.named(name)
        if kernels is None:
            return None
        if request.decode is not None and kernels.decode is None:
            able = [x for x in self.kernels if x.decode]
            raise ValueError(f"backend {name!r} has no decode; use {self._instead(kernels, able)}")
        check_can_run(kernels, request)
        return kernels

    def _instead(self, refused: Backend, able: list[Backend]) -> str:
        """What to type instead of a backend: the backends of `able`, in their order after it, or "auto"."""
        at = self.kernels.index(refused)
        names = [repr(x.name) for x in (*self.kernels[at:], *self.kernels[:at]) if x in able]
        return f"{' or '.join(names)}, or 'auto', which picks {'it' if len(names) == 1 else 'one'}"

    def _ranked(self, request: Request) -> list[Backend]:
        """The backends that "auto" does not skip, in its order, whether they can run a request or not."""
        ranked: dict[int, Backend] = {}  # the backends of a request have different ranks
        for backend in self.kernels:
            rank = backend.rank(request) if request.decode is None or backend.decode is not None else None
            if rank is not None:  # no `:=` in a comprehension, which torch.compile does not support
                ranked[rank] = backend
        return [ranked[rank] for rank in sorted(ranked)]

    def fastest(self, request: Request) -> tuple[Backend | None, str]:
        """The fastest backend that can run a request, or else the reference; and why."""
        ranked = self._ranked(request)
        able = [backend for backend in ranked if backend.why_not(request) is None]
        if not able:
            refused = [x for x in self.kernels if x in ranked]
            if not refused:
                return None, "no kernels compute this yet"
            return None, f"{refused[0].name} cannot run this: {refused[0].why_not(request)}"  # it refuses least
        return able[0], "the fastest backend for these arguments"


def check_can_run(backend: Backend, request: Request) -> None:
    """Raise ValueError, in one sentence, if a backend that a person named cannot run a request."""
    if reason := backend.why_not(request):
        raise ValueError(f"backend {backend.name!r} cannot run this: {reason}; backend='auto' picks one that can")
