"""What the kernels hold beyond inputs and results, counted where it is allocated; nothing is launched."""

from __future__ import annotations

import weakref

import pytest
import torch

from mta_kernels.conv_attention.triton import forward, prepare
from mta_kernels.operation import Operation


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch):
    """The most bytes that were alive at once, of what `torch.empty` gave."""
    alive, most = [0], [0]
    empty = torch.empty

    def counted(*args, **kwargs):
        out = empty(*args, **kwargs)
        size = out.untyped_storage().nbytes()
        alive[0] += size
        most[0] = max(most[0], alive[0])

        def gone() -> None:
            alive[0] -= size

        weakref.finalize(out.untyped_storage(), gone)
        return out

    monkeypatch.setattr(torch, "empty", counted)
    for module in (forward, prepare):
        monkeypatch.setattr(module, "launch", lambda *args, **kwargs: None)
    return lambda: most[0]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("head_chunk", "times"), [(0, 8), (4, 2), (1, 0.6)])
def test_scratch_of_the_forward(peak, head_dim: int, head_chunk: int, times: float) -> None:
    """At most 8 times the size of k with all of 16 heads, and 2 times with 4 of them."""
    q, k, v = (torch.zeros(1, 16, 4096, head_dim, dtype=torch.float16) for _ in range(3))
    operation, weight = Operation.of((6, 11), head_dim), torch.zeros(16, 6, 11, dtype=torch.float16)
    out, _ = forward.conv_attention_forward(operation, q, k, v, weight, head_chunk=head_chunk)
    size = k.untyped_storage().nbytes()
    assert 0 < peak() - out.untyped_storage().nbytes() <= times * size
