"""Both operations as operators of PyTorch: gradients in every way to ask for them, compilers, transforms, autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, Stop, make
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from mta_kernels import gpu_limits
from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention,
    conv_attention_decode,
    conv_attention_reference,
    explain,
    identity_weight,
)
from mta_kernels.multi_token_attention import MultiTokenAttention, multi_token_attention
from mta_kernels.multi_token_attention import explain as explain_mta

NAMES = ("q", "k", "v", "weight")
MIXERS = ("pre_mix", "post_mix")


class Operation(NamedTuple):
    """`function(*tensors, **options)`, and random tensors for it, of so many tokens."""

    function: Callable[..., Tensor]
    tensors: Callable[..., list[Tensor]]
    operator: Any


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Triton's interpreter, which takes time for each."""
    monkeypatch.setattr(gpu_limits, "INTERPRETED_SM_COUNT", 2)


def of_conv(tokens: int = 20, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.requires_grad_() for x in make(1, 2, 1, tokens, 16, (3, 4), dtype)]


def of_mta(tokens: int = 20, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    q, k, v, _ = make(1, 2, 1, tokens, 16, (3, 4), dtype)
    generator = torch.Generator().manual_seed(3)
    mixers = [0.5 * torch.randn(2, 2, generator=generator).to(DEVICE, dtype) for _ in MIXERS]
    return [x.requires_grad_() for x in (q, k, v, *mixers)]


def mta(q: Tensor, k: Tensor, v: Tensor, *mixers: Tensor, **options: Any) -> Tensor:
    return multi_token_attention(q, k, v, **dict(zip(MIXERS, mixers, strict=True)), **options)


CONV = Operation(conv_attention, of_conv, torch.ops.mta.conv_attention)
MTA = Operation(mta, of_mta, torch.ops.mta.multi_token_attention)
BOUNDS = torch.tensor([0, 8, 20], device=DEVICE)
each = pytest.mark.parametrize("op", [CONV, MTA], ids=["conv", "mta"])
whole_and_packed = pytest.mark.parametrize("options", [{}, {"cu_seqlens": BOUNDS}], ids=["whole", "packed"])


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """The output and the gradients of a sum of its squares."""
    out = function(*tensors, **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)]


