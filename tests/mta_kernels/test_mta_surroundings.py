"""Multi-token attention on a GPU: compiled, checkpointed, in another thread, behind other work."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from operator_calls import assert_equal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from mta_kernels.multi_token_attention import multi_token_attention

BF16, DEVICE = torch.bfloat16, "cuda"
pytestmark = pytest.mark.gpu
of_layers = pytest.mark.parametrize("layer", ["mix", "full"])


def inputs_of(
    layer: str, tokens: int = 300, *, heads: int = 16, head_dim: int = 64, seed: int = 0
) -> dict[str, Tensor]:
    """Of one of the paper's layers: heads mixed alone, or all parts."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    found = {name: draw(1, heads, tokens, head_dim).to(BF16) for name in "qkv"}
    found |= {name: torch.eye(heads, device=DEVICE) + 0.2 * draw(heads, heads) for name in ("pre_mix", "post_mix")}
    found["post_mix"] = found["post_mix"][None]
    if layer == "full":
        found |= {name: 0.2 * draw(heads, 6, 11) for name in ("pre_conv", "post_conv")}
    return {name: x.requires_grad_() for name, x in found.items()}


def gradients(function: Any, inputs: dict[str, Tensor], **options: Any) -> list[Tensor]:
    out = function(**inputs, **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), list(inputs.values()))]


@of_layers
def test_compiled_whole(layer: str) -> None:
    inputs = inputs_of(layer)
    compiled = torch.compile(lambda **x: multi_token_attention(**x) * 2, fullgraph=True)
    want = gradients(lambda **x: multi_token_attention(**x) * 2, inputs)
    for got, expected in zip(gradients(compiled, inputs), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@of_layers
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(layer: str, use_reentrant: bool) -> None:
    inputs = inputs_of(layer)

    def call(*values: Tensor) -> Tensor:
        return multi_token_attention(**dict(zip(inputs, values, strict=True)), backend="triton")

    out = checkpoint(call, *inputs.values(), use_reentrant=use_reentrant)
    out.float().square().sum().backward()
    got = [out.detach(), *(x.grad for x in inputs.values())]
    assert_equal(got, gradients(multi_token_attention, inputs, backend="triton"))


@of_layers
def test_another_stream_and_thread(layer: str) -> None:
    inputs = inputs_of(layer)
    want = gradients(multi_token_attention, inputs, backend="triton")
    found: list[list[Tensor]] = []

    def call() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            found.append(gradients(multi_token_attention, inputs, backend="triton"))
        stream.synchronize()

    torch.cuda.synchronize()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert_equal(found[0], want)


@of_layers
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_calls_behind_other_work_are_equal(layer: str, head_dim: int) -> None:
    """A copy that overtakes loads changes rows (decision 44)."""
    inputs = {name: x.detach() for name, x in inputs_of(layer, 4096, head_dim=head_dim).items()}
    a = torch.randn(4096, 4096, device=DEVICE, dtype=BF16)
    want = multi_token_attention(**inputs, backend="triton")
    for _ in range(20):
        a.mm(a)
        assert torch.equal(multi_token_attention(**inputs, backend="triton"), want)
