"""The kernel backends of conv attention; of several that can run a call, `mtabench tune` finds the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mta_kernels.backend import FASTEST, Backend, Backends, Request
from mta_kernels.conv_attention import tile_sizes
from mta_kernels.conv_attention.cuda_decode.backend import CUDA
from mta_kernels.conv_attention.hopper.backend import HOPPER
from mta_kernels.conv_attention.triton.backend import TRITON
from mta_kernels.torch_compile import constant_when_compiled, is_static

LONGEST = 1 << 40  # counts as the length of a sequence whose length a compiler does not know


@dataclass(frozen=True)
class BackendConfig:
    """A backend as what is tuned: see `tile_sizes.Entry`."""

    backend: str


def _measured(able: Sequence[Backend], request: Request) -> tuple[Backend, str]:
    """Of backends the one that `mtabench tune` found to be the fastest on this model of GPU, or else the first."""
    taps, head_dim = request.operation.conv.taps, request.head_dim
    if request.decode is not None or not is_static(head_dim, *taps):
        return able[0], FASTEST
    key_rows = request.key_rows if is_static(request.key_rows) else LONGEST
    shape = request.dtype, head_dim, taps, request.operation.causal, key_rows
    place, reason = _look_up(tuple([x.name for x in able]), tuned_as(request.gradients), request.device, *shape)
    return able[place], reason


def tuned_as(gradients: bool) -> str:
    """The name under which the fastest backend is tuned: with gradients, one backend runs both passes."""
    return "training_backend" if gradients else "forward_backend"


@constant_when_compiled
def _look_up(names: tuple[str, ...], kernel: str, device: torch.device | str, *shape: Any) -> tuple[int, str]:
    gpu = tile_sizes.device_name(torch.device(device))
    config, entry = tile_sizes.look_up(kernel, tile_sizes.Key.of(*shape), [BackendConfig(name) for name in names], gpu)
    if entry is None:
        return 0, FASTEST
    reason = f"the fastest on {gpu}, as `mtabench tune` measured at {entry.key.seq_len} keys"
    return names.index(config.backend), reason


CONV_ATTENTION = Backends((TRITON, HOPPER, CUDA), _measured)
BACKENDS = CONV_ATTENTION.names
