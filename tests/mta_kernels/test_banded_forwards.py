"""What both forwards with a banded convolution do with scores, scales and weights of any size, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from banded_forwards import forward_by
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from kernel_inputs import assert_close, make
from torch import Tensor

BF16 = torch.bfloat16
NEWEST = {"cuda": (4, (23, 31, 48, 63, 64, 96, 120)), "hopper": (2, (32, 48, 96, 112, 120))}  # heads, tokens


@pytest.fixture(params=["cuda", "hopper"])
def kernel(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def forward(
    kernel: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Tensor]:  # fmt: skip
    """`conv_attention` by that kernel."""
    return forward_by(kernel, request, monkeypatch)


@pytest.mark.parametrize(
    ("head_dim", "options"), [(64, {"causal": False}), (128, {}), (256, {"pad_key": "left", "scale": -1.0})], ids=str
)
def test_rows_whose_scores_overflow_fp16(forward, head_dim: int, options) -> None:
    """Of some rows and keys, which rows around them see as well; their negative scores, too."""
    q, k, v, weight = make(1, 2, 1, 150, head_dim, (6, 11), BF16)
    q[:, :, [0, 70, 99]] *= 3000
    k[:, :, [3, 64, 120]] *= 30000
    assert_close(forward(q, k, v, weight, **options), q, k, v, weight, **options)


@pytest.mark.parametrize(
    ("taps", "pad_key", "causal"),
    [((7, 1), "both", True), ((2, 2), "left", False), ((1, 9), "right", True), ((1, 17), "both", False)],
    ids=str,
)
def test_a_huge_newest_key_counts_by_its_score(
    kernel, forward, taps: tuple[int, int], pad_key: str, causal: bool
) -> None:
    """Its score, beyond fp16, may be minus infinity in all columns that the row sees; after a tiny scale it counts."""
    heads, tokens = NEWEST[kernel]
    tokens = tokens if causal else tokens[::2]  # of twice the work
    q, k, v, weight = make(1, heads, 1, 121, 64, taps, BF16)
    weight = weight.abs()
    options = {"causal": causal, "pad_key": pad_key, "scale": 1e-7}
    for token in tokens:
        keys = k.clone()
        keys[:, :, token] *= 1e5
        assert_close(forward(q, keys, v, weight, **options), q, keys, v, weight, **options)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-6, 1e6], ids=str)
def test_weights_of_any_size(forward, factor: float) -> None:
    q, k, v, weight = make(1, 2, 1, 100, 64, (6, 11), BF16)
    weight = weight.float() * factor
    q = (q / max(factor, 1)).to(BF16)
    assert_close(forward(q, k, v, weight), q, k, v, weight)
