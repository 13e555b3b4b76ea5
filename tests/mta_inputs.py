"""Inputs and error measures of the tests of whole multi-token attention by its Triton stages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from error_bounds import assert_twice_as_near
from kernel_inputs import DEVICE
from torch import Tensor

from mta_kernels import gpu_limits, score_chunks
from mta_kernels.multi_token_attention import stages
from mta_kernels.multi_token_attention.mixers import Mixers, operation_of
from mta_kernels.multi_token_attention.reference import mixed_attention
from mta_kernels.multi_token_attention.triton import convolution, taps_gradient
from mta_kernels.multi_token_attention.triton.backend import TRITON
from mta_kernels.operation import Operation


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
        if self.cu_seqlens is None:
            return None
        position = torch.arange(self.k.shape[2], device=DEVICE)
        document = torch.searchsorted(self.cu_seqlens, position, right=True) - 1
        return torch.stack([self.cu_seqlens[document], self.cu_seqlens[document + 1]]).int()


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of the short sequences of tests; and few programs in the interpreter, each of several rows.

    As many chunks on every GPU: none has more rows for its large memory.
    """
    monkeypatch.setattr(score_chunks, "CHUNK_ROWS", 32)
    monkeypatch.setattr(gpu_limits, "LARGE_MEMORY", math.inf)
    monkeypatch.setattr(gpu_limits, "INTERPRETED_SM_COUNT", 2)
    if DEVICE == "cpu":  # several tiles, too, which tensor cores do not have as small
        for sizes in (convolution.CONVOLUTION, taps_gradient.TAPS_GRADIENT):
            monkeypatch.setitem(sizes, "GROUPS", 2)
            monkeypatch.setitem(sizes, "rows", 20)
            monkeypatch.setitem(sizes, "programs", 3)


def take_cuda(monkeypatch: pytest.MonkeyPatch, *names: str, never: tuple[str, ...] = ()) -> None:
    """The kernels in CUDA C++ that these switches of `stages` name are taken: on a GPU, else in the emulator.

    On a GPU so are the others, but for those that are `never` taken; in the emulator no others.
    """
    for name in [name for name in vars(stages) if name.startswith("CUDA_")]:
        monkeypatch.setattr(stages, name, name in names or (DEVICE == "cuda" and name not in never))
    if DEVICE != "cuda":
        monkeypatch.setattr(stages, "cuda_gpu", gpu_limits.gpu_of)  # the Hopper GPU that is played there


def make(
    heads: int, keys: int, head_dim: int, dtype: torch.dtype, *, batch: int = 1, kv_heads: int | None = None,
    queries: int | None = None, pre_conv: tuple[int, int] | None = None, post_conv: tuple[int, int] | None = None,
    pre_mix: bool = True, post_mix: bool = True, causal: bool = True, pad_key: str = "both",
    scale: float | None = None, documents: list[int] | None = None, magnitude: float = 1.0, seed: int = 0,
) -> Problem:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    def taps(sizes: tuple[int, int] | None) -> Tensor | None:
        return None if sizes is None else (0.3 * normal(heads, *sizes)).to(dtype)

    def mixing(there: bool) -> Tensor | None:
        return (torch.eye(heads, device=DEVICE) + 0.3 * normal(heads, heads)).to(dtype) if there else None

    q, grad_out = (normal(batch, heads, queries or keys, head_dim).to(dtype) for _ in range(2))
    k, v = (normal(batch, kv_heads or heads, keys, head_dim).to(dtype) for _ in range(2))
    mixers = Mixers(taps(pre_conv), mixing(pre_mix), taps(post_conv), mixing(post_mix))
    operation = operation_of(mixers, head_dim, causal=causal, scale=scale, pad_key=pad_key)
    bounds = None if documents is None else torch.tensor(documents, device=DEVICE)
    return Problem(operation, q * magnitude, k, v, mixers, grad_out, bounds)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    return TRITON.forward(*problem[:5], documents=problem.documents)


def gradients(problem: Problem) -> dict[str, Tensor]:
    """By the Triton stages, by name."""
    return {name: x for name, x in both_passes(problem).items() if name != "out"}


def both_passes(problem: Problem) -> dict[str, Tensor]:
    """The output as "out" and the gradients by the Triton stages, by name."""
    out, logsumexp = forward(problem)
    dq, dk, dv, dmixers = TRITON.backward(
        *problem[:5], logsumexp, problem.grad_out, documents=problem.documents
    )  # fmt: skip
    return {
        "out": out,
        "q": dq,
        "k": dk,
        "v": dv,
        **{name: x for name, x in dmixers._asdict().items() if x is not None},
    }


def by_reference(problem: Problem, dtype: torch.dtype, *, backward: bool = False) -> dict[str, Tensor]:
    """The output as "out", and with `backward` the gradients by name, computed in a dtype."""
    leaves = {name: getattr(problem, name) for name in "qkv"}
    leaves |= {name: x for name, x in problem.mixers._asdict().items() if x is not None}
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    mixers = Mixers(**{name: x for name, x in leaves.items() if name not in "qkv"})
    options: dict[str, Any] = {"cu_seqlens": problem.cu_seqlens}
    out = mixed_attention(problem.operation, leaves["q"], leaves["k"], leaves["v"], mixers, **options)
    if not backward:
        return {"out": out.detach()}
    found = torch.autograd.grad(out, list(leaves.values()), problem.grad_out.to(dtype))
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


def assert_twice_eager(got: dict[str, Tensor], problem: Problem, *, backward: bool = False) -> None:
    """Each is as near to float64 as twice eager's own error in its dtype: in all, in each head, at the worst row."""
    exact = by_reference(problem, torch.float64, backward=backward)
    eager = by_reference(problem, problem.q.dtype, backward=backward)
    assert all(x.dtype == problem.q.dtype for x in got.values())
    assert_twice_as_near(got, exact, eager, problem.q.dtype)
