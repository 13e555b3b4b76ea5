"""The Triton decode against float64: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from decode_steps import assert_decodes, make_decode, paged
from kernel_inputs import DEVICE, RANGES, poison_memory, relative_error, with_range

from mta_kernels.conv_attention import (
    conv_attention_decode,
    conv_attention_decode_reference,
    explain,
)
from mta_kernels.conv_attention.cuda_decode import backend
from mta_kernels.conv_attention.triton import decode
from mta_kernels.conv_attention.triton.decode_plan import DecodeConfig, bulk_pays, column_steps, decode_candidates
from mta_kernels.gpu_limits import capability
from mta_kernels.operation import Operation

HAS_COPY_ENGINE = capability(torch.device(DEVICE)) >= (9, 0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


def conv_attention_decode_triton(q, k, v, weight, *, scale=None, pad_key="both", **options) -> Tensor:
    """A step by the kernels, without the operator."""
    operation = Operation.of(weight.shape[1:], q.shape[3], scale=scale, pad_key=pad_key)
    return decode.conv_attention_decode(operation, q, k, v, weight, **options)


@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 4), (128, 1)])
def test_copy_engine_reads_what_pointers_read(head_dim: int, group: int) -> None:
    """All tiles, with lengths about the ends of tiles and of shares, NaN beyond, and capacities of any remainder."""
    lengths = [0, 3, 64, 139, 140, 271]
    inputs = make_decode(lengths, group, 1, head_dim, (6, 11), torch.float16)
    q, k, v, weight, count = inputs
    shape = {"key_taps": 11, "block_d": 128 if head_dim > 64 else 64, "element_size": 2, "shared_memory": 232448}
    configs = decode_candidates(group=group, bulk=True, **shape)
    assert {config.pack for config in configs} >= ({1, 2} if group == 1 else {2})
    operation, step = Operation.of((6, 11), head_dim), {"block_table": None}
    for number, config in enumerate(configs if group == 1 else configs[::4]):
        step["splits"] = (1, 2, 5)[number % 3]
        caches = [x[:, :, : 271 + number % 6].contiguous() for x in (k, v)]
        got = decode.launch_decode(operation, q, *caches, weight, count, config=config, bulk=HAS_COPY_ENGINE, **step)
        assert (got[0] == 0).all()
        assert_decodes(got[1:], q[1:], k[1:], v[1:], weight, count[1:])
        want = decode.launch_decode(operation, q, *caches, weight, count, config=config, **step)
        assert relative_error(got, want) < 1e-3, config


@pytest.mark.parametrize("layout", ["token-major", "padded rows", "wider cache", "keys and values in one"])
def test_copy_engine_follows_strides(layout: str) -> None:
    q, k, v, weight, lengths = make_decode([5, 90, 200], 4, 2, 64, (6, 11), torch.float16)
    want = conv_attention_decode_triton(q, k, v, weight, lengths=lengths, splits=2)
    assert_decodes(want, q, k, v, weight, lengths)
    if layout == "token-major":
        caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    elif layout == "padded rows":
        caches = [torch.nn.functional.pad(x, (0, 8), value=float("nan"))[..., :64] for x in (k, v)]
    elif layout == "wider cache":
        caches = [torch.nn.functional.pad(x, (0, 0, 3, 2), value=float("nan"))[:, :, 3:-2] for x in (k, v)]
    else:
        caches = list(torch.cat([k, v], 3).chunk(2, 3))
    assert decode.reads_in_bulk(q, *caches, None) == HAS_COPY_ENGINE
    assert torch.equal(conv_attention_decode_triton(q, *caches, weight, lengths=lengths, splits=2), want)


def test_what_the_copy_engine_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(2, 6, 1, 64, dtype=torch.float16, device=DEVICE)
    cache = torch.zeros(2, 3, 50, 64, dtype=torch.float16, device=DEVICE)
    others = [
        cache.float(),
        cache.mT.contiguous().mT,
        torch.zeros(2, 3, 50, 68, dtype=torch.float16, device=DEVICE)[..., :64],  # rows of 136 bytes
        torch.zeros(2, 3, 50, 72, dtype=torch.float16, device=DEVICE)[..., 4:68],  # from byte 8 on
        cache[:1].expand(2, -1, -1, -1),
    ]
    assert decode.reads_in_bulk(q, cache, cache, None) == HAS_COPY_ENGINE
    for other in others[1:]:
        assert not decode.reads_in_bulk(q, cache, other, None)
        assert not decode.reads_in_bulk(q, other, cache, None)
    assert not decode.reads_in_bulk(q, others[0], others[0], None)
    assert not decode.reads_in_bulk(q[:, :3], cache, cache, None)  # one query head a KV head, of 64
    assert not decode.reads_in_bulk(q, cache, cache, torch.zeros(2, 1, dtype=torch.int32, device=DEVICE))
    for head_dim, group, size, compute_capability, pays in (
        (72, 1, 2, (9, 0), True),
        (40, 2, 2, (10, 0), True),
        (64, 1, 2, (9, 0), False),
        (44, 2, 2, (9, 0), False),
        (72, 1, 4, (9, 0), False),
        (128, 8, 2, (8, 9), False),
    ):
        assert bulk_pays(head_dim, group, size, compute_capability) == pays
    monkeypatch.setattr(decode, "compiled_capability", lambda device: (8, 9))
    assert not decode.reads_in_bulk(q, cache, cache, None)


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["shared KV heads", "own KV heads"])
def test_caches_whose_numbers_of_a_key_lie_apart_are_for_others(heads: tuple[int, int], monkeypatch) -> None:
    q, k, v, weight, lengths = make_decode([4, 90], *heads, 48, (6, 11), torch.float16)
    apart = k.mT.contiguous().mT
    for caches in ((apart, v), (k, apart)):
        with pytest.raises(ValueError, match=r"numbers of a key side by side \(stride 1\); backend='auto'"):
            conv_attention_decode(q, *caches, weight, lengths=lengths, backend="triton")
        got = conv_attention_decode(q, *caches, weight, lengths=lengths)
        assert relative_error(got, conv_attention_decode_reference(q, *caches, weight, lengths=lengths)) < 0.002
    monkeypatch.setattr(backend, "platform_unsupported", lambda device: None)
    monkeypatch.setattr(backend.decode, "shape_unsupported", lambda *shape: None)
    assert explain(q, apart, v, weight, decode=True).backend == "cuda"


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", RANGES)
def test_range_of_fp16(kind: str, group: int) -> None:
    q, k, v, weight, lengths = make_decode([5, 130], group, 1, 48, (6, 11))
    q, k, weight, scale = with_range(kind, q, k, weight)
    inputs = q, k, v.half(), weight
    got = conv_attention_decode_triton(*inputs, lengths=lengths, scale=scale)
    exact = conv_attention_decode_reference(*(x.double() for x in inputs), lengths=lengths, scale=scale)
    assert relative_error(got, exact) < 2e-3


@pytest.mark.parametrize("shared_memory", [166912, 101376], ids=["sm_80", "sm_86"])
def test_tiles_of_older_gpus(shared_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "shared_memory_limit", lambda device: shared_memory)
    inputs = make_decode([4, 150], 8, 1, 128, (6, 11), torch.float16)
    assert_decodes(conv_attention_decode_triton(*inputs[:4], lengths=inputs[4], splits=2), *inputs)


@pytest.mark.parametrize("cache", ["by pointers", "by the copy engine", "paged"])
@pytest.mark.parametrize("group", [1, 3])
def test_newest_keys_come_first_or_last(group: int, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where programs stand does not change what they compute."""
    inputs = make_decode([7, 200], 2 * group, 2, 64, (6, 11), torch.float16)
    q, k, v, weight, lengths = inputs
    operation = Operation.of((6, 11), 64)
    step = {"splits": 3, "config": DecodeConfig(64, 2, min(2, group), 2, 3)}
    step["bulk"] = cache == "by the copy engine" and HAS_COPY_ENGINE
    table = None
    if cache == "paged":
        (k, table), (v, _) = paged(k, 16), paged(v, 16)
    results = []
    for last in (False, True):
        monkeypatch.setattr(decode, "newest_last", lambda *_, last=last: last)
        results.append(decode.launch_decode(operation, q, k, v, weight, lengths, table, **step))
    assert_decodes(results[0], *inputs)
    assert torch.equal(*results)


