"""How ranks divide the scores, and the fused kernels on such tiles, with ranks that are threads of one process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from emulated_hopper import emulator  # noqa: F401
from kernel_inputs import DEVICE, DTYPES, make, poison_memory, relative_error, value_and_gradients
from simulated_ranks import run_ranks
from torch import Tensor

from mta_kernels.conv_attention import conv_attention_decode_reference, conv_attention_reference
from mta_kernels.conv_attention.context_parallel import cache_positions
from mta_kernels.conv_attention.context_parallel import tiles as tiling
from mta_kernels.conv_attention.context_parallel.attention import Plan, make_plan, over_ranks
from mta_kernels.conv_attention.context_parallel.decode import decode_over_ranks
from mta_kernels.conv_attention.context_parallel.layout import chunks_of
from mta_kernels.conv_attention.context_parallel.ring import backward as ring_backward
from mta_kernels.conv_attention.context_parallel.ring import forward as ring_forward
from mta_kernels.conv_attention.context_parallel.tiles import Problem, tiles
from mta_kernels.operation import Operation

ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
NAMES = ("q", "k", "v", "weight")
PADS = ("both", "left", "right")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("taps", [(6, 11), (1, 1), (7, 2), (1, 6)])
@pytest.mark.parametrize("causal", [True, False])
def test_every_score_is_in_one_tile_and_masks_are_on_the_diagonal_alone(ranks, taps, causal, monkeypatch) -> None:
    monkeypatch.setattr(tiling, "LONG", 40)
    monkeypatch.setattr(tiling, "BLOCK", 32)
    for pad_key, rows in product(PADS, (sum(taps) - 1, 64)):
        problem = Problem(rows, Operation.of(taps, 1, causal=causal, pad_key=pad_key))
        count = torch.zeros(2 * ranks * rows, 2 * ranks * rows, dtype=torch.int)
        back = torch.arange(count.shape[0])[:, None] - torch.arange(count.shape[0])
        for rank in range(ranks):
            for owner in range(ranks):
                for tile in tiles(problem, rank, owner, ranks):
                    first = chunks_of(rank, ranks)[tile.query] * rows
                    start = chunks_of(owner, ranks)[tile.key] * rows - problem.lead
                    queries = slice(first, first + rows)
                    keys = slice(*(start + x for x in tile.value_rows.indices(problem.lead + rows)[:2]))
                    count[queries, keys] += 1
                    if causal and not tile.causal:
                        assert (back[queries, keys] >= taps[0] - 1 + taps[1] - 1 - problem.conv.pad).all()
                    assert rows != 64 or (keys.stop - keys.start) % 32 == 0
        assert (count[back >= 0] == 1).all()
        assert (count[back < 0] == 1).all() or causal


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_causal_work_is_the_same_on_every_rank_at_every_step(ranks) -> None:
    problem = Problem(8, Operation.of((1, 1), 1))
    for step in range(1, ranks):
        work = {len(list(tiles(problem, rank, (rank - step) % ranks, ranks))) for rank in range(ranks)}
        assert work == {2}


def shard(x: Tensor, rank: int, ranks: int) -> Tensor:
    chunks = x.chunk(2 * ranks, 2)
    return torch.cat([chunks[chunk] for chunk in chunks_of(rank, ranks)], 2)


def ring(
    ranks: int, inputs: tuple[Tensor, ...], grad_out: Tensor, *,
    causal=True, scale=None, pad_key="both", head_chunk=None, backend="triton",
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Out and gradients of each simulated rank."""
    weight = inputs[3]

    def of_a_rank(simulated) -> dict[str, Tensor]:
        shards = [x if x is weight else shard(x, simulated.rank, ranks) for x in inputs]
        operation = Operation.of(weight.shape[1:], inputs[0].shape[3], causal=causal, scale=scale, pad_key=pad_key)
        plan = make_plan(operation, shards[0], simulated, head_chunk, backend)
        own_grad_out = shard(grad_out, simulated.rank, ranks)
        if shards[0].is_cuda:
            return without_autograd(plan, shards, own_grad_out)
        return value_and_gradients(over_ranks, dict(zip(NAMES, shards, strict=True)), own_grad_out, plan=plan)

    return run_ranks(ranks, of_a_rank)


