"""What both forwards with a banded convolution do with scores, scales and weights of any size, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from banded_forwards import forward_by
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from kernel_inputs import DEVICE, assert_close, make, relative_error
from torch import Tensor

BF16, FP16 = torch.bfloat16, torch.float16
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


@pytest.mark.parametrize(("head_dim", "times"), [(64, 1e4), (128, 1e8), (64, 1e30)], ids=str)
def test_a_token_of_any_size_changes_no_row_that_does_not_see_it(forward, head_dim: int, times: float) -> None:
    q, k, v, weight = make(1, 2, 1, 200, head_dim, (6, 11), BF16)
    packed = {"cu_seqlens": torch.tensor([0, 20, 130, 160, 200], device=DEVICE)}
    before, before_packed = forward(q, k, v, weight), forward(q, k, v, weight, **packed)
    q[:, :, 131] *= times
    k[:, :, 130] *= times
    assert torch.equal(forward(q, k, v, weight)[:, :, :130], before[:, :, :130])
    got = forward(q, k, v, weight, **packed)
    assert torch.equal(got[:, :, :130], before_packed[:, :, :130])
    assert torch.equal(got[:, :, 160:], before_packed[:, :, 160:])
    if times < 1e30:
        assert_close(got, q, k, v, weight, **packed)


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


@pytest.mark.parametrize("magnitude", [1e-3, 30.0, 3000.0, 1e6], ids=str)
def test_scores_of_any_size(forward, magnitude: float) -> None:
    """Scores go through fp16, which ends at 65504; those of 3000 and 1e6 here are far beyond it."""
    q, k, v, weight = make(1, 2, 1, 100, 64, (6, 11), BF16, magnitude=magnitude)
    k = (k * min(magnitude, 100.0)).to(BF16)
    assert_close(forward(q, k, v, weight), q, k, v, weight)


@pytest.mark.parametrize(
    ("scale", "causal"), [(-0.15, True), (0.0, False), (-0.0, True), (-1e-30, True), (2.0, False), (-1e-45, True)]
)
def test_scales_of_any_sign_and_size(forward, scale: float, causal: bool) -> None:
    q, k, v, weight = make(1, 2, 1, 100, 64, (6, 11), BF16)
    assert_close(forward(q, k, v, weight, scale=scale, causal=causal), q, k, v, weight, scale=scale, causal=causal)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-6, 1e6], ids=str)
def test_weights_of_any_size(forward, factor: float) -> None:
    q, k, v, weight = make(1, 2, 1, 100, 64, (6, 11), BF16)
    weight = weight.float() * factor
    q = (q / max(factor, 1)).to(BF16)
    assert_close(forward(q, k, v, weight), q, k, v, weight)


def test_equal_scores_average_the_values(forward) -> None:
    q, k, v, weight = make(1, 1, 1, 150, 64, (6, 11), FP16)
    mean = v.double().cumsum(2) / torch.arange(1, 151, device=DEVICE)[:, None]
    assert relative_error(forward(torch.zeros_like(q), k, v, weight), mean) < 0.001
