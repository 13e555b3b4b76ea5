"""What a sequence, a document or a group of heads holds changes no bit of the others, in float16."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE
from mta_inputs import small_chunks
from torch import Tensor

from mta_kernels.multi_token_attention import multi_token_attention

BACKENDS = ("triton", "reference")
FACTORS = 1000.0, 1e-3


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)


def passes(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, **options) -> list[Tensor]:
    """Output and gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = multi_token_attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check(
    backend: str, own: tuple[slice, slice, slice], *, batch: int = 1, heads: int = 3, kv_heads: int = 3,
    tokens: int = 60, groups: tuple[int, int] = (0, 0), **options,
) -> None:  # fmt: skip
    """Those of `own`, sequences, heads and tokens, as they are while everything else is much larger or smaller."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, torch.float16)

    def mixing(groups: int) -> Tensor:
        shape = (groups, heads // groups, heads // groups) if groups else (heads, heads)
        return torch.eye(shape[-1], device=DEVICE, dtype=torch.float16) + 0.3 * normal(*shape)

    q, grad = normal(batch, heads, tokens, 16), normal(batch, heads, tokens, 16)
    k, v = normal(batch, kv_heads, tokens, 16), normal(batch, kv_heads, tokens, 16)
    of_keys = (own[0], slice(*(x and x * kv_heads // heads for x in (own[1].start, own[1].stop))), own[2])
    places = own, of_keys, of_keys, own
    grad[own] *= 1e-2
    options |= {"pre_conv": 0.3 * normal(heads, 3, 5), "post_conv": 0.3 * normal(heads, 2, 3), "backend": backend}
    if groups != (-1, -1):
        options |= {"pre_mix": mixing(groups[0]), "post_mix": mixing(groups[1])}
    before = passes(q, k, v, grad, **options)
    for factor in FACTORS:
        others = []
        for x, place in zip((q, k, v, grad), places, strict=True):
            changed = x * factor
            changed[place] = x[place]
            others.append(changed)
        after = passes(*others, **options)
        for name, x, y, place in zip("oqkv", before, after, (own, *places[:3]), strict=True):
            assert torch.equal(x[place], y[place]), (name, factor, (x[place] - y[place]).abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences(backend: str) -> None:
    places = slice(1, 2), slice(None), slice(None)
    check(backend, places, batch=3, tokens=36, causal=backend == "triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents(backend: str) -> None:
    bounds = torch.tensor([0, 21, 21, 22, 47, 60], device=DEVICE)
    check(backend, (slice(None), slice(None), slice(22, 47)), cu_seqlens=bounds)


@pytest.mark.parametrize(
    ("groups", "kv_heads", "own"),
    [((3, 3), 3, slice(1, 2)), ((6, 3), 6, slice(2, 4)), ((6, 6), 2, slice(3, 6)), ((-1, -1), 3, slice(0, 2))],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_that_do_not_meet(backend: str, groups: tuple[int, int], kv_heads: int, own: slice) -> None:
    """Whose scores become infinite, too."""
    heads = max(3, *groups) if groups[0] > 0 else 6
    places = slice(None), own, slice(None)
    check(backend, places, heads=heads, kv_heads=kv_heads, tokens=20, groups=groups)