def without_autograd(plan: Plan, shards: list[Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    """For a GPU, whose backwards autograd runs in one thread: ranks would wait there for each other for ever."""
    of_a_call = plan.ranks, plan.kernels, plan.problem, *shards
    out, logsumexp = ring_forward(*of_a_call)
    gradients = ring_backward(*of_a_call, out, logsumexp, grad_out)
    return {"out": out} | {name: grad.to(out.dtype) for name, grad in zip(NAMES, gradients, strict=True)}


def gradient_of_out(q: Tensor) -> Tensor:
    return torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)


def check_ring(
    ranks: int, inputs: tuple[Tensor, ...], *, units: float = 16, head_chunk=None, backend="triton", **options
) -> None:
    """Out and gradients on simulated ranks are, to so many units of rounding, those of one call in float64."""
    q, grad_out = inputs[0], gradient_of_out(inputs[0])
    doubles = {name: x.double() for name, x in zip(NAMES, inputs, strict=True)}
    whole = value_and_gradients(conv_attention_reference, doubles, grad_out.double(), **options)
    found = ring(ranks, inputs, grad_out, head_chunk=head_chunk, backend=backend, **options)
    for rank, got in enumerate(found):
        for name, x in got.items():
            want = whole[name] if name == "weight" else shard(whole[name], rank, ranks)
            assert x.dtype == q.dtype
            error = relative_error(x, want)
            assert error < units * torch.finfo(q.dtype).eps, (rank, name, error)


def test_two_ranks() -> None:
    check_ring(2, make(1, 1, 1, 68, 16, (6, 11)))


def test_not_causal() -> None:
    check_ring(1, make(1, 1, 1, 34, 16, (6, 11)), causal=False)


def test_long_chunks_have_tiles_of_whole_blocks(monkeypatch) -> None:
    monkeypatch.setattr(tiling, "LONG", 16)
    monkeypatch.setattr(tiling, "BLOCK", 16)
    check_ring(1, make(1, 1, 1, 64, 16, (6, 11)))


@pytest.mark.parametrize(
    ("taps", "pad_key"), [((6, 11), "right"), ((3, 4), "left"), ((7, 2), "both"), ((1, 5), "left")]
)
def test_taps_and_pads(taps: tuple[int, int], pad_key: str) -> None:
    check_ring(1, make(1, 1, 1, 46, 16, taps), pad_key=pad_key)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_precision_and_grouped_heads_in_parts(dtype: torch.dtype) -> None:
    check_ring(1, make(1, 2, 1, 26, 24, (3, 6), dtype), head_chunk=1)


@pytest.fixture
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Hopper's kernels run here, with NaN in whatever they do not write; gives the emulator, if it is used."""
    poison_memory(monkeypatch)
    return None if ON_HOPPER else request.getfixturevalue("emulator")


BF16, FP16 = torch.bfloat16, torch.float16
OF_HOPPER = {"backend": "hopper", "units": 0.75}


@pytest.mark.parametrize(
    ("ranks", "shape", "taps", "options"),
    [
        (2, (1, 2, 1, 332, 64), (6, 11), {}),
        (2, (1, 1, 1, 172, 128), (6, 11), {"pad_key": "right"}),
        (2, (2, 2, 1, 140, 40), (3, 4), {"pad_key": "left", "causal": False}),
        (1, (1, 4, 2, 108, 64), (6, 11), {"head_chunk": 1}),
        (3, (1, 1, 1, 120, 16), (1, 5), {"pad_key": "left"}),
        (1, (1, 1, 1, 130, 96), (8, 17), {"pad_key": "right"}),
        (1, (1, 1, 1, 90, 16), (1, 1), {}),
    ],
    ids=str,
)
def test_by_hopper_s_kernels(hopper, ranks: int, shape: tuple[int, ...], taps: tuple[int, int], options) -> None:
    check_ring(ranks, make(*shape, taps, BF16), **OF_HOPPER, **options)


def test_by_hopper_s_kernels_with_tiles_of_whole_blocks(hopper, monkeypatch) -> None:
    monkeypatch.setattr(tiling, "LONG", 64)
    monkeypatch.setattr(tiling, "BLOCK", 32)
    check_ring(2, make(1, 1, 1, 360, 16, (6, 11), FP16), **OF_HOPPER | {"units": 3})


@pytest.mark.parametrize(("causal", "scale", "units"), [(True, 1e-6, 0.75), (False, None, 8)])
def test_rows_that_hopper_computes_in_float32(hopper, causal: bool, scale: float | None, units: float) -> None:
    """Huge queries and keys, in chunks of 40 rows and in their margins.

    Their scores overflow fp16; without a tiny scale most are far beyond what a float32 logsumexp has digits for.
    """
    q, k, v, weight = make(1, 2, 1, 160, 64, (6, 11), BF16)
    q[:, :, [0, 36, 41, 79, 120, 159]] *= 300
    k[:, :, [3, 38, 40, 81, 116]] *= 300
    check_ring(2, (q, k, v, weight), causal=causal, scale=scale, backend="hopper", units=units)


def test_huge_values_in_another_chunk_cost_no_range(hopper) -> None:
    """A row's delta is then far beyond what the values of a tile bound it by."""
    q, k, v, weight = make(1, 1, 1, 160, 64, (6, 11), BF16)
    v[:, :, :30] *= 1000
    check_ring(2, (q, k, v, weight), **OF_HOPPER)


def test_no_rank_sees_the_future(hopper) -> None:
    """Nor does a gradient of a row that no later token looks back on."""
    inputs, end = make(1, 1, 1, 200, 64, (6, 11), BF16), 130
    found = []
    for factor in (1, -7):
        q, k, v, weight = (x.clone() for x in inputs)
        grad_out = gradient_of_out(q)
        for x in (q, k, v, grad_out):
            x[:, :, end:] *= factor
        found.append(ring(2, (q, k, v, weight), grad_out, backend="hopper"))
    for name, rows in (("out", end), ("q", end - 5)):
        for rank, (first, second) in enumerate(zip(*found, strict=True)):
            seen = torch.cat([torch.arange(50 * chunk, 50 * chunk + 50) for chunk in chunks_of(rank, 2)]) < rows
            assert torch.equal(first[name][:, :, seen], second[name][:, :, seen]), name


def test_the_order_of_threads_changes_nothing(hopper) -> None:
    inputs, found = make(1, 1, 1, 140, 64, (6, 11), BF16), []
    for seed in (0, 1):
        if hopper:
            hopper.seed = seed
        found.append(ring(2, inputs, gradient_of_out(inputs[0]), backend="hopper"))
    for first, second in zip(*found, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("taps", "pad_key", "kv_heads"), [((6, 11), "both", 1), ((6, 11), "right", 2), ((3, 4), "left", 2)]
)
def test_decode(taps: tuple[int, int], pad_key: str, kv_heads: int) -> None:
    capacity, lengths = 60, torch.tensor([60, 33, 3], device=DEVICE)
    q, k, v, weight = make(3, 2, kv_heads, capacity, 16, taps)
    window = q[:, :, : taps[0]]
    want = conv_attention_decode_reference(
        window.double(), k.double(), v.double(), weight.double(), lengths=lengths, pad_key=pad_key
    )

    def of_a_rank(simulated) -> Tensor:
        at = cache_positions(simulated.rank, 2, capacity, key_taps=taps[1], pad_key=pad_key)
        caches = (x[:, :, at.start : at.stop] for x in (k, v))
        operation = Operation.of(taps, 16, pad_key=pad_key)
        return decode_over_ranks(operation, simulated, window, *caches, weight, lengths=lengths, backend="triton")

    first, second = run_ranks(2, of_a_rank)
    assert torch.equal(first, second)
    assert relative_error(first, want) < 2e-6