def assert_equal(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def step() -> tuple[list[Tensor], dict[str, Tensor]]:
    """A decode step of conv attention."""
    q, k, v, weight = (x.detach() for x in of_conv())
    return [q[:, :, :3], k, v, weight], {"lengths": torch.tensor([17], device=DEVICE)}


CHECKS = ("test_schema", "test_faketensor")
CONV_OPTIONS = (True, 0.3, 1, 0, None)  # causal, scale, pad, head_chunk, spans


def test_operators_of_conv_attention_are_what_they_say() -> None:
    tensors = of_conv(6)
    torch.library.opcheck(torch.ops.mta.conv_attention.default, (*tensors, *CONV_OPTIONS, "triton"))
    tensors = [x.detach() for x in tensors]
    out, logsumexp = torch.ops.mta.conv_attention(*tensors, *CONV_OPTIONS, "triton")
    backward = (*tensors, out, logsumexp, torch.randn_like(out), *CONV_OPTIONS, "triton")
    torch.library.opcheck(torch.ops.mta.conv_attention_backward.default, backward, test_utils=CHECKS)
    given, options = step()
    given = (*given, options["lengths"], None, None, "both", 0, "triton")
    torch.library.opcheck(torch.ops.mta.conv_attention_decode.default, given, test_utils=CHECKS)


def test_operators_of_multi_token_attention_are_what_they_say() -> None:
    q, k, v, pre_mix, post_mix = of_mta(6)
    tensors, numbers = (q, k, v, None, pre_mix, None, post_mix), (True, 0.3, 0, 1, 1, 1, None, "triton")
    torch.library.opcheck(torch.ops.mta.multi_token_attention.default, (*tensors, *numbers))
    tensors = tuple(x if x is None else x.detach() for x in tensors)
    out, logsumexp = torch.ops.mta.multi_token_attention(*tensors, *numbers)
    backward = (*tensors, logsumexp, torch.randn_like(out), *numbers)
    torch.library.opcheck(torch.ops.mta.multi_token_attention_backward.default, backward, test_utils=CHECKS)


@each
@whole_and_packed
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_undefined_gradient_adds_nothing(op: Operation, backend: str, options: dict) -> None:
    tensors = op.tensors()
    out = op.function(*tensors, backend=backend, **options)
    (Stop.apply(out).sum() + 2 * tensors[0].sum()).backward()
    assert (tensors[0].grad == 2).all()
    assert all(x.grad is None or not x.grad.any() for x in tensors[1:])


@each
def test_gradients_of_an_output_that_is_expanded(op: Operation) -> None:
    tensors = op.tensors()
    out = op.function(*tensors, backend="triton")
    grad_out = torch.randn(1, 1, 20, 1, device=DEVICE).expand(out.shape)
    got = torch.autograd.grad(out, tensors, grad_out, retain_graph=True)
    assert_equal(got, torch.autograd.grad(out, tensors, grad_out.contiguous()))


def test_nothing_but_inputs_and_row_sums_is_kept() -> None:
    tensors, kept = of_mta(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        mta(*tensors, backend="triton")
    addresses = {x.data_ptr() for x in tensors}
    assert [x.shape for x in kept if x.data_ptr() not in addresses] == [(1, 2, 20)]


FORWARD_MODE = "through backend 'triton' has no forward-mode derivatives .*; backend='reference' has them"


@each
@whole_and_packed
def test_forward_mode_is_refused(op: Operation, options: dict) -> None:
    """Of each tensor, and of a gradient: `test_repeated_calls`."""
    tensors = [x.detach() for x in op.tensors()]
    for place, x in enumerate(tensors):

        def function(x: Tensor, place: int = place) -> Tensor:
            return op.function(*tensors[:place], x, *tensors[place + 1 :], backend="triton", **options)

        for context in (nullcontext(), torch.no_grad()):
            with context, pytest.raises(RuntimeError, match=FORWARD_MODE):
                torch.func.jvp(function, (x,), (torch.ones_like(x),))


def test_forward_mode_of_history_and_decode_is_refused() -> None:
    q, k, v, weight = (x.detach() for x in of_conv())

    def chunk(history: Tensor) -> Tensor:
        return conv_attention(q[:, :, 12:], k, v, weight, q_history=history, backend="triton")

    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        torch.func.jvp(chunk, (q[:, :, :12],), (torch.ones_like(q)[:, :, :12],))
    tensors, options = step()
    for place, x in enumerate(tensors):
        with forward_ad.dual_level():
            duals = [*tensors[:place], forward_ad.make_dual(x, torch.ones_like(x)), *tensors[place + 1 :]]
            with pytest.raises(RuntimeError, match="conv_attention_decode " + FORWARD_MODE):
                conv_attention_decode(*duals, **options, backend="triton")


def test_transforms_of_torch_func() -> None:
    options, tensors = {"cu_seqlens": BOUNDS}, tuple(x.detach() for x in of_conv())

    def loss(*tensors: Tensor) -> Tensor:
        return conv_attention(*tensors, backend="triton", **options).square().sum()

    grad = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    assert_equal(grad(*tensors), gradients(conv_attention, of_conv(), backend="triton", **options)[1:])
    twice = [torch.stack([x, x / 2]) for x in tensors]
    each = [grad(*x) for x in zip(*twice, strict=True)]
    assert_equal(torch.func.vmap(grad)(*twice), [torch.stack(x) for x in zip(*each, strict=True)])
    with pytest.raises(RuntimeError, match="backend='reference' has second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *tensors[1:]).sum())(tensors[0])


def test_decode_within_transforms_of_torch_func() -> None:
    (q_window, *others), options = step()
    windows, lengths = torch.stack([q_window, q_window / 2]), torch.stack([options["lengths"], options["lengths"] - 1])

    def token(q_window: Tensor) -> Tensor:
        return conv_attention_decode(q_window, *others, **options, backend="triton")

    assert torch.equal(torch.func.vmap(token)(windows), torch.stack([token(x) for x in windows]))
    with pytest.raises(RuntimeError, match="not differentiable through backend 'triton'; use backend='reference'"):
        torch.func.grad(lambda q: token(q).sum())(q_window)

    def of_lengths(lengths: Tensor) -> Tensor:
        return conv_attention_decode(q_window, *others, lengths=lengths, backend="reference")

    torch.testing.assert_close(torch.func.vmap(of_lengths)(lengths), torch.stack([of_lengths(x) for x in lengths]))


def test_decode_has_no_gradient_but_by_the_reference() -> None:
    (q_window, *others), options = step()
    want = conv_attention_decode(q_window, *others, **options, backend="triton")
    assert not want.requires_grad
    out = conv_attention_decode(q_window.requires_grad_(), *others, **options, backend="triton")
    assert torch.equal(out, want)
    with pytest.raises(RuntimeError, match="not differentiable through backend 'triton'; use backend='reference'"):
        out.sum().backward()
    inputs = of_conv(17, torch.float64)
    whole = conv_attention(*inputs, backend="reference")[:, :, -1:]
    want_grads = torch.autograd.grad(whole.square().sum(), inputs)
    q, *others = inputs
    token = conv_attention_decode(q[:, :, -3:], *others, **options, backend="reference")
    torch.testing.assert_close(torch.autograd.grad(token.square().sum(), inputs), want_grads)


def test_tensors_without_numbers() -> None:
    """Of bounds and lengths a CPU would check the numbers."""
    bounds = BOUNDS
    with FakeTensorMode() as mode:
        q, k, v, weight, bounds = map(mode.from_tensor, (*(x.detach() for x in of_conv()), bounds))
        packed = conv_attention(q, k, v, weight, cu_seqlens=bounds, backend="triton")
        token = conv_attention_decode(q[:, :, :3], k, v, weight, lengths=bounds[:1], backend="triton")
    assert (packed.shape, token.shape) == (q.shape, q[:, :, :1].shape)
    for backend in ("reference", "auto"):
        q, k, v, weight = (x.to("meta") for x in of_conv())
        out = conv_attention(q[:, :, 8:], k, v, weight, q_history=q[:, :, :8], backend=backend)
        assert (out.shape, out.requires_grad) == ((1, 2, 12, 16), True)


def test_raw_operators_refuse_what_the_public_functions_refuse() -> None:
    (q, k, v, weight), options = step()
    raw, more = torch.ops.mta.conv_attention_decode, (options["lengths"], None, None, "both", 0)
    with pytest.raises(ValueError, match=r"backend .triton. cannot run this: the caches have strides .* side by side"):
        raw(q, k.mT.contiguous().mT, v, weight, *more, "triton")
    for backend, words in (("hopper", "has no decode"), ("reference", "has no decode"), ("tritn", "expected 'auto'")):
        with pytest.raises(ValueError, match=words):
            raw(q, k, v, weight, *more, backend)
    with pytest.raises(ValueError, match="backend 'reference' has no forward"):
        torch.ops.mta.conv_attention(*(x.detach() for x in of_conv()), *CONV_OPTIONS, "reference")


class Graphs:
    """A compiler that runs the graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]):
        self.graphs.append(graph)
        return graph.forward

    def calls(self, op: Any) -> int:
        return sum(node.target is op.default for graph in self.graphs for node in graph.graph.nodes)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@each
@pytest.mark.usefixtures("fresh_compiler")
def test_lengths_of_calls_share_two_graphs(op: Operation) -> None:
    graphs = Graphs()
    compiled = torch.compile(op.function, fullgraph=True, backend=graphs)
    for tokens in (20, 25, 31):
        tensors = [x.detach() for x in op.tensors(tokens)]
        assert torch.equal(compiled(*tensors, backend="triton"), op.function(*tensors, backend="triton"))
    assert len(graphs.graphs) == graphs.calls(op.operator) <= 2


@each
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_gradients(op: Operation) -> None:
    compiled = torch.compile(op.function, fullgraph=True, dynamic=True, backend="aot_eager")
    tensors, options = op.tensors(), {"cu_seqlens": BOUNDS, "backend": "triton"}
    options |= {"head_chunk": 1} if op is CONV else {}
    assert_equal(gradients(compiled, tensors, **options), gradients(op.function, tensors, **options))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_chunks_of_a_prompt() -> None:
    compiled = torch.compile(conv_attention, fullgraph=True, backend="aot_eager")
    q, k, v, weight = of_conv()
    tensors = [x.detach().requires_grad_() for x in (q[:, :, 12:], q[:, :, 9:12])] + [k, v, weight]

    def chunk_of(function):
        return lambda q, history, *others: function(q, *others, q_history=history)

    assert_equal(gradients(chunk_of(compiled), tensors), gradients(chunk_of(conv_attention), tensors))


@pytest.mark.usefixtures("fresh_compiler")
def test_numbers_that_change_are_no_graph_break() -> None:
    """From the second call on they are symbols to the compiler."""
    q, k, v, weight = (x.detach() for x in of_conv())

    def call(scale: float, row: int) -> tuple[Tensor, Tensor]:
        rows = conv_attention_reference(q, k, v, weight, rows=(row, row + 2))
        return conv_attention(q, k, v, weight * identity_weight(2, row, row).sum(), scale=scale), rows

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for numbers in ((0.1, 2), (0.2, 3)):
        for got, want in zip(compiled(*numbers), call(*numbers), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_decode_by_lengths_splits_and_scales_of_numpy() -> None:
    """A compiler takes such a scale for a tensor: the operator is given a number."""
    tensors, options = step()
    compiled = torch.compile(conv_attention_decode, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, splits in ((17, "auto"), (4, 2)):
        options["lengths"].fill_(length)
        got = compiled(*tensors, **options, splits=splits)
        assert torch.equal(got, conv_attention_decode(*tensors, **options, splits=splits))
    options |= {"scale": np.float32(0.3), "backend": "triton"}
    got = torch.compile(conv_attention_decode, backend="eager")(*tensors, **options)
    assert torch.equal(got, conv_attention_decode(*tensors, **options))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_where_triton_cannot_run() -> None:
    graphs = Graphs()
    compiled = torch.compile(conv_attention, fullgraph=True, backend=graphs)
    for tensors in (make(1, 2, 1, 20, 8, (3, 4)), make(1, 2, 1, 20, 16, (3, 4), torch.float64)):
        assert torch.equal(compiled(*tensors), conv_attention(*tensors))
    assert len(graphs.graphs) == 2
    assert graphs.calls(torch.ops.mta.conv_attention) == 0


@pytest.mark.usefixtures("fresh_compiler")
def test_dropout_compiles() -> None:
    compiled, tensors = torch.compile(mta, fullgraph=True, backend="aot_eager"), of_mta(9)
    found = (gradients(function, tensors, dropout=0.5, seed=7) for function in (compiled, mta))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not torch.equal(compiled(*tensors, dropout=0.5), compiled(*tensors, dropout=0.5))


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_by_inductor() -> None:
    def layer(q, k, v, weight):
        return conv_attention(q * 2, k + 1, v, weight) * 3

    tensors = of_conv()
    compiled = torch.compile(layer, fullgraph=True)
    for a, b in zip(gradients(compiled, tensors), gradients(layer, tensors), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = ConvAttention(2, 3, 4, device=DEVICE)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None = None) -> Tensor:
        return self.attention(q, k, v, cu_seqlens=bounds)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("strict", "documents"), [(True, None), (False, [0, 8, 20])])
def test_exports(strict: bool, documents: list[int] | None) -> None:
    def inputs(tokens: int, documents: list[int] | None) -> tuple[Tensor, ...]:
        bounds = () if documents is None else (torch.tensor(documents, device=DEVICE),)
        return *(x.detach() for x in of_conv(tokens)[:3]), *bounds

    layer, example = Layer(), inputs(20, documents)
    shapes = [{2: torch.export.Dim("seq_len", min=2, max=4096)}] * 3 + [{0: torch.export.Dim("bounds", min=2)}]
    program = torch.export.export(layer, example, dynamic_shapes=tuple(shapes[: len(example)]), strict=strict)
    assert torch.ops.mta.conv_attention.default in {node.target for node in program.graph.nodes}
    other = inputs(33, None if documents is None else [0, 3, 3, 33])
    assert torch.equal(program.module()(*other), layer(*other))


def test_the_module_of_all_parts_exports() -> None:
    attention = MultiTokenAttention(2, 16, pre_conv=(2, 3), post_conv=(3, 2), post_mix=2, backend="triton")
    q, k, v = torch.randn(3, 1, 2, 7, 16)
    program = torch.export.export(attention, (q, k, v))
    torch.testing.assert_close(program.module()(q, k, v), attention(q, k, v))
    assert any("mta.multi_token_attention" in str(node.target) for node in program.graph.nodes)


@each
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(op: Operation, use_reentrant: bool) -> None:
    tensors = op.tensors()
    out = checkpoint(lambda *x: op.function(*x, backend="triton"), *tensors, use_reentrant=use_reentrant)
    out.square().sum().backward()
    assert_equal([out, *(x.grad for x in tensors)], gradients(op.function, tensors, backend="triton"))


def test_a_checkpoint_drops_the_same_again() -> None:
    tensors = of_mta()

    def checkpointed(*tensors: Tensor, **options: Any) -> Tensor:
        return checkpoint(mta, *tensors, **options, use_reentrant=False)

    found = []
    for function in (mta, checkpointed):
        torch.manual_seed(1)
        found.append(gradients(function, tensors, dropout=0.5))
    assert_equal(*found)
    assert not torch.equal(found[0][0], gradients(mta, tensors, dropout=0.5)[0])
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run this: .*dropout"):
        mta(*tensors, dropout=0.5, backend="triton")


@each
def test_autocast_leaves_float64_alone_and_casts_other_weights(op: Operation) -> None:
    tensors = [x.detach().double() for x in op.tensors()]
    with torch.autocast(DEVICE, torch.bfloat16):
        assert op.function(*tensors).dtype == torch.float64
        *qkv, weight = (x.float() for x in tensors)
        assert op.function(*qkv, weight.half()).dtype == torch.bfloat16
        if DEVICE == "cpu":  # the choice is of the dtype that is computed in
            q, k, v = qkv[:3]
            choice = explain(q, k, v, weight) if op is CONV else explain_mta(q, k, v, post_mix=weight)
            assert "bfloat16" in choice.reason
    with pytest.raises(TypeError, match=r"has dtype torch\.float16"):
        op.function(*qkv, weight.half())


@pytest.mark.gpu
@each
def test_graphs_threads_and_other_work_on_a_gpu(op: Operation) -> None:
    """A training step is replayed with other numbers, and run on a stream behind other work: the same bits."""
    tensors = op.tensors(300, torch.bfloat16)
    bounds = torch.tensor([0, 100, 300], device=DEVICE)

    def training_step() -> list[Tensor]:
        return gradients(op.function, tensors, cu_seqlens=bounds, backend="triton")

    want = training_step()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        beside = training_step()
    stream.synchronize()
    assert_equal(beside, want)
    with torch.cuda.graph(graph):
        results = training_step()
    for documents in ([0, 100, 300], [0, 0, 300], [0, 7, 300]):
        bounds.copy_(torch.tensor(documents))
        with torch.no_grad():
            for x in tensors:
                x.neg_()
        graph.replay()
        assert_equal(results, training_step())
