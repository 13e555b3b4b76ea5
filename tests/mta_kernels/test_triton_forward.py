"""The Triton forward against float64: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE, DTYPES, RANGES, assert_close, make, make_in_range, poison_memory, relative_error

from mta_kernels import gpu_limits
from mta_kernels.conv_attention import (
    conv_attention,
    conv_attention_reference,
    explain,
)
from mta_kernels.conv_attention.triton import forward


def triton_forward(*inputs, **options):
    return conv_attention(*inputs, **options, backend="triton")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


@pytest.mark.parametrize("override", ["sm80", ""], ids=["pointers", "descriptors"])
def test_tiles_of_every_gpu(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of older GPUs, and the ones without queries kept on the chip, compute the same."""
    seen, launch = set(), forward.launch
    monkeypatch.setattr(forward, "launch", lambda *a, **x: (seen.add(x["HOST_DESCRIPTORS"]), launch(*a, **x)))
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", override)
    for dtype in DTYPES:
        for head_dim, taps in ((64, (6, 11)), (96, (7, 7)), (200, (6, 11))):
            q, k, v, weight = make(1, 2, 2, 150, head_dim, taps, dtype)
            assert_close(triton_forward(q, k, v, weight), q, k, v, weight)
    assert seen == {gpu_limits.compiled_capability(torch.device(DEVICE)) >= (9, 0)}
    assert gpu_limits.compiled_capability(torch.device(DEVICE)) == (8, 0) or not override


@pytest.mark.parametrize("taps", [(3, 5), (5, 3)], ids=["keys folded", "queries folded"])
@pytest.mark.parametrize("kind", RANGES)
def test_range_of_fp16(kind: str, taps: tuple[int, int]) -> None:
    *inputs, scale = make_in_range(kind, taps)
    for causal in (True, False):
        got = triton_forward(*inputs, scale=scale, causal=causal)
        exact = conv_attention_reference(*(x.double() for x in inputs), scale=scale, causal=causal)
        assert relative_error(got, exact) < 2e-3


def test_auto_picks_triton_here() -> None:
    q, k, v, weight = make(1, 1, 1, 8, 16, (2, 2))
    assert explain(q, k, v, weight).backend == "triton"
    assert torch.equal(conv_attention(q, k, v, weight), triton_forward(q, k, v, weight))