@pytest.mark.parametrize(("taps", "bulk"), [((6, 11), False), ((1, 1), HAS_COPY_ENGINE), ((3, 16), HAS_COPY_ENGINE)])
def test_interleaved_tiles(taps: tuple[int, int], bulk: bool) -> None:
    """Programs take tiles in turn: lengths about the ends of tiles and rounds, and fewer keys than programs."""
    key_taps = taps[1]
    for pack, first_pad in ((1, "both"), (2, "left")):
        new = 64 - (column_steps(key_taps, pack) - 1) * pack  # keys that a tile finishes
        inputs = make_decode([1, 3, new, 2 * new, 2 * new + 1, 4 * new + 17], 3, 1, 72, taps, torch.float16)
        q, k, v, weight, lengths = inputs
        for splits, pad_key in ((pack, first_pad), (7, "right")):
            operation = Operation.of(weight.shape[1:], 72, pad_key=pad_key)
            step = {"splits": splits, "bulk": bulk}
            config = DecodeConfig(64, pack, 2, 2, 3, interleaved=True)
            got = decode.launch_decode(operation, q, k, v, weight, lengths, None, config=config, **step)
            assert_decodes(got, *inputs, pad_key=pad_key)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [False, True])
def test_cuda_graph_follows_the_lengths(pages: bool) -> None:
    """A captured step is replayed with other lengths: nothing was read on the host."""
    q, k, v, weight, lengths = make_decode([4, 300], 8, 2, 64, (6, 11), torch.bfloat16)
    caches, table = [k, v], None
    if pages:
        (k_pages, table), (v_pages, _) = paged(k, 16), paged(v, 16)
        caches = [k_pages, v_pages]
    step = {"lengths": lengths, "block_table": table}
    conv_attention_decode_triton(q, *caches, weight, **step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = conv_attention_decode_triton(q, *caches, weight, **step)
    for new in ([4, 300], [2, 17], [1, 150]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert_decodes(out, q, k, v, weight, lengths)


@pytest.mark.gpu
def test_other_tensors_of_the_same_shape() -> None:
    """No address of an earlier call is used again, neither by a call nor by a graph."""
    steps = [make_decode([80, 300], 2, 2, 64, (6, 11), torch.bfloat16, seed=seed) for seed in range(3)]
    for _ in range(2):
        for *tensors, lengths in steps:
            assert_decodes(conv_attention_decode_triton(*tensors, lengths=lengths), *tensors, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [conv_attention_decode_triton(*tensors, lengths=lengths) for *tensors, lengths in steps]
    for *tensors, _ in steps:
        tensors[0].normal_()
    graph.replay()
    for out, step in zip(outs, steps, strict=True):
        assert_decodes(out, *step)


@pytest.mark.parametrize("splits", [0, 129, "many", 2.0])
def test_refuses_splits(splits: object) -> None:
    q, k, v, weight, lengths = make_decode([4], 1, 1, 16, (2, 3))
    with pytest.raises(ValueError, match="splits is"):
        conv_attention_decode_triton(q, k, v, weight, lengths=lengths, splits=splits)


def test_refuses_block_tables() -> None:
    q, k, _, weight, lengths = make_decode([16], 1, 1, 16, (2, 3))
    pages, table = paged(k, 16)
    for wrong in (table.long(), table[0], table.expand(2, -1), table[:, :0]):
        with pytest.raises(ValueError, match="block_table has shape"):
            conv_attention_decode_triton(q, pages, pages, weight, lengths=lengths, block_table=wrong)
    for size in (8, 24):
        pages, table = paged(k, size)
        with pytest.raises(ValueError, match=f"pages of {size} keys"):
            conv_attention_decode_triton(q, pages, pages, weight, lengths=lengths, block_table=table)
