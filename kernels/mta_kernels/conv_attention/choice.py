"""Which backend a call takes: the one that it names, or of those that can run it the fastest.

The fastest is what `mtabench tune` measured on this model of GPU, and where nobody did, the first by `Backend.rank`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mta_kernels.backend_lookup import check_can_run
from mta_kernels.conv_attention import tile_sizes
from mta_kernels.conv_attention.arguments import (
    autocast_dtype,
    cast_unless_float32,
    check_are_tensors,
    check_asked,
    check_weight,
    like_cast,
    wants_gradient,
)
from mta_kernels.conv_attention.backend import Backend, Request
from mta_kernels.conv_attention.backends import KERNELS, named
from mta_kernels.operation import Operation
from mta_kernels.torch_compile import constant_when_compiled, is_static

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


LONGEST = 1 << 40  # counts as the length of a sequence whose length a compiler does not know


@dataclass(frozen=True)
class BackendConfig:
    """A backend as what is tuned: see `tile_sizes.Entry`."""

    backend: str


@dataclass(frozen=True)
class Choice:
    """The backend that a call takes, and why."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def unsupported(
    backend: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    query_taps: int,
    key_taps: int,
    backward: bool = False,
    decode: bool = False,
) -> str | None:
    """Why `backend` cannot run conv attention with these on this machine, or None if it can.

    `device` is a torch device or its type, "cuda" or "cpu"; `backward` is whether gradients are wanted as well. The
    answer is about a whole forward, or with `decode` about a decode step on contiguous caches. Raises ValueError for an
    unknown backend.
    """
    kernels = named(backend)
    if kernels is None:
        return None
    if decode and kernels.decode is None:
        return "it has no decode"
    caches = (torch.empty(1, 1, 1, head_dim, device="meta"),) * 3 if decode else None
    return kernels.why_not(Request(_with_taps(query_taps, key_taps), device, dtype, head_dim, backward, caches))


def _with_taps(query_taps: int, key_taps: int, causal: bool = True) -> Operation:
    """An operation with so many taps: nothing else of it makes a difference to what can run it."""
    return Operation.of((query_taps, key_taps), 1, causal=causal, scale=1.0)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    backend: str = "auto",
    decode: bool = False,
    group: ProcessGroup | None = None,
) -> Choice:
    """Which backend `conv_attention`, or `conv_attention_decode`, takes for these arguments, and why.

    No other argument changes the choice; autocast does, what `mtabench tune` saved, and whether a gradient may be asked
    for. Raises ValueError for an unknown backend, a named one that cannot run them, or shapes and devices that do not
    fit, and TypeError for dtypes that do not, or what is no tensor.
    """
    check_are_tensors(q=q, k=k, v=v, weight=weight)
    weight = cast_unless_float32(weight)
    asked = like_cast(q)
    check_asked(asked, like_cast(k), like_cast(v), decode=decode)
    check_weight(weight, q.shape[1], asked)
    request = Request(
        _with_taps(weight.shape[-2], weight.shape[-1], causal), q.device, autocast_dtype(q), q.shape[-1],
        wants_gradient(q, k, v, weight), (q, k, v) if decode else None, is_shared(group), k.shape[2],
    )  # fmt: skip
    if backend == "auto":
        kernels, reason = _fastest(request)
    else:
        kernels, reason = choose(backend, request), "asked for"
    return Choice("reference" if kernels is None else kernels.name, reason)


def is_shared(group: ProcessGroup | None) -> bool:
    """Whether there are other ranks to work with; raises TypeError for what is no process group."""
    if group is None:
        return False
    from mta_kernels.conv_attention.context_parallel.agreement import check_group

    check_group(group)
    return group.size() > 1


def choose(backend: str, request: Request) -> Backend | None:
    """The kernels that run a request, None for the reference; raises ValueError for a named backend that cannot."""
    if backend == "auto":
        return _fastest(request)[0]
    kernels = named(backend)
    if kernels is None:
        return None
    if request.over_ranks and kernels.tiles is None:
        raise ValueError(
            f"backend {backend!r} does not share a sequence over ranks: its kernels give no part of a softmax; "
            f"use {_instead(kernels, [x for x in KERNELS if x.tiles])}"
        )
    if request.decode is not None and kernels.decode is None:
        able = [x for x in KERNELS if x.decode and (x.tiles or not request.over_ranks)]
        raise ValueError(f"backend {backend!r} has no decode; use {_instead(kernels, able)}")
    check_can_run(kernels, request)
    return kernels


def _instead(refused: Backend, able: list[Backend]) -> str:
    """What to type instead of a backend: those able to run a call, in their order after the refused one, or "auto"."""
    at = KERNELS.index(refused)
    names = [repr(x.name) for x in (*KERNELS[at:], *KERNELS[:at]) if x in able]
    return f"{' or '.join(names)}, or 'auto', which picks {'it' if len(names) == 1 else 'one'}"


def backends_by_rank(request: Request) -> list[Backend]:
    """Those that can run a request; "auto" takes the first where nothing is tuned."""
    return [backend for backend in _ranked(request) if backend.why_not(request) is None]


def _ranked(request: Request) -> list[Backend]:
    """Those that "auto" does not pass over, the first first, whether they can run a request or not."""
    ranked: dict[int, Backend] = {}  # the backends of a request have different ranks
    for backend in KERNELS:
        rank = backend.rank(request)
        if rank is not None:  # no `:=` in a comprehension, which torch.compile does not know
            ranked[rank] = backend
    return [ranked[rank] for rank in sorted(ranked)]


def _fastest(request: Request) -> tuple[Backend | None, str]:
    """The fastest backend that can run a request, or else the reference; and why."""
    able = backends_by_rank(request)
    if not able:
        widest = next(backend for backend in KERNELS if backend in _ranked(request))  # which refuses least
        return None, f"{widest.name} cannot run this: {widest.why_not(request)}"
    taps, head_dim = request.operation.conv.taps, request.head_dim
    if len(able) == 1 or request.decode is not None or request.over_ranks or not is_static(head_dim, *taps):
        return able[0], "the fastest backend for these arguments"
    key_rows = request.key_rows if is_static(request.key_rows) else LONGEST
    shape = request.dtype, head_dim, taps, request.operation.causal, key_rows
    name, reason = _measured(tuple([x.name for x in able]), tuned_as(request.gradients), request.device, *shape)
    return named(name), reason


def tuned_as(gradients: bool) -> str:
    """The name under which the fastest backend is tuned: with gradients, one backend runs both passes."""
    return "training_backend" if gradients else "forward_backend"


@constant_when_compiled
def _measured(names: tuple[str, ...], kernel: str, device: torch.device | str, *shape: Any) -> tuple[str, str]:
    """Of backends the one that `mtabench tune` found to be the fastest, or else the first; and why."""
    gpu = tile_sizes.device_name(torch.device(device))
    config, entry = tile_sizes.look_up(kernel, tile_sizes.Key.of(*shape), [BackendConfig(name) for name in names], gpu)
    if entry is None:
        return config.backend, "the fastest backend for these arguments"
    return config.backend, f"the fastest on {gpu}, as `mtabench tune` measured at {entry.key.seq_len} keys"
