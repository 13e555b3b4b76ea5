"""The eager reference of the whole multi-token attention, compared with loops over its definition, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mta_kernels.conv_attention import conv_attention, conv_attention_reference, identity_weight
from mta_kernels.conv_attention.arguments import documents_of
from mta_kernels.multi_token_attention import multi_token_attention, multi_token_attention_reference
from mta_kernels.multi_token_attention.dropout import kept, seed_tensor
from mta_kernels.multi_token_attention.mixers import dense_mixing
from mta_ladder import attention_reference

PARTS = ("pre_conv", "pre_mix", "post_conv", "post_mix", "norm", "gate")


def parts_of(names, heads: int, head_dim: int, *, taps=(2, 3), post_taps=(3, 2), groups: int = 1) -> dict[str, Any]:
    """Random tensors of the parts, near the identity where they mix."""

    def near(x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn_like(x)

    wide = {"dtype": torch.float64}
    size = heads // groups
    mixing = torch.eye(size, **wide).repeat(groups, 1, 1)
    every: dict[str, dict[str, Any]] = {
        "pre_conv": {"pre_conv": near(identity_weight(heads, *taps, **wide))},
        "pre_mix": {"pre_mix": near(mixing if groups > 1 else mixing[0])},
        "post_conv": {"post_conv": near(identity_weight(heads, *post_taps, **wide))},
        "post_mix": {"post_mix": near(mixing)},
        "norm": {"norm_weight": near(torch.ones(head_dim, **wide)), "depth": 3},
        "gate": {"gate_weight": torch.randn(1, head_dim, **wide), "gate_bias": torch.randn(1, **wide)},
    }
    return {key: x for name in names for key, x in every[name].items()}


def make(batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    shapes = [(batch, n, tokens, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def convolved(x: list[list[float]], taps: Tensor, pad: int) -> list[list[float]]:
    n, (query_taps, key_taps) = len(x), taps.shape
    out = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            for a in range(query_taps):
                for t in range(key_taps):
                    y, z = i - (query_taps - 1) + a, j - pad + t
                    if 0 <= y < n and 0 <= z < n:
                        out[i][j] += float(taps[a, t]) * x[y][z]
    return out


def by_loops(
    q, k, v, *, causal, scale, pad_key, pre_conv=None, pre_mix=None, post_conv=None, post_mix=None, norm_weight=None,
    depth=None, gate_weight=None, gate_bias=None,
):  # fmt: skip
    """Steps 1 to 9 of the definition, a number at a time."""
    batch, heads, n, head_dim = q.shape
    out = torch.zeros_like(q)

    def hidden(i: int, j: int) -> bool:
        return causal and j > i

    def masked(x, by):
        return [[by if hidden(i, j) else x[i][j] for j in range(n)] for i in range(n)]

    def pad(taps: Tensor) -> int:
        key_taps = taps.shape[-1]
        return {"both": (key_taps - 1) // 2, "left": key_taps - 1, "right": 0}[pad_key]

    def mixed(x, weight_of):
        """Each head a sum of all heads, `weight_of(head out, head in)`."""
        return [
            [[sum(weight_of(h, g) * x[g][i][j] for g in range(heads)) for j in range(n)] for i in range(n)]
            for h in range(heads)
        ]

    def entry(mix: Tensor, a: int, b: int) -> float:
        if mix.dim() == 2:
            return float(mix[a, b])
        size = mix.shape[1]
        return float(mix[a // size, a % size, b % size]) if a // size == b // size else 0.0

    for b in range(batch):
        x = []
        for h in range(heads):
            keys = k[b, h // (heads // k.shape[1])]
            scores = masked([[scale * float(q[b, h, i] @ keys[j]) for j in range(n)] for i in range(n)], 0.0)
            x.append(scores if pre_conv is None else convolved(scores, pre_conv[h], pad(pre_conv)))
        if pre_mix is not None:
            x = mixed(x, lambda h, g: entry(pre_mix, h, g))
        for h in range(heads):
            x[h] = torch.softmax(torch.tensor(masked(x[h], -math.inf), dtype=torch.float64), 1).tolist()
            if post_conv is not None:
                x[h] = masked(convolved(x[h], post_conv[h], pad(post_conv)), 0.0)
        if post_mix is not None:
            x = mixed(x, lambda h, g: entry(post_mix, g, h))
        for h in range(heads):
            out[b, h] = torch.tensor(x[h], dtype=torch.float64) @ v[b, h // (heads // k.shape[1])]
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, n))).tolist():
        row = out[b, h, i]
        if norm_weight is not None:
            size = math.sqrt(float(row @ row) / head_dim + 1e-5)
            row = row / size * norm_weight * (1 if depth is None else 0.2 + 0.6 * math.exp(-0.3 * depth))
        if gate_weight is not None:
            gate = gate_weight @ row + gate_bias
            row = row / (1 + torch.exp(-gate))
        out[b, h, i] = row
    return out


@settings(max_examples=40)
@given(
    names=st.sets(st.sampled_from(PARTS)),
    heads=st.sampled_from([(2, 1, 1), (4, 2, 2), (3, 3, 1)]),  # query heads, KV heads, groups of the mixings
    tokens=st.integers(1, 5),
    taps=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    causal=st.booleans(),
    pad_key=st.sampled_from(["both", "left", "right"]),
)
def test_is_the_definition(names, heads, tokens, taps, causal, pad_key) -> None:
    query_heads, kv_heads, groups = heads
    q, k, v = make(1, query_heads, kv_heads, tokens, 3)
    parts = parts_of(names, query_heads, 3, taps=taps, groups=groups)
    options = {"causal": causal, "scale": 0.7, "pad_key": pad_key}
    got = multi_token_attention_reference(q, k, v, **parts, **options)
    torch.testing.assert_close(got, by_loops(q, k, v, **parts, **options), rtol=1e-12, atol=1e-12)


def test_the_gate_of_every_number() -> None:
    q, k, v = make(1, 2, 2, 4, 3)
    gate = {"gate_weight": torch.randn(3, 3, dtype=torch.float64), "gate_bias": torch.randn(3, dtype=torch.float64)}
    options = {"causal": True, "scale": 1.0, "pad_key": "both"}
    got = multi_token_attention_reference(q, k, v, **gate, **options)
    torch.testing.assert_close(got, by_loops(q, k, v, **gate, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("names", [PARTS, ("pre_mix", "post_mix"), ("post_conv",)], ids="+".join)
def test_gradients_are_derivatives(names) -> None:
    inputs = make(1, 2, 1, 4, 2)
    parts = parts_of(names, 2, 2)
    tensors = {name: x for name, x in parts.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in parts.items() if not isinstance(x, Tensor)}

    def run(q, k, v, *mixers):
        return multi_token_attention_reference(
            q, k, v, **dict(zip(tensors, mixers, strict=True)), **others, dropout=0.3, seed=1
        )

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in (*inputs, *tensors.values())])


def test_identity_is_plain_attention() -> None:
    q, k, v = make(2, 4, 2, 9, 8)
    wide = {"dtype": torch.float64}
    got = multi_token_attention_reference(
        q, k, v, pre_conv=identity_weight(4, 3, 5, **wide), pre_mix=torch.eye(4, **wide),
        post_conv=identity_weight(4, 2, 4, **wide), post_mix=torch.eye(2, **wide).repeat(2, 1, 1),
    )  # fmt: skip
    torch.testing.assert_close(got, attention_reference(q, k, v))
    torch.testing.assert_close(multi_token_attention_reference(q, k, v), attention_reference(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_first_convolution_alone_is_conv_attention(dtype) -> None:
    q, k, v = (x.to(dtype) for x in make(1, 4, 2, 13, 8))
    weight = torch.randn(4, 3, 5).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    pads = [{"pad_key": pad_key} for pad_key in ("both", "left", "right")]
    for options in ({"causal": False}, *pads, {"cu_seqlens": torch.tensor([0, 5, 13])}):
        want = conv_attention_reference(q, k, v, weight, **options)
        torch.testing.assert_close(multi_token_attention_reference(q, k, v, pre_conv=weight, **options), want)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_and_chunks_are_rows_of_the_whole(causal, dropout) -> None:
    q, k, v = make(2, 4, 2, 12, 8)
    options = {**parts_of(PARTS, 4, 8), "causal": causal, "dropout": dropout, "seed": 5}
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
