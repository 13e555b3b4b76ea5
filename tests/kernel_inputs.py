"""Inputs and error measures shared by the kernel tests."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from mta_kernels.conv_attention import conv_attention, conv_attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bfloat16 matrices wrongly, so bf16 needs a GPU.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on whatever a kernel does not write is NaN, or a large whole number."""
    for of, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(of, name)

        def poisoned(*args, original=original, **kwargs):
            out = original(*args, **kwargs)
            return out.fill_(float("nan") if out.is_floating_point() else 255 if out.dtype == torch.uint8 else 127)

        monkeypatch.setattr(of, name, poisoned)


def with_gaps(x: Tensor, between: float = 1) -> Tensor:
    """The same numbers, with another one between two of them in every dimension."""
    every_other = (slice(None, None, 2),) * x.dim()
    out = torch.full([2 * size for size in x.shape], between, dtype=x.dtype, device=x.device)
    out[every_other] = x
    return out[every_other]


def far_apart(x: Tensor, dims: int, stride: int = 2**30 + 8) -> Tensor:
    """The same numbers on a CPU, at least `stride` of them from one index of the first dimensions to the next.

    The third is beyond 2^31. Memory between them is not there until it is used, which nothing should do.
    """
    strides, beyond = list(x.contiguous().stride()), stride
    for dim in range(dims):
        if x.dim() > dim and x.shape[dim] > 2:  # else there is no third
            strides[dim], beyond = beyond, beyond * x.shape[dim]
    size = (1 + sum((n - 1) * step for n, step in zip(x.shape, strides, strict=True))) * x.element_size()
    reserve_nothing = 0x4000  # MAP_NORESERVE of Linux, which Python has no name for
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve_nothing)
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def make(batch, heads, kv_heads, seq_len, head_dim, taps, dtype=torch.float32, seed=0, magnitude=1.0):
    """Random q, k, v and weight on the test device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    q = (normal(batch, heads, seq_len, head_dim) * magnitude).to(dtype)
    k, v = (normal(batch, kv_heads, seq_len, head_dim).to(dtype) for _ in range(2))
    return q, k, v, (normal(heads, *taps) * 0.3).to(dtype)


RANGES = ("numbers of 60000", "small taps", "large taps")


def with_range(kind: str, folded: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """The same in fp16 with a scale such that scores are common, but `scale * taps * folded` is not within fp16."""
    folded, other, weight = folded.half(), other.half(), weight.float()
    match kind:
        case "numbers of 60000":
            finite = folded.nan_to_num(0.0)  # of a cache
            return folded * (6e4 / finite.abs().max()), other * 3e-6, weight * (2 / weight.abs().max()), 2.0
        case "small taps":
            return folded, other, weight * 1e-6, 1e5
        case "large taps":
            return folded, other, weight * 1e6, 1e-6
    raise ValueError(kind)


def make_in_range(kind: str, taps: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """q, k, v, weight and a scale `with_range` of what Triton folds taps into: keys if query taps are fewer, or q."""
    q, k, v, weight = make(1, 2, 1, 70, 32, taps)
    if taps[0] < taps[1]:
        k, q, weight, scale = with_range(kind, k, q, weight)
    else:
        q, k, weight, scale = with_range(kind, q, k, weight)
    return q, k, v.half(), weight, scale


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item()


def assert_close(got: Tensor, q, k, v, weight, **options) -> None:
    """`got` is as near to float64 as twice eager's own error in the dtype of q (and a few units of rounding)."""
    exact = conv_attention_reference(q.double(), k.double(), v.double(), weight.double(), **options)
    eager = conv_attention_reference(q, k, v, weight, **options)
    assert got.shape == exact.shape
    assert got.dtype == q.dtype
    tolerance = max(2 * relative_error(eager, exact), 4 * torch.finfo(q.dtype).eps)
    assert relative_error(got, exact) <= tolerance, (relative_error(got, exact), tolerance)


def value_and_gradients(function, inputs: dict[str, Tensor], grad_out: Tensor, **options) -> dict[str, Tensor]:
    """`function(**inputs, **options)` as "out", and its gradient in every input by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = function(**leaves, **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad_out)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_as_reference(inputs: dict[str, Tensor], backend: str = "triton", **options) -> None:
    """Output and gradients of a backend are as near to float64 as twice eager's own error (and units of rounding)."""
    q = inputs["q"]
    grad_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, q.dtype)
    doubles = {name: x.double() for name, x in inputs.items()}
    got = value_and_gradients(conv_attention, inputs, grad_out, backend=backend, **options)
    exact = value_and_gradients(conv_attention_reference, doubles, grad_out.double(), **options)
    eager = value_and_gradients(conv_attention_reference, inputs, grad_out, **options)
    for name, want in exact.items():
        assert got[name].dtype == eager[name].dtype, name
        tolerance = max(2 * relative_error(eager[name], want), 16 * torch.finfo(q.dtype).eps)
        assert relative_error(got[name], want) <= tolerance, (name, relative_error(got[name], want), tolerance)


class Stop(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None
