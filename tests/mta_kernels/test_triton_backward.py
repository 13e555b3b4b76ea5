"""The Triton backward against float64 autograd: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_inputs import (
    DEVICE,
    DTYPES,
    RANGES,
    assert_as_reference,
    make,
    make_in_range,
    poison_memory,
    relative_error,
    value_and_gradients,
)
from torch import Tensor
from triton.runtime import interpreter

from mta_kernels.conv_attention import conv_attention_reference
from mta_kernels.conv_attention.triton.backward import _gradients
from mta_kernels.conv_attention.triton.backward_fold import FLOAT32_CHAIN, add_expanded
from mta_kernels.conv_attention.triton.forward import conv_attention_forward
from mta_kernels.operation import Operation

NAMES = ("q", "k", "v", "weight")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


def check(*inputs: Tensor) -> None:
    assert_as_reference(dict(zip(NAMES, inputs, strict=True)))


@pytest.mark.parametrize("taps", [(3, 5), (5, 3)], ids=["keys folded", "queries folded"])
@pytest.mark.parametrize("kind", RANGES)
def test_range_of_fp16(kind: str, taps: tuple[int, int]) -> None:
    """Gradients in float32, since tiny numbers have huge gradients."""
    *inputs, scale = make_in_range(kind, taps)
    operation = Operation.of(taps, 32, scale=scale)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, inputs[0].dtype)
    of_forward = conv_attention_forward(operation, *inputs)
    got = _gradients(operation, *inputs, *of_forward, grad, None)
    doubles = {name: x.double() for name, x in zip(NAMES, inputs, strict=True)}
    exact = value_and_gradients(conv_attention_reference, doubles, grad.double(), scale=scale)
    for name, x in zip(NAMES, got, strict=True):
        assert relative_error(x, exact[name]) < 4e-3, name


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
