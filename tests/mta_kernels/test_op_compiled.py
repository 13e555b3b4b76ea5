"""The Triton backend compiled and exported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, make
from operator_calls import assert_equal, decode_inputs, gradients, small
from torch import Tensor, nn

pytest.importorskip("triton")

from mta_kernels.backend import Request
from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention,
    conv_attention_decode,
    conv_attention_reference,
    identity_weight,
)
from mta_kernels.conv_attention.backends import CONV_ATTENTION
from mta_kernels.operation import Operation


class Graphs:
    """A compiler that runs the graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]):
        self.graphs.append(graph)
        return graph.forward

    def calls(self, op: torch._ops.OpOverload) -> int:
        return sum(node.target is op for graph in self.graphs for node in graph.graph.nodes)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_as_one_graph(dynamic: bool | None) -> None:
    graphs = Graphs()
    compiled = torch.compile(conv_attention, fullgraph=True, dynamic=dynamic, backend=graphs)
    for seq_len in (20, 25, 31):
        inputs = [x.detach() for x in small(seq_len)]
        assert torch.equal(compiled(*inputs), conv_attention(*inputs))
    assert len(graphs.graphs) == graphs.calls(torch.ops.mta.conv_attention.default) <= 2


def test_what_runs_where_is_no_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def reasons(x: Tensor) -> tuple[Tensor, list[str | None]]:
        request = Request(Operation.of((6, 11), 64), "cuda:7", torch.bfloat16, 64)
        return x + 1, [backend.why_not(request) for backend in CONV_ATTENTION.kernels]

    assert torch.compile(reasons, fullgraph=True, backend="eager")(torch.zeros(1))[1] == reasons(torch.zeros(1))[1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gradients(dynamic: bool) -> None:
    compiled = torch.compile(conv_attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    q, k, v, weight = small()
    assert_equal(gradients(compiled, [q, k, v, weight]), gradients(conv_attention, [q, k, v, weight]))
    packed = {"cu_seqlens": torch.tensor([0, 5, 5, 20], device=DEVICE), "head_chunk": 1}
    assert_equal(
        gradients(compiled, [q, k, v, weight], **packed), gradients(conv_attention, [q, k, v, weight], **packed)
    )

    inputs = [x.detach().requires_grad_() for x in (q[:, :, 12:], q[:, :, 9:12])] + [k, v, weight]

    def chunk_of(function):
        return lambda q, history, *others: function(q, *others, q_history=history)

    assert_equal(gradients(chunk_of(compiled), inputs), gradients(chunk_of(conv_attention), inputs))


def test_numbers_that_change_are_no_graph_break() -> None:
    """From the second call on they are symbols to the compiler."""
    q, k, v, weight = (x.detach() for x in small())

    def call(scale: float, row: int) -> tuple[Tensor, Tensor]:
        rows = conv_attention_reference(q, k, v, weight, rows=(row, row + 2))
        return conv_attention(q, k, v, weight * identity_weight(2, row, row).sum(), scale=scale), rows

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for numbers in ((0.1, 2), (0.2, 3)):
        for got, want in zip(compiled(*numbers), call(*numbers), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.long
def test_compiled_by_inductor() -> None:
    def layer(q, k, v, weight):
        return conv_attention(q * 2, k + 1, v, weight) * 3

    inputs = small()
    compiled = torch.compile(layer, fullgraph=True)
    for a, b in zip(gradients(compiled, inputs), gradients(layer, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_decode(dynamic: bool) -> None:
    inputs, options = decode_inputs()
    compiled = torch.compile(conv_attention_decode, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (17, 4):
        options["lengths"].fill_(length)
        for splits in ("auto", 2):
            got = compiled(*inputs, **options, splits=splits)
            assert torch.equal(got, conv_attention_decode(*inputs, **options, splits=splits))


def test_compiled_decode_takes_scales_of_numpy() -> None:
    """Which a compiler takes for tensors: the operator is told a number."""
    inputs, options = decode_inputs()
    compiled = torch.compile(conv_attention_decode, backend="eager")
    got = compiled(*inputs, **options, scale=np.float32(0.3), backend="triton")
    assert torch.equal(got, conv_attention_decode(*inputs, **options, scale=np.float32(0.3), backend="triton"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_where_triton_cannot_run(dynamic: bool) -> None:
    graphs = Graphs()
    compiled = torch.compile(conv_attention, fullgraph=True, dynamic=dynamic, backend=graphs)
    for inputs in (make(1, 2, 1, 20, 8, (3, 4)), make(1, 2, 1, 20, 16, (3, 4), torch.float64)):
        assert torch.equal(compiled(*inputs), conv_attention(*inputs))
    assert len(graphs.graphs) == 2
    assert graphs.calls(torch.ops.mta.conv_attention.default) == 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = ConvAttention(2, 3, 4, device=DEVICE)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None = None) -> Tensor:
        return self.attention(q, k, v, cu_seqlens=bounds)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("documents", [None, [0, 8, 20]], ids=["whole", "packed"])
def test_exports(strict: bool, documents: list[int] | None) -> None:
    def inputs(seq_len: int, documents: list[int] | None) -> tuple[Tensor, ...]:
        bounds = () if documents is None else (torch.tensor(documents, device=DEVICE),)
        return *(x.detach() for x in small(seq_len)[:3]), *bounds

    layer = Layer()
    shapes = [{2: torch.export.Dim("seq_len", min=2, max=4096)}] * 3 + [{0: torch.export.Dim("bounds", min=2)}]
    example = inputs(20, documents)
    program = torch.export.export(layer, example, dynamic_shapes=tuple(shapes[: len(example)]), strict=strict)
    targets = {node.target for node in program.graph.nodes}
    assert torch.ops.mta.conv_attention.default in targets
    other = inputs(33, None if documents is None else [0, 3, 3, 33])
    assert torch.equal(program.module()(*other), layer(*other))
