"""Sequences and caches shared by the processes of a gloo group, against one process, in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kernel_inputs import relative_error, value_and_gradients
from rank_processes import RankProcesses
from torch import Tensor
from torch.autograd import forward_ad

from mta_kernels.conv_attention import (
    ConvAttention,
    conv_attention,
    conv_attention_decode,
    conv_attention_decode_reference,
    conv_attention_reference,
    explain,
)
from mta_kernels.conv_attention.context_parallel import cache_positions, shard_sequence, unshard_sequence
from mta_kernels.conv_attention.hopper import backend as hopper_backend

CHUNK = 19
NAMES = ("q", "k", "v", "weight")


@pytest.fixture(scope="module")
def processes():
    found = RankProcesses(4)
    yield found
    found.close()


def inputs(rows: int, taps: tuple[int, int], heads: int = 4, kv_heads: int = 2, dtype=torch.float64) -> list[Tensor]:
    """q, k, v, weight and the gradient of out, the same in every process."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, grad_out = normal(2, heads, rows, 8), normal(2, heads, rows, 8)
    k, v = normal(2, kv_heads, rows, 8), normal(2, kv_heads, rows, 8)
    return [q, k, v, 0.3 * normal(heads, *taps), grad_out]


def share(group: dist.ProcessGroup, tensors: list[Tensor]) -> list[Tensor]:
    """This rank's rows of q, k, v and the gradient; the weight whole."""
    return [x if x.dim() == 3 else shard_sequence(x, group) for x in tensors]


def of_a_rank(group: dist.ProcessGroup, rows: int, taps: tuple[int, int], options: dict) -> dict[str, Tensor]:
    """Out and gradients of all ranks, whole again."""
    *tensors, grad_out = share(group, inputs(rows, taps))
    got = value_and_gradients(conv_attention, dict(zip(NAMES, tensors, strict=True)), grad_out, group=group, **options)
    return {name: x if x.dim() == 3 else unshard_sequence(x, group) for name, x in got.items()}


