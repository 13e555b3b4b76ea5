"""Packed documents through Triton, values and gradients against float64; and the rows between them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_inputs import DEVICE, assert_as_reference, make, poison_memory, with_gaps

from mta_kernels.conv_attention.packing import collect_rows, spread_layout, spread_rows
from mta_kernels.conv_attention.triton import backward, backward_products, backward_scores

# Empty ones at both ends and in between, of one and two tokens, shorter than the convolution, longer than a tile.
DOCUMENTS = [0, 0, 1, 3, 3, 8, 8, 78, 83, 83]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


def bounds_of(documents: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(documents, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("taps", [(4, 2), (2, 4)], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("documents", [[0, 128], [0, 50, 125]], ids=str)
def test_documents_that_end_with_a_block(
    documents: list[int], taps: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows are a gap, and a block of their own: whole blocks of rows see no key beside them."""
    for module in (backward_scores, backward_products):
        monkeypatch.setattr(module, "ALIGNED", 64)
    monkeypatch.setattr(backward, "CHUNK_ROWS", 64)
    inputs = dict(zip(("q", "k", "v", "weight"), make(1, 1, 1, documents[-1], 16, taps), strict=True))
    assert_as_reference(inputs, cu_seqlens=bounds_of(documents), causal=causal)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gap", [0, 1, 10])
def test_layout(gap: int, dtype: torch.dtype) -> None:
    tokens, documents = DOCUMENTS[-1], len(DOCUMENTS) - 1
    layout = spread_layout(bounds_of(DOCUMENTS, dtype), tokens, gap)
    x = torch.randn(1, 2, tokens, 3, device=DEVICE)
    spread = spread_rows(x, layout)
    assert spread.shape == (1, 2, tokens + documents * gap, 3)
    assert layout.spans.dtype == torch.int32
    assert torch.equal(collect_rows(spread, layout), x)
    first, end = layout.spans.tolist()
    for number, (start, stop) in enumerate(pairwise(DOCUMENTS)):
        at = start + number * gap
        rows = slice(at, at + stop - start + gap)
        assert torch.equal(spread[:, :, at : at + stop - start], x[:, :, start:stop])
        assert (spread[:, :, at + stop - start : rows.stop] == 0).all()
        assert set(first[rows]) <= {at}
        assert set(end[rows]) <= {at + max(stop - start, 1)}  # a row of an empty one sees a key as well
    assert first == sorted(first)
    assert end == sorted(end)


@pytest.mark.filterwarnings("error")  # PyTorch's, once, of bounds that are not contiguous
def test_layout_by_bounds_of_any_strides() -> None:
    bounds = bounds_of(DOCUMENTS)
    for got, want in zip(spread_layout(with_gaps(bounds), 83, 3), spread_layout(bounds, 83, 3), strict=True):
        assert torch.equal(got, want)


def test_gradients_of_moving_rows_are_exact() -> None:
    layout = spread_layout(bounds_of([0, 2, 2, 5]), 5, 3)
    x = torch.randn(1, 1, 5, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    y = torch.randn(1, 1, 14, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: spread_rows(x, layout), [x])
    assert torch.autograd.gradcheck(lambda y: collect_rows(y, layout), [y])
    assert torch.autograd.gradgradcheck(lambda x: spread_rows(x * x, layout), [x])
