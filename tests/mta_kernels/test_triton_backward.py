"""The Triton backward against float64 autograd: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_inputs import (
    DEVICE,
    DTYPES,
    RANGES,
    make,
    make_in_range,
    poison_memory,
    relative_error,
)
from torch import Tensor
from triton.runtime import interpreter

from mta_kernels.conv_attention import conv_attention_reference
from mta_kernels.conv_attention.triton.backward import _part_backward, conv_attention_backward
from mta_kernels.conv_attention.triton.backward_fold import FLOAT32_CHAIN, add_expanded
from mta_kernels.conv_attention.triton.forward import conv_attention_forward
from mta_kernels.operation import Operation


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


def output_gradient(q: Tensor, magnitude: float = 1.0) -> Tensor:
    return (torch.randn(q.shape, generator=torch.Generator().manual_seed(1)) * magnitude).to(DEVICE, q.dtype)


def gradients(
    q, k, v, weight, grad_out, *, causal=True, scale=None, pad_key="both", changed=lambda x: x
) -> tuple[Tensor, ...]:
    """By the two kernels; `changed` makes something else of what the forward hands to the backward."""
    operation = Operation.of(weight.shape[1:], q.shape[3], causal=causal, scale=scale, pad_key=pad_key)
    of_forward = map(changed, conv_attention_forward(operation, q, k, v, weight))
    return conv_attention_backward(operation, q, k, v, weight, *of_forward, grad_out)


def reference_gradients(q, k, v, weight, grad_out, **options) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v, weight)]
    return torch.autograd.grad(conv_attention_reference(*inputs, **options), inputs, grad_out)


def assert_gradients_close(got: tuple[Tensor, ...], *inputs: Tensor, **options) -> None:
    """Each gradient is as near to float64 as twice eager's own error (and a few units of rounding).

    Over few keys the gradients of the scores nearly cancel: there, the products that cancel set the rounding.
    """
    exact = reference_gradients(*(x.double() for x in inputs), **options)
    eager = reference_gradients(*inputs, **options)
    epsilon = torch.finfo(inputs[0].dtype).eps
    for name, a, b, c, x in zip(("q", "k", "v", "weight"), got, exact, eager, inputs[:4], strict=True):
        assert a.shape == x.shape, name
        assert a.dtype == x.dtype, name
        error, eager_error = ((y.double() - b).norm().item() for y in (a, c))
        unit = b.norm().item()
        if inputs[0].shape[2] <= 5:
            unit += (inputs[4].double().norm() * inputs[2].double().norm()).item()
        if name == "weight" and a.dtype == torch.float32:
            # Few numbers, each a sum over all rows of terms that cancel: those set the rounding.
            unit += ((inputs[0] * exact[0]).sum(-1).norm() / x.norm()).item()
        floor = 8 * epsilon * unit if a.dtype == torch.float32 else 4 * epsilon * unit
        assert error <= max(2 * eager_error, floor), (name, error, eager_error, floor)


def check(*inputs: Tensor, **options) -> None:
    grad_out = output_gradient(inputs[0])
    assert_gradients_close(gradients(*inputs, grad_out, **options), *inputs, grad_out, **options)


@pytest.mark.parametrize("taps", [(3, 5), (5, 3)], ids=["keys folded", "queries folded"])
@pytest.mark.parametrize("kind", RANGES)
def test_range_of_fp16(kind: str, taps: tuple[int, int]) -> None:
    """Gradients in float32, since tiny numbers have huge gradients."""
    *inputs, scale = make_in_range(kind, taps)
    operation = Operation.of(taps, 32, scale=scale)
    of_forward, grad = conv_attention_forward(operation, *inputs), output_gradient(inputs[0])
    got = _part_backward(*inputs, *of_forward, grad, operation=operation, spans=None)
    exact = reference_gradients(*(x.double() for x in (*inputs, grad)), scale=scale)
    for name, a, b in zip(("q", "k", "v", "weight"), got, exact, strict=True):
        assert relative_error(a, b) < 4e-3, name


def test_most_taps() -> None:
    check(*make(1, 1, 1, 50, 24, (16, 31)))


@pytest.mark.parametrize("override", ["sm80", ""], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_of_every_gpu(override: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of older GPUs, and the ones without queries kept on the chip, compute the same."""
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", override)
    q, k, v, weight = make(1, 1, 1, 150, 80, (6, 7), dtype)
    check(q, k, v, weight)


def one_by_one(_builder, a, b, total, _precision, _imprecise):
    """A float32 product as a GPU adds it up: a multiply-add after the other."""
    sums = total.data
    for i in range(a.data.shape[-1]):
        terms = a.data[..., i : i + 1].astype(np.float64) * b.data[..., i : i + 1, :]
        sums = (terms + sums).astype(np.float32)
    return interpreter.TensorHandle(sums, total.dtype.scalar)


def test_float32_weight_gradient_has_short_chains(monkeypatch):
    """Rounding errors of a sum grow with the products that are added one by one."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", one_by_one)
    rows, head_dim, taps = 512, 96, 3
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(1, rows, taps * head_dim, generator=generator).to(DEVICE)
    x = torch.randn(1, 1, rows, head_dim, generator=generator).to(DEVICE)
    weight = torch.zeros(1, taps, taps, device=DEVICE)
    out = torch.zeros(1, rows, head_dim, device=DEVICE)
    got = add_expanded(grad, x, weight, out, "test", factor=1.0, above=1)
    padded = torch.nn.functional.pad(x[0, 0].double(), (0, 0, 1, 1))
    exact = torch.stack([
        (grad.view(rows, taps, head_dim).double() * padded[s : s + rows, None]).sum((0, 2)) for s in range(taps)
    ], 1)  # fmt: skip
    error = ((got[0].double() - exact).norm() / exact.norm()).item()
    # A chain of n random terms is off by about u sqrt(n / 6); one of 3072 is off by 8e-7 here.
    assert error <= 1.5 * torch.finfo(torch.float32).eps / 2 * (FLOAT32_CHAIN / 6) ** 0.5