@pytest.mark.parametrize("pad_key", ["both", "left", "right"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("ranks", "taps"), [(2, (6, 11)), (2, (1, 1)), (4, (6, 11)), (4, (3, 4)), (4, (7, 2))])
def test_out_and_all_gradients_are_those_of_one_process(processes, ranks, taps, causal, pad_key) -> None:
    options = {"causal": causal, "pad_key": pad_key}
    *tensors, grad_out = inputs(2 * ranks * CHUNK, taps)
    whole = value_and_gradients(conv_attention_reference, dict(zip(NAMES, tensors, strict=True)), grad_out, **options)
    answers = processes.call(ranks, of_a_rank, 2 * ranks * CHUNK, taps, options)
    for name, want in whole.items():
        for answer in answers:
            assert torch.equal(answer[name], answers[0][name]), name
        assert relative_error(answers[0][name], want) < 1e-13, name


def test_equal_calls_give_equal_results(processes) -> None:
    first, second = (processes.call(4, of_a_rank, 8 * CHUNK, (6, 11), {})[2] for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_chunks_of_heads_change_nothing(processes) -> None:
    whole, parts = (processes.call(2, of_a_rank, 4 * CHUNK, (3, 4), {"head_chunk": n})[0] for n in (None, 1))
    for name, x in parts.items():
        assert relative_error(x, whole[name]) < 1e-14, name


def test_the_shortest_chunks_that_are_taken(processes) -> None:
    *tensors, grad_out = inputs(8 * 16, (6, 11))
    whole = value_and_gradients(conv_attention_reference, dict(zip(NAMES, tensors, strict=True)), grad_out)
    answer = processes.call(4, of_a_rank, 8 * 16, (6, 11), {})[3]
    for name, want in whole.items():
        assert relative_error(answer[name], want) < 1e-13, name


def module_of_a_rank(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    q, k, v, weight, _ = inputs(4 * CHUNK, (3, 4))
    layer = ConvAttention(4, 3, 4, dtype=torch.float64)
    layer.weight.data = weight
    q, k, v = (shard_sequence(x, group) for x in (q, k, v))
    out = layer(q, k, v, group=group)
    out.sum().backward()
    return unshard_sequence(out, group), layer.weight.grad


def test_the_module_shares_a_sequence(processes) -> None:
    q, k, v, weight, _ = inputs(4 * CHUNK, (3, 4))
    weight.requires_grad_()
    whole = conv_attention_reference(q, k, v, weight)
    whole.sum().backward()
    for out, grad in processes.call(2, module_of_a_rank):
        assert relative_error(out, whole) < 1e-14
        assert relative_error(grad, weight.grad) < 1e-12


def triton_of_a_rank(group: dist.ProcessGroup) -> dict[str, Tensor]:
    *tensors, grad_out = share(group, inputs(4 * CHUNK, (6, 11), 1, 1, torch.float32))
    tensors[:3] = (torch.cat([x, x], -1)[:1] for x in tensors[:3])  # Triton's kernels take 16 columns
    grad_out = torch.cat([grad_out, grad_out], -1)[:1]
    got = value_and_gradients(
        conv_attention, dict(zip(NAMES, tensors, strict=True)), grad_out, group=group, backend="triton"
    )
    want = value_and_gradients(
        conv_attention, dict(zip(NAMES, tensors, strict=True)), grad_out, group=group, backend="reference"
    )
    return {name: torch.tensor(relative_error(got[name], want[name])) for name in got}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")
def test_triton_shares_a_sequence(processes) -> None:
    for errors in processes.call(2, triton_of_a_rank):
        assert max(errors.values()) < 2e-6, errors


def single(group: dist.ProcessGroup) -> bool:
    q, k, v, weight, _ = inputs(30, (6, 11))
    lengths = torch.tensor([30, 7])
    window = q[:, :, -6:]
    return torch.equal(conv_attention(q, k, v, weight, group=group), conv_attention(q, k, v, weight)) and torch.equal(
        conv_attention_decode(window, k, v, weight, lengths=lengths, group=group),
        conv_attention_decode(window, k, v, weight, lengths=lengths),
    )


def test_a_group_of_one_rank_changes_nothing(processes) -> None:
    assert processes.call(1, single) == [True]


def decode_of_a_rank(group, capacity: int, taps: tuple[int, int], lengths: list[int], pad_key: str) -> Tensor:
    q, k, v, weight, _ = inputs(capacity, taps)
    at = cache_positions(group.rank(), group.size(), capacity, key_taps=taps[1], pad_key=pad_key)
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = float("nan")  # nobody reads them
    caches = (x[:, :, at.start : at.stop] for x in (k, v))
    options = {"lengths": torch.tensor(lengths), "pad_key": pad_key, "group": group}
    return conv_attention_decode(q[:, :, : taps[0]], *caches, weight, **options)


@pytest.mark.parametrize("pad_key", ["both", "left", "right"])
@pytest.mark.parametrize(("ranks", "taps"), [(2, (6, 11)), (4, (3, 4)), (4, (1, 1))])
@pytest.mark.parametrize("lengths", [(80, 1), (41, 40), (47, 20)])
def test_decode_is_that_of_one_process(processes, ranks, taps, lengths, pad_key) -> None:
    q, k, v, weight, _ = inputs(80, taps)
    want = conv_attention_decode_reference(
        q[:, :, : taps[0]], k, v, weight, lengths=torch.tensor(lengths), pad_key=pad_key
    )
    answers = processes.call(ranks, decode_of_a_rank, 80, taps, list(lengths), pad_key)
    for answer in answers:
        assert torch.equal(answer, answers[0])
    assert relative_error(answers[0], want) < 1e-14


def refused(group: dist.ProcessGroup, what: str) -> str:
    """The sentence that a rank gets."""
    q, k, v, weight, _ = inputs(48, (3, 4))
    options: dict = {"group": group}
    if what == "other shapes":
        q, k, v = (x[:, :, : 40 if group.rank() else 48] for x in (q, k, v))
    elif what == "odd rows":
        q, k, v = (x[:, :, :47] for x in (q, k, v))
    elif what == "short chunks":
        q, k, v = (x[:, :, :10] for x in (q, k, v))
    elif what == "other scale":
        options["scale"] = 0.5 + group.rank()
    elif what == "documents":
        q, k, v, options["cu_seqlens"] = q[:1], k[:1], v[:1], torch.tensor([0, 20, 48])
    elif what == "history":
        q, options["q_history"] = q[:, :, 20:], q[:, :, :20]
    elif what == "hopper":
        options["backend"] = "hopper"
    elif what == "hopper's decode":
        lengths = torch.tensor([16, 16])
        conv_attention_decode(q[:, :, :3], k, v, weight, lengths=lengths, backend="hopper", group=group)
    elif what == "ranks that do not divide":
        shard_sequence(q[:, :, :42], group)
    elif what == "cache that ranks do not divide":
        cache_positions(group.rank(), group.size(), 41, key_taps=4)
    elif what == "pages":
        table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([16, 16])
        pages = k[:, :, :16]
        conv_attention_decode(q[:, :, :3], pages, pages, weight, lengths=lengths, block_table=table, group=group)
    elif what == "dual tensors":
        with forward_ad.dual_level():
            conv_attention(q, k, forward_ad.make_dual(v, v), weight, **options)
    elif what == "dual caches":
        lengths = torch.tensor([16, 16])
        with forward_ad.dual_level():
            conv_attention_decode(q[:, :, :3], k, forward_ad.make_dual(v, v), weight, lengths=lengths, group=group)
    conv_attention(q, k, v, weight, **options)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "kind", "sentence"),
    [
        ("other shapes", ValueError, "q.shape[2] is 48 on rank 0 and 40 on rank 1"),
        ("other scale", ValueError, "scale is 0.5 on rank 0 and 1.5 on rank 1"),
        ("odd rows", ValueError, "make the sequence a multiple of 4 rows"),
        ("short chunks", ValueError, "give a sequence of 24 rows or more"),
        ("documents", ValueError, "ranks share one sequence, not packed documents"),
        ("history", ValueError, "and no q_history"),
        (
            "hopper",
            ValueError,
            "need an NVIDIA H100, H200 or GH200, not a cpu device; backend='auto' picks one that can",
        ),
        ("hopper's decode", ValueError, "use 'triton', or 'auto'"),
        ("pages", ValueError, "ranks share contiguous caches"),
        ("ranks that do not divide", ValueError, "44 for instance"),
        ("cache that ranks do not divide", ValueError, "make it 42"),
        ("dual tensors", RuntimeError, "backend='reference' without group has them"),
        ("dual caches", RuntimeError, "backend='reference' without group has them"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_on_every_rank(processes, what, kind, sentence) -> None:
    for answer in processes.call(2, refused, what):
        assert type(answer) is kind, answer
        assert sentence in str(answer)
        assert "\n" not in str(answer)


def test_what_is_no_group_is_refused() -> None:
    q, k, v, weight, _ = inputs(48, (3, 4))
    with pytest.raises(TypeError, match="expected a process group"):
        conv_attention(q, k, v, weight, group="everybody")


def choice(group: dist.ProcessGroup) -> str:
    q, k, v, weight, _ = inputs(48, (3, 4), dtype=torch.float64)
    return explain(q, k, v, weight, group=group).backend


def test_auto_takes_the_reference_for_what_triton_refuses(processes) -> None:
    assert processes.call(2, choice) == ["reference", "reference"]


def choices_on_hopper(group: dist.ProcessGroup) -> list[str]:
    """Of a head dim that has a backward there, and of one that has none; then of a decode."""
    found = []
    with mock.patch.object(hopper_backend, "platform_unsupported", return_value=None):
        for columns, wants_gradient in ((16, True), (144, False), (144, True)):
            q, k, v = (torch.zeros(1, 2, 48, columns, dtype=torch.float16) for _ in range(3))
            weight = torch.zeros(2, 3, 4, dtype=torch.float16, requires_grad=wants_gradient)
            found.append(explain(q, k, v, weight, group=group).backend)
        found.append(explain(q, k, v, weight.detach(), decode=True, group=group).backend)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")
def test_auto_takes_hopper_s_kernels_first(processes) -> None:
    assert processes.call(2, choices_on_hopper) == [["hopper", "hopper", "triton", "triton"]] * 2
