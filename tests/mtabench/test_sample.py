"""Which heads and rows are compared: bounded in number, whole groups, drawn from a seed, ends and borders always."""

from dataclasses import replace

import pytest
import torch
from changed_cases import with_changes

from mta_kernels.operation import Operation
from mtabench.checking import sample
from mtabench.checking.sample import SCORES, SCORES_AT_ONCE, backward_sample, decode_sample, forward_sample
from mtabench.problem.case import Case
from mtabench.problem.inputs import make_inputs

H200 = Case("fwd", "eager", Operation.of((6, 11), 128), "bf16", 1, 16, 16, 16384, 128, None, "cpu")


def scores(case, sample):
    heads = sum(h.query_heads.numel() for h in sample.chunks)
    return heads * case.seq * sum(stop - start for start, stop in sample.blocks)


@pytest.mark.parametrize("seq", [1, 5, 64, 1000, 16384, 131072])
@pytest.mark.parametrize("kv_heads", [1, 4, 16])
def test_forward_work_is_bounded(seq, kv_heads):
    case = replace(H200, seq=seq, batch=max(1, 16384 // seq), kv_heads=kv_heads)
    samples = forward_sample(case, seq)
    # At least a block of rows of two groups, however long they are.
    least = 2 * 2 * 64 * 16 // kv_heads * seq
    assert sum(scores(case, s) for s in samples) <= 3 * max(SCORES["cpu"], least)
    for part in samples:
        rows = max(stop - start for start, stop in part.blocks)
        for heads in part.chunks:
            assert heads.query_heads.numel() * rows * seq <= max(SCORES_AT_ONCE["cpu"], 16 // kv_heads * seq)
        assert part.blocks[0][0] == 0
        assert part.blocks[-1][1] == seq
        assert all(a[1] <= b[0] for a, b in zip(part.blocks, part.blocks[1:], strict=False))


def test_all_of_a_small_case_is_taken():
    case = replace(H200, seq=64, batch=2, kv_heads=4)
    (sample,) = forward_sample(case, 0)
    assert scores(case, sample) == 2 * 16 * 64 * 64


def test_backward_takes_all_rows_of_the_same_heads_of_every_sequence():
    case = replace(H200, pass_="bwd", seq=256, batch=3, heads=8, kv_heads=4)
    sample = backward_sample(case, 0)
    assert sum(stop - start for start, stop in sample.blocks) == 256
    batch = torch.cat([h.batch for h in sample.chunks])
    kv_heads = torch.cat([h.kv_heads for h in sample.chunks])
    per_sequence = [kv_heads[batch == i].tolist() for i in range(3)]
    assert per_sequence[0] == per_sequence[1] == per_sequence[2]
    assert {0, 3} <= set(per_sequence[0])


def test_decode_takes_first_and_last_head():
    case = replace(H200, pass_="decode", seq=32768, batch=4)
    taken = torch.cat([torch.stack([h.batch, h.kv_heads], 1) for h in decode_sample(case, 0).chunks]).tolist()
    assert [0, 0] in taken
    assert [3, 15] in taken
    assert len(taken) < 64


def sampled_rows(case, seed, size=64):
    """Rows of the blocks of that size."""
    return {
        row
        for part in forward_sample(case, seed)
        for start, stop in part.blocks
        if stop - start <= size
        for row in range(start, stop)
    }


@pytest.mark.parametrize("seq", [1000, 4096, 16384])
def test_rows_are_drawn_anew_from_each_seed(seq):
    case = with_changes(H200, seq=seq, kv_heads=2, taps=(1, 1))
    drawn = [sampled_rows(case, seed) for seed in range(8)]
    assert drawn[0] == sampled_rows(case, 0)
    assert len(set(map(frozenset, drawn))) > 4
    border = 2048 if seq > 2048 else 128
    for rows in drawn:
        assert {0, seq - 1} <= rows
        assert any({border * i - 1, border * i} <= rows for i in range(1, seq // border + 1))


def test_any_row_and_head_may_be_drawn(monkeypatch):
    monkeypatch.setattr(sample, "SCORES", {"cpu": 2**20})
    case = replace(H200, seq=300, batch=2)
    assert set.union(*(sampled_rows(case, seed) for seed in range(100))) == set(range(300))
    chunks = [heads for seed in range(40) for heads in forward_sample(case, seed)[0].chunks]
    assert len({pair for h in chunks for pair in zip(h.batch.tolist(), h.kv_heads.tolist(), strict=True)}) == 32


def test_gathered_heads_are_those_of_the_inputs():
    case = replace(H200, pass_="bwd", seq=9, batch=2, heads=6, kv_heads=3, head_dim=4, dtype="fp32")
    inputs = make_inputs(case)
    (heads,) = backward_sample(case, 0).chunks
    gathered = heads.gather(inputs, torch.float64)
    # Group 4 of 6 is KV head 1 of sequence 1, with query heads 2 and 3.
    assert torch.equal(gathered.q[0, 8:10], inputs.q[1, 2:4].double())
    assert torch.equal(gathered.k[0, 4], inputs.k[1, 1].double())
    assert torch.equal(gathered.weight[8:10], inputs.weight[2:4].double())
    assert torch.equal(heads.picker("q", None)(inputs.q), gathered.q.flatten(0, 2).float())
    assert torch.equal(heads.picker("v", (2, 5))(inputs.v), gathered.v[:, :, 2:5].flatten(0, 2).float())
