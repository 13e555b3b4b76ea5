"""How ranks divide the scores, and the Triton kernels on such tiles, with ranks that are threads of one process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from kernel_inputs import DTYPES, make, relative_error, value_and_gradients
from simulated_ranks import run_ranks
from torch import Tensor

from mta_kernels.conv_attention import conv_attention_decode_reference, conv_attention_reference
from mta_kernels.conv_attention.context_parallel import cache_positions
from mta_kernels.conv_attention.context_parallel import tiles as tiling
from mta_kernels.conv_attention.context_parallel.attention import make_plan, over_ranks
from mta_kernels.conv_attention.context_parallel.decode import decode_over_ranks
from mta_kernels.conv_attention.context_parallel.layout import chunks_of
from mta_kernels.conv_attention.context_parallel.tiles import Problem, tiles
from mta_kernels.operation import key_padding

NAMES = ("q", "k", "v", "weight")
PADS = ("both", "left", "right")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("taps", [(6, 11), (1, 1), (7, 2), (1, 6)])
@pytest.mark.parametrize("causal", [True, False])
def test_every_score_is_in_one_tile_and_masks_are_on_the_diagonal_alone(ranks, taps, causal, monkeypatch) -> None:
    monkeypatch.setattr(tiling, "LONG", 40)
    monkeypatch.setattr(tiling, "BLOCK", 32)
    for pad_key, rows in product(PADS, (sum(taps) - 1, 64)):
        problem = Problem(rows, causal, 1.0, key_padding(taps[1], pad_key), *taps)
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
                        assert (back[queries, keys] >= taps[0] - 1 + taps[1] - 1 - problem.pad).all()
                    assert rows != 64 or (keys.stop - keys.start) % 32 == 0
        assert (count[back >= 0] == 1).all()
        assert (count[back < 0] == 1).all() or causal


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_causal_work_is_the_same_on_every_rank_at_every_step(ranks) -> None:
    problem = Problem(8, True, 1.0, 0, 1, 1)
    for step in range(1, ranks):
        work = {len(list(tiles(problem, rank, (rank - step) % ranks, ranks))) for rank in range(ranks)}
        assert work == {2}


def shard(x: Tensor, rank: int, ranks: int) -> Tensor:
    chunks = x.chunk(2 * ranks, 2)
    return torch.cat([chunks[chunk] for chunk in chunks_of(rank, ranks)], 2)


def check_ring(ranks: int, inputs: tuple[Tensor, ...], *, causal=True, pad_key="both", head_chunk=None) -> None:
    """Out and gradients by Triton's kernels on simulated ranks, against one call in float64."""
    q, *_, weight = inputs
    grad_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    doubles = {name: x.double() for name, x in zip(NAMES, inputs, strict=True)}
    options = {"causal": causal, "pad_key": pad_key}
    whole = value_and_gradients(conv_attention_reference, doubles, grad_out.double(), **options)

    def of_a_rank(simulated) -> dict[str, Tensor]:
        shards = [x if x is weight else shard(x, simulated.rank, ranks) for x in inputs]
        plan = make_plan(shards[0], weight, simulated, causal, None, pad_key, head_chunk, "triton")
        leaves = dict(zip(NAMES, shards, strict=True))
        return value_and_gradients(over_ranks, leaves, shard(grad_out, simulated.rank, ranks), plan=plan)

    tolerance = 16 * torch.finfo(q.dtype).eps
    for rank, got in enumerate(run_ranks(ranks, of_a_rank)):
        for name, x in got.items():
            want = whole[name] if name == "weight" else shard(whole[name], rank, ranks)
            assert x.dtype == q.dtype
            assert relative_error(x, want) < tolerance, (rank, name, relative_error(x, want))


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


@pytest.mark.parametrize(
    ("taps", "pad_key", "kv_heads"), [((6, 11), "both", 1), ((6, 11), "right", 2), ((3, 4), "left", 2)]
)
def test_decode(taps: tuple[int, int], pad_key: str, kv_heads: int) -> None:
    capacity, lengths = 60, torch.tensor([60, 33, 3])
    q, k, v, weight = (x.cpu() for x in make(3, 2, kv_heads, capacity, 16, taps))
    window = q[:, :, : taps[0]]
    want = conv_attention_decode_reference(
        window.double(), k.double(), v.double(), weight.double(), lengths=lengths, pad_key=pad_key
    )

    def of_a_rank(simulated) -> Tensor:
        at = cache_positions(simulated.rank, 2, capacity, key_taps=taps[1], pad_key=pad_key)
        caches = (x[:, :, at.start : at.stop] for x in (k, v))
        options = {"lengths": lengths, "scale": None, "pad_key": pad_key, "backend": "triton"}
        return decode_over_ranks(simulated, window, *caches, weight, **options)

    first, second = run_ranks(2, of_a_rank)
    assert torch.equal(first, second)
    assert relative_error(first, want) < 2e-6
