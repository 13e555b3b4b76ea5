"""The Triton backward against float64 autograd: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checked_addresses import check_addresses
from kernel_inputs import (
    DEVICE,
    DTYPES,
    RANGES,
    far_apart,
    make,
    make_in_range,
    poison_memory,
    relative_error,
)
from torch import Tensor
from triton.runtime import interpreter

from mta_kernels.conv_attention import conv_attention_reference
from mta_kernels.conv_attention.triton import backward
from mta_kernels.conv_attention.triton.backward import conv_attention_backward
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
    """Gradients in float32, since those of tiny numbers are huge."""
    *inputs, scale = make_in_range(kind, taps)
    operation = Operation.of(taps, 32, scale=scale)
    of_forward, grad = conv_attention_forward(operation, *inputs), output_gradient(inputs[0])
    got = conv_attention_backward(operation, *inputs, *of_forward, grad, gradient_dtype=torch.float32)
    exact = reference_gradients(*(x.double() for x in (*inputs, grad)), scale=scale)
    for name, a, b in zip(("q", "k", "v", "weight"), got, exact, strict=True):
        assert relative_error(a, b) < 4e-3, name


@pytest.mark.parametrize("taps", [(6, 11), (11, 3)], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("causal", [True, False])
def test_several_chunks_of_rows(taps: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlaps cross from one chunk to the next; the last chunk is shorter."""
    q, k, v, weight = make(1, 1, 1, 260, 24, taps)
    monkeypatch.setattr(backward, "CHUNK_ROWS", 128)
    check(q, k, v, weight, causal=causal)


def test_most_taps() -> None:
    check(*make(1, 1, 1, 50, 24, (16, 31)))


@pytest.mark.parametrize("override", ["sm80", ""], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_of_every_gpu(override: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of older GPUs, and the ones without queries kept on the chip, compute the same."""
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", override)
    q, k, v, weight = make(1, 1, 1, 150, 80, (6, 7), dtype)
    check(q, k, v, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [1e-6, 1e4])
def test_gradients_of_any_magnitude(dtype: torch.dtype, magnitude: float) -> None:
    """Scaling the gradient of the output scales all gradients, also where float16 would flush or overflow."""
    q, k, v, weight = make(1, 1, 1, 65, 32, (3, 4), dtype)
    grad_out = output_gradient(q)
    got = gradients(q, k, v, weight, (grad_out.float() * magnitude).to(dtype))
    scaled = (grad_out.float() * magnitude).to(dtype)
    exact = reference_gradients(*(x.double() for x in (q, k, v, weight, scaled)))
    for a, b in zip(got, exact, strict=True):
        largest = torch.finfo(dtype).max
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        b = b.clamp(-largest, largest)
        a = a.double().clamp(-largest, largest)
        assert (a - b).norm() <= 4 * torch.finfo(dtype).eps * b.norm() + tiny * b.numel() ** 0.5


@pytest.mark.skipif(DEVICE == "cuda", reason="takes memory that only a CPU need not have")
@pytest.mark.parametrize(
    ("name", "dim"),
    [(name, dim) for name in ("q", "k", "v", "weight", "grad_out") for dim in range(name == "weight", 4)],
)
def test_numbers_beyond_2_to_the_31(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets do not fit 32 bits, though every stride does."""
    check_addresses(monkeypatch)
    batch, heads = 3 if dim == 0 else 1, 3 if dim == 1 else 1
    inputs = dict(zip(("q", "k", "v", "weight"), make(batch, heads, heads, 3, 16, (3, 3), torch.float16), strict=True))
    inputs["grad_out"] = output_gradient(inputs["q"])
    want = gradients(**inputs)
    inputs[name] = far_apart(inputs[name], dim - 1 if name == "weight" else dim)  # weight [heads, taps, taps]
    for a, b in zip(gradients(**inputs), want, strict=True):
        assert torch.equal(a, b)


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
