"""Emulators of the GPUs that the kernels need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from emulators import (
    emulated_attention,  # noqa: F401
    emulated_bands,  # noqa: F401
    emulated_cuda,  # noqa: F401
    emulated_decode,  # noqa: F401
    emulated_heads,  # noqa: F401
    emulated_mix,  # noqa: F401
    emulated_mta_decode,  # noqa: F401
    emulated_rows,  # noqa: F401
)
from kernel_inputs import DEVICE
from torch import Tensor

from mta_kernels import gpu_limits
from mta_kernels.conv_attention.banded import backward_plan
from mta_kernels.conv_attention.cuda_sm80 import backward
from mta_kernels.multi_token_attention import api, norm_gate, stages
from mta_kernels.multi_token_attention.bands_cuda import bands
from mta_kernels.multi_token_attention.heads_cuda import heads
from mta_kernels.multi_token_attention.rows_cuda import rows as cuda_rows
from mta_kernels.multi_token_attention.triton import backend, convolution, taps_gradient

EMULATORS = {
    "bands": ("emulated_bands",), "heads": ("emulated_bands", "emulated_heads"), "rows": ("emulated_rows",),
    "rows of sm_80": ("emulated_rows",), "mix": ("emulated_mix",),
}  # fmt: skip


@pytest.fixture
def emulated_hopper_decode(emulated_decode: SimpleNamespace) -> SimpleNamespace:  # noqa: F811
    """As `emulated_decode`, on a Hopper GPU."""
    emulated_decode.hopper = True
    return emulated_decode


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward of `cuda` or `hopper` has chunks of one block of rows, and scratch for few of them."""
    if DEVICE == "cpu":
        monkeypatch.setattr(backward_plan, "MOST_CHUNK_ROWS", 118)
        monkeypatch.setattr(backward_plan, "SPARED_SCRATCH", 0)
        monkeypatch.setattr(backward, "_plan", backward_plan.ChunkPlan.of)


def by_kernels(x: Tensor, norm_weight: Tensor | None, norm_eps: float, factor: float, *gate: Tensor | None) -> Tensor:
    """`norm_and_gate`, which leaves tensors of a CPU to PyTorch."""
    if norm_weight is gate[0] is None:
        return x
    return norm_gate.NORM_GATE(x, norm_weight, norm_eps, factor, *gate)


@pytest.fixture
def cuda_stages(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[tuple[str, ...], str], Any]:
    """Has CUDA's kernels do the named steps of multi-token attention, Triton's all others: in emulators on a CPU."""

    def take(switches: tuple[str, ...], played: str) -> Any:
        for name in [name for name in vars(stages) if name.startswith("CUDA_")]:
            monkeypatch.setattr(stages, name, name.removeprefix("CUDA_") in switches)
        monkeypatch.setattr(stages, "mix_pays", lambda *_: True)
        if DEVICE == "cuda":
            return None
        monkeypatch.setattr(gpu_limits, "INTERPRETED_SM_COUNT", 2)  # programs of several rows
        for sizes, rows in ((convolution.CONVOLUTION, 20), (taps_gradient.TAPS_GRADIENT, 12)):
            for name, number in (("GROUPS", 4), ("rows", rows), ("programs", 3)):  # several tiles of short sequences
                monkeypatch.setitem(sizes, name, number)
        monkeypatch.setattr(bands, "CONVOLVE", bands.BandSizes(20, 3, 1))
        monkeypatch.setattr(bands, "GRADIENTS", bands.BandSizes(20, 2, 1))
        for name, walk in heads.WALKS.items():
            many = name == "heads"  # so that the first and the last of a run see other blocks of keys
            monkeypatch.setitem(heads.WALKS, name, replace(walk, rows=140 if many else 20))
        if played == "rows":
            monkeypatch.setattr(cuda_rows, "CLUSTERS", (2,))  # blocks that share a row
        monkeypatch.setattr(api, "norm_and_gate", by_kernels)
        if played == "mix":  # the whole forward, in bfloat16, which Triton's interpreter lacks
            monkeypatch.setattr(backend, "platform_unsupported", lambda device, dtype: None)
        if switches:
            monkeypatch.setattr(stages, "cuda_gpu", gpu_limits.gpu_of)  # the Hopper GPU that is played there
        found = [request.getfixturevalue(name) for name in EMULATORS.get(played, ())]
        if played == "mix":  # blocks that share the keys of a row
            found[-1].multiprocessors = 16
        if played == "rows of sm_80":  # without a copy engine
            found[-1].capability = (8, 0)
        return found[-1] if found else None

    return take
