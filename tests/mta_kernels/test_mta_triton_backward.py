"""What numbers of some sizes alone show in the backward by Triton's stages; `tests/conformance` has all else."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from kernel_inputs import DEVICE, poison_memory, relative_error
from torch import Tensor

from mta_kernels import gpu_limits, score_chunks
from mta_kernels.multi_token_attention.documents import document_bounds
from mta_kernels.multi_token_attention.mixers import Mixers, operation_of
from mta_kernels.multi_token_attention.reference import mixed_attention
from mta_kernels.multi_token_attention.triton import convolution, taps_gradient
from mta_kernels.multi_token_attention.triton.backend import TRITON
from mta_kernels.operation import Operation


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of short sequences, and few programs; whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)
    monkeypatch.setattr(score_chunks, "CHUNK_ROWS", 32)
    monkeypatch.setattr(gpu_limits, "LARGE_MEMORY", math.inf)
    monkeypatch.setattr(gpu_limits, "INTERPRETED_SM_COUNT", 2)
    if DEVICE == "cpu":  # several tiles, too, which tensor cores do not have as small
        for sizes in (convolution.CONVOLUTION, taps_gradient.TAPS_GRADIENT):
            for name, number in (("GROUPS", 2), ("rows", 20), ("programs", 3)):
                monkeypatch.setitem(sizes, name, number)


class Problem(NamedTuple):
    operation: Operation
    q: Tensor
    k: Tensor
    v: Tensor
    mixers: Mixers
    grad_out: Tensor
    cu_seqlens: Tensor | None

    @property
    def documents(self) -> Tensor | None:
        return None if self.cu_seqlens is None else document_bounds(self.cu_seqlens, self.k.shape[2])


Taps = tuple[int, int]


def make(
    heads: int, tokens: int, head_dim: int, dtype: torch.dtype, *, pre_conv: Taps | None = None,
    documents: list[int] | None = None,
) -> Problem:  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    def taps(sizes: Taps | None) -> Tensor | None:
        return None if sizes is None else (0.3 * normal(heads, *sizes)).to(dtype)

    def mixing() -> Tensor:
        return (torch.eye(heads, device=DEVICE) + 0.3 * normal(heads, heads)).to(dtype)

    q, grad_out, k, v = (normal(1, heads, tokens, head_dim).to(dtype) for _ in range(4))
    mixers = Mixers(taps(pre_conv), mixing(), None, mixing())
    operation = operation_of(mixers, head_dim, causal=True, scale=None, pad_key="both")
    bounds = None if documents is None else torch.tensor(documents, device=DEVICE)
    return Problem(operation, q, k, v, mixers, grad_out, bounds)


def named(dq: Tensor, dk: Tensor, dv: Tensor, dmixers: Mixers) -> dict[str, Tensor]:
    return {"q": dq, "k": dk, "v": dv} | {name: x for name, x in dmixers._asdict().items() if x is not None}


def gradients(problem: Problem) -> dict[str, Tensor]:
    """By the Triton stages, by name."""
    logsumexp = TRITON.forward(*problem[:5], documents=problem.documents)[1]
    return named(*TRITON.backward(*problem[:5], logsumexp, problem.grad_out, documents=problem.documents))


def by_reference(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """Computed in a dtype."""
    leaves = named(problem.q, problem.k, problem.v, problem.mixers)
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    mixers = Mixers(**{name: x for name, x in leaves.items() if name not in "qkv"})
    q, k, v = (leaves[name] for name in "qkv")
    out = mixed_attention(problem.operation, q, k, v, mixers, cu_seqlens=problem.cu_seqlens)
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), problem.grad_out.to(dtype)), strict=True))


def check(problem: Problem) -> None:
    """Each gradient is as near to float64 as twice eager's own error in its dtype (and units of rounding)."""
    exact, eager = (by_reference(problem, dtype) for dtype in (torch.float64, problem.q.dtype))
    for name, x in gradients(problem).items():
        tolerance = max(2 * relative_error(eager[name], exact[name]), 4 * torch.finfo(problem.q.dtype).eps)
        assert relative_error(x, exact[name]) <= tolerance, name


@pytest.mark.parametrize("magnitude", [1e-6, 300])
def test_small_and_large_gradients_in_float16(magnitude: float) -> None:
    """Scaled by a power of two, none of the sums between is rounded to zero or overflows."""
    problem = make(2, 40, 16, torch.float16)
    check(problem._replace(grad_out=problem.grad_out * magnitude))


def test_small_gradients_beside_large_mixers() -> None:
    """Between the steps, no float16 gradient is rounded to zero that eager keeps."""
    problem = make(3, 40, 16, torch.float16, pre_conv=(3, 4))
    problem.grad_out[:, :, 20:] *= 1e-3
    problem.mixers.pre_conv.mul_(20)
    problem.mixers.post_mix.mul_(4)
    problem.q.mul_(1 / 80)
    exact, eager = (by_reference(problem, dtype)["q"] for dtype in (torch.float64, torch.float16))
    got = gradients(problem)["q"]
    norm = exact[:, :, 25:].norm(dim=-1)
    worst, of_eager = (((x.double() - exact)[:, :, 25:].norm(dim=-1) / norm).amax() for x in (got, eager))
    assert worst <= 2 * of_eager


@pytest.mark.parametrize("rounding", [-(2.0**-22), 2.0**-22])
def test_a_document_of_huge_scores_changes_no_other(rounding: float) -> None:
    """Its logsumexp is rounded by more than an exponential can hold: rows of the document are summed again."""
    problem = make(2, 60, 16, torch.float32, documents=[0, 25, 60])
    before = gradients(problem)
    q, k = problem.q.clone(), problem.k.clone()
    q[:, :, :25] *= 1e8
    k[:, :, :25] *= 1e8
    problem = problem._replace(q=q, k=k)
    logsumexp = TRITON.forward(*problem[:5], documents=problem.documents)[1] * (1 + rounding)
    *after, _ = TRITON.backward(*problem[:5], logsumexp, problem.grad_out, documents=problem.documents)
    for x, y in zip((before[name] for name in "qkv"), after, strict=True):
        assert y.isfinite().all()
        torch.testing.assert_close(x[:, :, 25:], y[:, :, 25:])
    exact = by_reference(problem, torch.float64)
    torch.testing.assert_close(after[2].double(), exact["v"], rtol=1e-3, atol=1e-3)
