"""Calls of conv attention, small enough for Triton's interpreter, for the tests of its operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_inputs import DEVICE, make
from torch import Tensor


def small(seq_len: int = 20, dtype: torch.dtype = torch.float32, **options) -> list[Tensor]:
    return [x.requires_grad_() for x in make(1, 2, 1, seq_len, 16, (3, 4), dtype, **options)]


def decode_inputs(capacity: int = 20) -> tuple[list[Tensor], dict]:
    q, k, v, weight = (x.detach() for x in small(capacity))
    return [q[:, :, :3], k, v, weight], {"lengths": torch.tensor([17], device=DEVICE)}


def gradients(function, inputs: list[Tensor], **options) -> list[Tensor]:
    """The output and the gradients of a sum of its squares."""
    out = function(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


def captured(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of a step, and its results, which each replay makes anew; one step is run before, aside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
