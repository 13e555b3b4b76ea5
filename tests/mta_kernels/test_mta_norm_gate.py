"""The fused normalisation and gate against float64: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

pytest.importorskip("triton")

from kernel_inputs import DEVICE, DTYPES, poison_memory, relative_error, with_gaps

from mta_kernels.multi_token_attention import norm_gate, reference

PARTS = {
    "norm": (True, 0, False),
    "norm and gate": (True, 1, True),
    "norm and gate of dims": (True, 2, True),
    "gate": (False, 1, True),
    "gate without bias": (False, 1, False),
    "gate of dims": (False, 2, True),
    "gate of dims without bias": (True, 2, False),
}
HEAD_DIMS = (1, 2, 17, 80, 96, 128, 256)
NAMES = ("x", "norm_weight", "gate_weight", "gate_bias")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


def make_inputs(parts, shape=(2, 3, 37, 64), dtype=torch.float32, weights=None, magnitude=1.0) -> dict[str, Tensor]:
    """x and the weights that `parts` names, random."""
    norm, gate, bias = parts
    generator, head_dim = torch.Generator().manual_seed(0), shape[3]
    weights = weights or dtype

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(DEVICE)

    outputs = 1 if gate == 1 else head_dim
    inputs = {"x": (magnitude * normal(*shape)).to(dtype)}
    inputs |= {"norm_weight": (1 + 0.3 * normal(head_dim)).to(weights)} if norm else {}
    inputs |= {"gate_weight": (normal(outputs, head_dim) / head_dim**0.5).to(weights)} if gate else {}
    return inputs | ({"gate_bias": normal(outputs).to(weights)} if bias else {})


def run(function, inputs: dict[str, Tensor], grad_out: Tensor, eps=1e-5, factor=0.7) -> dict[str, Tensor]:
    """The value of `function`, and its gradient in every input by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    x, norm_weight, gate_weight, gate_bias = (leaves.get(name) for name in NAMES)
    out = function(x, norm_weight, eps, factor, gate_weight, gate_bias)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad_out)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(inputs: dict[str, Tensor], grad_out: Tensor | None = None, **options) -> dict[str, Tensor]:
    """The operator is as near to float64 as twice eager's own error, value and gradients; returns what it gave."""
    x = inputs["x"]
    if grad_out is None:
        grad_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, x.dtype)
    doubles = {name: tensor.double() for name, tensor in inputs.items()}
    exact = run(reference.norm_and_gate, doubles, grad_out.double(), **options)
    eager = run(reference.norm_and_gate, inputs, grad_out, **options)
    got = run(norm_gate.NORM_GATE, inputs, grad_out, **options)
    rounding = 64 if x.dtype == torch.float32 else 4  # terms of the bias's gradient cancel
    for name, want in exact.items():
        assert got[name].dtype == eager[name].dtype, name
        assert got[name].shape == want.shape, name
        tolerance = max(2 * relative_error(eager[name], want), rounding * torch.finfo(x.dtype).eps)
        assert relative_error(got[name], want) <= tolerance, (name, relative_error(got[name], want), tolerance)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", PARTS)
def test_every_combination_of_parts(parts: str, dtype: torch.dtype) -> None:
    check(make_inputs(PARTS[parts], dtype=dtype))


FLOAT32_BESIDE_FP16 = {"dtype": torch.float16, "weights": torch.float32}


@pytest.mark.parametrize("given", [*({"shape": (1, 2, 19, n)} for n in HEAD_DIMS), FLOAT32_BESIDE_FP16], ids=str)
@pytest.mark.parametrize("gate", [1, 2])
def test_head_dims_and_dtypes_of_weights(given: dict, gate: int) -> None:
    check(make_inputs((True, gate, True), **given))


@pytest.mark.parametrize("gate", [0, 1, 2])
def test_without_an_eps(gate: int) -> None:
    """A block of rows that are not all there."""
    check(make_inputs((True, gate, gate > 0), (1, 2, 19, 16)), eps=0.0)


@pytest.mark.parametrize("gate", [1, 2])
def test_gates_that_are_all_but_open(gate: int) -> None:
    """1 - sigmoid(14) has four bits in float32, eager PyTorch's too; the derivative keeps all of them."""
    inputs = make_inputs((False, gate, True), (1, 2, 19, 16))
    inputs["gate_weight"] *= 0.1
    inputs["gate_bias"] = torch.full_like(inputs["gate_bias"], 14.0)
    grad_out = torch.ones_like(inputs["x"])
    exact = run(reference.norm_and_gate, {name: x.double() for name, x in inputs.items()}, grad_out.double())
    got = run(norm_gate.NORM_GATE, inputs, grad_out)
    for name in ("gate_weight", "gate_bias"):
        assert relative_error(got[name], exact[name]) < 1e-5


