"""The Triton backend under autocast, checkpointed, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE, make
from operator_calls import assert_equal, captured, decode_inputs, gradients, small
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from mta_kernels.conv_attention import conv_attention, conv_attention_decode, explain


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
def test_autocast(weight_dtype: torch.dtype) -> None:
    q, k, v, weight = small()
    weight = weight.detach().to(weight_dtype).requires_grad_()
    half = [x.detach().half().requires_grad_() for x in (q, k, v)]
    want = gradients(conv_attention, [*half, weight], backend="triton")
    with torch.autocast(DEVICE, torch.float16):
        # As a layer has them: some inputs come from a product in float16, others do not. The backward is inside too.
        mixed = [q, k.detach().half().requires_grad_(), v, weight]
        got = gradients(conv_attention, mixed, backend="triton")
        chunk = conv_attention(q[:, :, 9:], k, v, weight, q_history=q[:, :, :9], backend="triton")
    assert got[0].dtype == torch.float16
    for a, b, x in zip(got[1:], want[1:], mixed, strict=True):
        assert a.dtype == x.dtype
        assert torch.equal(a, b.to(x.dtype))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(chunk, got[0][:, :, 9:])


def test_autocast_leaves_float64_alone_and_casts_other_weights() -> None:
    inputs = make(1, 2, 1, 20, 16, (3, 4), torch.float64)
    want = conv_attention(*inputs)
    q, k, v, weight = (x.float() for x in inputs)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(conv_attention(*inputs), want)
        assert conv_attention(q, k, v, weight.half()).dtype == torch.bfloat16
        if DEVICE == "cpu":  # the choice is that of the dtype that is computed in
            assert "bfloat16" in explain(q, k, v, weight).reason


def test_autocast_of_decode() -> None:
    (q_window, k, v, weight), options = decode_inputs()
    want = conv_attention_decode(q_window.half(), k.half(), v.half(), weight, **options, backend="triton")
    with torch.autocast(DEVICE, torch.float16):
        got = conv_attention_decode(q_window, k.half(), v.half(), weight, **options, backend="triton")
    assert torch.equal(got, want)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool) -> None:
    def checkpointed(*inputs: Tensor) -> Tensor:
        return checkpoint(lambda *x: conv_attention(*x, backend="triton"), *inputs, use_reentrant=use_reentrant)

    inputs = small()
    want = gradients(conv_attention, inputs, backend="triton")
    out = checkpointed(*inputs)
    out.square().sum().backward()
    assert_equal([out, *(x.grad for x in inputs)], want)


@pytest.mark.gpu
def test_cuda_graph_of_a_training_step() -> None:
    inputs = small(300, torch.bfloat16)
    bounds = torch.tensor([0, 100, 300], device=DEVICE)

    def step() -> list[Tensor]:
        return gradients(conv_attention, inputs, cu_seqlens=bounds, backend="triton")

    graph, results = captured(step)
    for documents in ([0, 100, 300], [0, 0, 300], [0, 7, 300]):
        bounds.copy_(torch.tensor(documents))
        with torch.no_grad():
            for x, y in zip(inputs, small(300, torch.bfloat16, seed=documents[1]), strict=True):
                x.copy_(y)
        graph.replay()
        assert_equal(results, step())
