"""The Triton backend as operators: compiled, exported, checkpointed, under autocast, in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE, Stop, make
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from mta_kernels.conv_attention import ConvAttention, conv_attention, conv_attention_decode, explain
from mta_kernels.conv_attention.backend import Request
from mta_kernels.conv_attention.backends import KERNELS
from mta_kernels.operation import Operation

OPTIONS = (True, 0.3, 1, 0, None)  # causal, scale, pad, head_chunk, spans


def small(seq_len: int = 20, dtype: torch.dtype = torch.float32, **options) -> list[Tensor]:
    return [x.requires_grad_() for x in make(1, 2, 1, seq_len, 16, (3, 4), dtype, **options)]


def decode_inputs(capacity: int = 20) -> tuple[list[Tensor], dict]:
    q, k, v, weight = (x.detach() for x in small(capacity))
    return [q[:, :, :3], k, v, weight], {"lengths": torch.tensor([17], device=DEVICE)}


def gradients(function, inputs: list[Tensor], **options) -> list[Tensor]:
    """The output and the gradients of a sum of its squares."""
    out = function(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_operators_are_what_they_say() -> None:
    inputs = small(12)
    torch.library.opcheck(torch.ops.mta.conv_attention.default, (*inputs, *OPTIONS, "triton"))
    tensors = [x.detach() for x in inputs]
    spans = torch.stack([torch.zeros(12), torch.full((12,), 12)]).int().to(DEVICE)
    torch.library.opcheck(torch.ops.mta.conv_attention.default, (*tensors, True, 0.3, 1, 1, spans, "triton"))
    out, logsumexp = torch.ops.mta.conv_attention(*tensors, *OPTIONS, "triton")
    backward = (*tensors, out, logsumexp, torch.randn_like(out), *OPTIONS, "triton")
    torch.library.opcheck(torch.ops.mta.conv_attention_backward.default, backward)
    decode, options = decode_inputs()
    torch.library.opcheck(
        torch.ops.mta.conv_attention_decode.default, (*decode, options["lengths"], None, None, "both", 0, "triton")
    )


def test_gradients_come_once() -> None:
    inputs = small()
    out = conv_attention(*inputs, backend="triton")
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference' has second derivatives"):
        torch.autograd.grad(first[0].sum(), inputs)
    assert conv_attention(*(x.detach() for x in inputs), backend="triton").grad_fn is None
    with torch.no_grad():
        assert conv_attention(*inputs, backend="triton").grad_fn is None


def test_what_is_not_wanted_has_no_gradient() -> None:
    q, k, v, weight = (x.detach() for x in small())
    conv_attention(q, k, v.requires_grad_(), weight, backend="triton").sum().backward()
    assert v.grad is not None
    assert all(x.grad is None for x in (q, k, weight))


@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": torch.tensor([0, 8, 20], device=DEVICE)}], ids=["whole", "packed"]
)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_undefined_gradient_adds_nothing(backend: str, options: dict) -> None:
    inputs = small()
    out = conv_attention(*inputs, backend=backend, **options)
    (Stop.apply(out).sum() + 2 * inputs[0].sum()).backward()
    assert (inputs[0].grad == 2).all()
    assert all(x.grad is None or not x.grad.any() for x in inputs[1:])


def test_gradients_of_an_output_that_is_expanded() -> None:
    inputs = small()
    out = conv_attention(*inputs, backend="triton")
    grad_out = torch.randn(1, 1, 20, 1, device=DEVICE).expand(out.shape)
    got = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    assert_equal(got, torch.autograd.grad(out, inputs, grad_out.contiguous()))


FORWARD_MODE = "through backend 'triton' has no forward-mode derivatives .*; backend='reference' has them"


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": torch.tensor([0, 8, 20], device=DEVICE)}], ids=["whole", "packed"]
)
def test_forward_mode_is_refused(place: int, options: dict) -> None:
    inputs = [x.detach() for x in small()]

    def function(x: Tensor) -> Tensor:
        return conv_attention(*inputs[:place], x, *inputs[place + 1 :], backend="triton", **options)

    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        torch.func.jvp(function, (inputs[place],), (torch.ones_like(inputs[place]),))
    with forward_ad.dual_level():
        for x in (inputs[place], inputs[place].clone().requires_grad_()):
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(RuntimeError, match=FORWARD_MODE):
                function(dual)
            with pytest.raises(RuntimeError, match=FORWARD_MODE), torch.no_grad():
                function(dual)
        function(inputs[place])
    with pytest.raises(RuntimeError, match=FORWARD_MODE):  # forward over reverse
        torch.func.hessian(lambda x: function(x).sum())(inputs[place])


def test_forward_mode_of_history_backward_and_decode_is_refused() -> None:
    q, k, v, weight = inputs = small()
    tangent = torch.ones_like(q)[:, :, :12]

    def chunk(history: Tensor) -> Tensor:
        return conv_attention(q[:, :, 12:], k, v, weight, q_history=history, backend="triton")

    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        torch.func.jvp(chunk, (q[:, :, :12].detach(),), (tangent,))
    out = conv_attention(*inputs, backend="triton")
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="the backward of conv_attention " + FORWARD_MODE):
        torch.autograd.grad(out, inputs, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))
    decode, options = decode_inputs()
    for place, x in enumerate(decode):
        with forward_ad.dual_level():
            duals = [*decode[:place], forward_ad.make_dual(x, torch.ones_like(x)), *decode[place + 1 :]]
            with pytest.raises(RuntimeError, match="conv_attention_decode " + FORWARD_MODE):
                conv_attention_decode(*duals, **options, backend="triton")


@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": torch.tensor([0, 8, 20], device=DEVICE)}], ids=["whole", "packed"]
)
def test_transforms_of_torch_func(options: dict) -> None:
    inputs = tuple(x.detach() for x in small())

    def loss(*inputs: Tensor, backend: str = "triton") -> Tensor:
        return conv_attention(*inputs, backend=backend, **options).square().sum()

    want = gradients(lambda *x: conv_attention(*x, backend="triton", **options), small())[1:]
    assert_equal(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs), want)
    twice = [torch.stack([x, x / 2]) for x in inputs]
    each = [torch.func.grad(loss, argnums=(0, 1, 2, 3))(*x) for x in zip(*twice, strict=True)]
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)))(*twice)
    assert_equal(mapped, [torch.stack(x) for x in zip(*each, strict=True)])
    with pytest.raises(RuntimeError, match="backend='reference' has second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *inputs[1:]).sum())(inputs[0])


def test_decode_within_transforms_of_torch_func() -> None:
    (q_window, *others), options = decode_inputs()
    windows = torch.stack([q_window, q_window / 2])

    def token(q_window: Tensor) -> Tensor:
        return conv_attention_decode(q_window, *others, **options, backend="triton")

    assert torch.equal(torch.func.vmap(token)(windows), torch.stack([token(x) for x in windows]))
    with pytest.raises(RuntimeError, match="not differentiable through backend 'triton'; use backend='reference'"):
        torch.func.grad(lambda q: token(q).sum())(q_window)


def test_decode_says_that_it_has_no_gradient() -> None:
    (q_window, *others), options = decode_inputs()
    want = conv_attention_decode(q_window, *others, **options, backend="triton")
    assert not want.requires_grad
    out = conv_attention_decode(q_window.requires_grad_(), *others, **options, backend="triton")
    assert torch.equal(out, want)
    with pytest.raises(RuntimeError, match="not differentiable through backend 'triton'; use backend='reference'"):
        out.sum().backward()
    with torch.no_grad():
        assert not conv_attention_decode(q_window, *others, **options, backend="triton").requires_grad


def test_raw_operators_refuse_what_the_public_functions_refuse() -> None:
    (q, k, v, weight), options = decode_inputs()
    apart = k.mT.contiguous().mT
    with pytest.raises(ValueError, match=r"backend .triton. cannot run this: the caches have strides .* side by side"):
        torch.ops.mta.conv_attention_decode(q, apart, v, weight, options["lengths"], None, None, "both", 0, "triton")
    for backend, words in (("hopper", "has no decode"), ("reference", "has no decode"), ("tritn", "expected 'auto'")):
        with pytest.raises(ValueError, match=words):
            torch.ops.mta.conv_attention_decode(q, k, v, weight, options["lengths"], None, None, "both", 0, backend)
    with pytest.raises(ValueError, match="backend 'cuda' has no forward"):
        torch.ops.mta.conv_attention(*(x.detach() for x in small()), *OPTIONS, "cuda")


def test_decode_by_the_reference_has_the_gradients_of_the_last_row() -> None:
    inputs = small(17, dtype=torch.float64)
    whole = conv_attention(*inputs, backend="reference")[:, :, -1:]
    want = torch.autograd.grad(whole.square().sum(), inputs)
    q, *others = inputs
    lengths = torch.tensor([17], device=DEVICE)
    token = conv_attention_decode(q[:, :, -3:], *others, lengths=lengths, backend="reference")
    got = torch.autograd.grad(token.square().sum(), inputs)
    assert all(x.any() for x in got)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_shapes_on_the_meta_device(backend: str) -> None:
    q, k, v, weight = (x.to("meta") for x in small())
    out = conv_attention(q[:, :, 8:], k, v, weight, q_history=q[:, :, :8], backend=backend)
    assert out.shape == (1, 2, 12, 16)
    assert out.requires_grad


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
        return x + 1, [backend.why_not(request) for backend in KERNELS]

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

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for documents in ([0, 100, 300], [0, 0, 300], [0, 7, 300]):
        bounds.copy_(torch.tensor(documents))
        with torch.no_grad():
            for x, y in zip(inputs, small(300, torch.bfloat16, seed=documents[1]), strict=True):
                x.copy_(y)
        graph.replay()
        assert_equal(captured, step())
