"""The eager reference of the whole multi-token attention: rows, chunks and dropout, in float64.

`test_fuzz` and tests/conformance compare its values and gradients with the definition.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mta_kernels.conv_attention import conv_attention
from mta_kernels.conv_attention.arguments import documents_of
from mta_kernels.multi_token_attention import multi_token_attention, multi_token_attention_reference
from mta_kernels.multi_token_attention.dropout import kept, seed_tensor
from mta_kernels.multi_token_attention.mixers import dense_mixing


def make(batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    shapes = [(batch, n, tokens, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_and_chunks_are_rows_of_the_whole(causal, dropout) -> None:
    q, k, v = make(2, 4, 2, 12, 8)
    normal = partial(torch.randn, dtype=torch.float64)
    mixers = {"pre_conv": normal(4, 2, 3), "pre_mix": normal(4, 4), "post_conv": normal(4, 3, 2)}
    after = {"post_mix": normal(2, 2, 2), "norm_weight": normal(8), "gate_weight": normal(1, 8), "gate_bias": normal(1)}
    options = {**mixers, **after, "depth": 3, "causal": causal, "dropout": dropout, "seed": 5}
    whole = multi_token_attention_reference(q, k, v, **options)
    for start, stop in ((0, 1), (0, 12), (1, 4), (3, 5), (9, 12)):
        got = multi_token_attention_reference(q, k, v, **options, rows=(start, stop))
        torch.testing.assert_close(got, whole[:, :, start:stop], rtol=1e-12, atol=1e-12)
    for start in (1, 2, 3, 8):
        chunk = {"q_history": q[:, :, max(0, start - 3) : start]}  # 2 and 3 query taps look back on 3 queries
        got = multi_token_attention_reference(q[:, :, start:], k, v, **options, **chunk)
        torch.testing.assert_close(got, whole[:, :, start:], rtol=1e-12, atol=1e-12)


def test_logits_of_16_bits_are_summed_in_more() -> None:
    q, k, v = (torch.zeros(1, 1, 4096, 2, dtype=torch.bfloat16) for _ in range(3))
    v += 1
    last = multi_token_attention_reference(q, k, v, rows=(4095, 4096))
    assert torch.equal(last, v[:, :, :1])


def test_a_dropped_share_is_what_was_asked_for() -> None:
    seed = seed_tensor(3, torch.device("cpu"))
    stays = kept(0.25, seed, 2, 4, (0, 100), (0, 100))
    assert abs(stays.float().mean() - 0.75) < 0.01
    for axis in range(4):  # no two heads, rows or columns drop the same
        assert len(stays.movedim(axis, 0).flatten(1).unique(dim=0)) == stays.shape[axis]
    assert torch.equal(stays[:, :, 5:9, 7:], kept(0.25, seed, 2, 4, (5, 9), (7, 100)))
    assert not torch.equal(stays, kept(0.25, seed_tensor(4, torch.device("cpu")), 2, 4, (0, 100), (0, 100)))


def test_random_numbers_are_those_of_splitmix64() -> None:
    """The first numbers of the published generator with seed 1234567, of which this takes the upper 53 bits."""
    from mta_kernels.multi_token_attention.dropout import _STEP, _scrambled

    state = torch.tensor(1234567) + torch.arange(1, 4) * _STEP
    assert [x % 2**64 for x in _scrambled(state).tolist()] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


def test_dropout_keeps_the_mean_and_needs_no_seed() -> None:
    q, k, v = make(1, 2, 2, 6, 4)
    v = torch.ones_like(v)
    torch.manual_seed(0)
    outs = torch.stack([multi_token_attention_reference(q, k, v, dropout=0.5) for _ in range(200)])
    torch.testing.assert_close(outs.mean(0), v, rtol=0, atol=0.35)
    assert not torch.equal(outs[0], outs[1])
    torch.manual_seed(0)
    assert torch.equal(multi_token_attention_reference(q, k, v, dropout=0.5), outs[0])


def test_groups_are_blocks_on_the_diagonal() -> None:
    groups = torch.randn(3, 2, 2)
    assert torch.equal(dense_mixing(groups), torch.block_diag(*groups))
    assert torch.equal(dense_mixing(groups[:1]), groups[0])


def test_packed_rows_are_read_outside_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What captures or compiles a whole graph gets a sentence; a compiler that may break its graph gets the result."""
    bounds = torch.tensor([0, 5, 5, 8])
    q, weight = torch.randn(1, 2, 8, 4), torch.randn(2, 2, 3)

    def conv(q: Tensor, bounds: Tensor) -> Tensor:
        return conv_attention(q, q, q, weight, cu_seqlens=bounds, backend="reference")

    def mta(q: Tensor, bounds: Tensor) -> Tensor:
        return multi_token_attention(q, q, q, pre_conv=weight, cu_seqlens=bounds, backend="reference")

    for function in (conv, mta):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True, or take a fused backend"):
            torch.compile(function, backend="eager", fullgraph=True)(q, bounds)
        assert torch.equal(torch.compile(function, backend="eager")(q, bounds), function(q, bounds))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mta(q, bounds)  # numbers in the host's memory may be read
    with FakeTensorMode():
        there = torch.empty(4, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="which a CUDA graph cannot capture; take a fused backend"):
        documents_of(there)