@pytest.mark.parametrize("gate", [1, 2])
def test_any_strides(gate: int) -> None:
    """The result has the strides of x, as PyTorch's own functions give."""
    inputs = make_inputs((True, gate, True), (2, 3, 21, 24))
    want = check(inputs)
    apart = {name: with_gaps(x, float("nan")) for name, x in inputs.items()}
    apart["x"] = inputs["x"].transpose(1, 2).contiguous().transpose(1, 2)
    grad_out = torch.randn(2, 3, 21, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for grad in (grad_out, with_gaps(grad_out, float("nan")), grad_out.mT.contiguous().mT):
        got = run(norm_gate.NORM_GATE, apart, grad)
        assert got["out"].stride() == apart["x"].stride()
        for name, wanted in want.items():
            torch.testing.assert_close(got[name], wanted, msg=name)
    got = run(norm_gate.NORM_GATE, apart, grad_out[:1, :1, :1, :1].expand_as(grad_out))
    assert all(x.isfinite().all() for x in got.values())


def test_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program sums over several blocks of rows, in the same order every time."""
    monkeypatch.setattr(norm_gate, "sm_count", lambda device: 1)
    monkeypatch.setattr(norm_gate, "BACKWARD", {**norm_gate.BACKWARD, "tile": 64 * 4})
    inputs = make_inputs((True, 1, True), (2, 3, 29, 64), torch.float16)
    first, second = check(inputs), check(inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_magnitudes() -> None:
    """Rows of zeros, large and tiny numbers, and a large gate."""
    inputs = make_inputs((True, 1, True), (1, 2, 16, 64), torch.float16, magnitude=1000.0)
    check(inputs)
    inputs["x"][:, 0] = 0
    inputs["x"][:, 1] *= 1e-6
    inputs["gate_weight"] *= 100
    got = check(inputs)
    assert (got["out"][:, 0] == 0).all()


def test_eager_on_a_cpu_in_float64_and_where_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs((True, 1, True), dtype=torch.float32)
    arguments = inputs["x"].double().cpu(), None, 1e-5, 0.7, None, None
    assert norm_gate.norm_and_gate(*arguments) is arguments[0]
    monkeypatch.setattr(norm_gate, "NORM_GATE", None)
    x, norm_weight, gate_weight, gate_bias = (inputs[name].double().cpu() for name in NAMES)
    arguments = x, norm_weight, 1e-5, 0.7, gate_weight, gate_bias
    assert torch.equal(norm_gate.norm_and_gate(*arguments), reference.norm_and_gate(*arguments))


def test_operator_is_as_pytorch_asks() -> None:
    for parts in ("norm and gate", "gate of dims"):
        inputs = make_inputs(PARTS[parts], (1, 2, 5, 16))
        x, norm_weight, gate_weight, gate_bias = (inputs.get(name) for name in NAMES)
        leaves = [None if leaf is None else leaf.requires_grad_() for leaf in (norm_weight, gate_weight, gate_bias)]
        arguments = x.requires_grad_(), leaves[0], 1e-5, 0.7, leaves[1], leaves[2]
        torch.library.opcheck(norm_gate.NORM_GATE, arguments)


def test_second_and_forward_mode_derivatives_are_refused() -> None:
    x = make_inputs(PARTS["norm"], (1, 1, 2, 16))["x"].requires_grad_()
    out = norm_gate.NORM_GATE(x, torch.ones(16, device=DEVICE), 1e-5, 1.0, None, None)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()
    x = x.detach()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="norm_and_gate has no forward-mode derivatives"):
        norm_gate.NORM_GATE(forward_ad.make_dual(x, x), torch.ones(16, device=DEVICE), 1e-5, 1.0, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", PARTS)
def test_bfloat16_at_the_models_shapes(parts: str) -> None:
    for head_dim in (64, 96, 128):
        inputs = make_inputs(PARTS[parts], (2, 16, 2048, head_dim), torch.bfloat16, weights=torch.float32)
        first, second = check(inputs), check(inputs)
        assert all(torch.equal(first[name], second[name]) for name in first)
