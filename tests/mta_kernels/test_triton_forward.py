"""The Triton forward against float64: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import DEVICE, DTYPES, RANGES, assert_close, make, make_in_range, poison_memory, relative_error

from mta_kernels import gpu_limits
from mta_kernels.attention import attention_reference
from mta_kernels.conv_attention import (
    conv_attention,
    conv_attention_decode,
    conv_attention_reference,
    explain,
    identity_weight,
)
from mta_kernels.conv_attention.triton import forward


def triton_forward(*inputs, **options):
    return conv_attention(*inputs, **options, backend="triton")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


@pytest.mark.parametrize(
    "taps", [(1, 1), (2, 9), (3, 3), (6, 11), (7, 7), (4, 6), (11, 3)], ids=lambda t: f"{t[0]}x{t[1]}"
)
@pytest.mark.parametrize("seq_len", [1, 5, 33, 150])
def test_taps_and_lengths(taps: tuple[int, int], seq_len: int) -> None:
    q, k, v, weight = make(1, 2, 1, seq_len, 40, taps)
    for causal in (True, False):
        assert_close(triton_forward(q, k, v, weight, causal=causal), q, k, v, weight, causal=causal)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    list(zip([16, 17, 40, 64, 80, 96, 128, 256, 256], itertools.cycle(DTYPES), strict=False)),
    ids=str,
)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v, weight = make(2, 2, 2, 70, head_dim, (6, 11), dtype)
    assert_close(triton_forward(q, k, v, weight), q, k, v, weight)


TAPS = [(2, 9), (4, 6), (11, 3), (1, 4), (5, 1), (16, 31)]


@pytest.mark.parametrize(
    ("taps", "pad_key", "causal"),
    [(*of, n % 2 == 0) for n, of in enumerate(itertools.product(TAPS, ("both", "left", "right")))],
    ids=str,
)
def test_key_paddings(taps: tuple[int, int], pad_key: str, causal: bool) -> None:
    q, k, v, weight = make(1, 4, 2, 67, 24, taps)
    options = {"pad_key": pad_key, "causal": causal}
    assert_close(triton_forward(q, k, v, weight, **options), q, k, v, weight, **options)


@pytest.mark.parametrize("override", ["sm80", ""], ids=["pointers", "descriptors"])
def test_tiles_of_every_gpu(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of older GPUs, and the ones without queries kept on the chip, compute the same."""
    seen, launch = set(), forward.launch
    monkeypatch.setattr(forward, "launch", lambda *a, **x: (seen.add(x["HOST_DESCRIPTORS"]), launch(*a, **x)))
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", override)
    for dtype in DTYPES:
        for head_dim, taps in ((64, (6, 11)), (96, (7, 7)), (200, (6, 11))):
            q, k, v, weight = make(1, 2, 2, 150, head_dim, taps, dtype)
            assert_close(triton_forward(q, k, v, weight), q, k, v, weight)
    assert seen == {gpu_limits.compiled_capability(torch.device(DEVICE)) >= (9, 0)}
    assert gpu_limits.compiled_capability(torch.device(DEVICE)) == (8, 0) or not override


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_and_float32_weight(dtype: torch.dtype) -> None:
    q, k, v, weight = make(1, 2, 2, 65, 48, (6, 11), dtype)
    weight = weight.float() * 1.001
    assert_close(triton_forward(q, k, v, weight, scale=0.3), q, k, v, weight, scale=0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores(dtype: torch.dtype) -> None:
    q, k, v, weight = make(1, 2, 2, 100, 64, (6, 11), dtype, magnitude=30.0)
    out = triton_forward(q, k, v, weight)
    assert torch.isfinite(out).all()
    assert_close(out, q, k, v, weight)


@pytest.mark.parametrize("taps", [(3, 5), (5, 3)], ids=["keys folded", "queries folded"])
@pytest.mark.parametrize("kind", RANGES)
def test_range_of_fp16(kind: str, taps: tuple[int, int]) -> None:
    *inputs, scale = make_in_range(kind, taps)
    for causal in (True, False):
        got = triton_forward(*inputs, scale=scale, causal=causal)
        exact = conv_attention_reference(*(x.double() for x in inputs), scale=scale, causal=causal)
        assert relative_error(got, exact) < 2e-3


def test_very_negative_scores() -> None:
    """Every true score far below zero: a masked zero must not win the softmax."""
    q, k, v, weight = make(1, 1, 1, 70, 32, (2, 3))
    q, k = q.abs() * 5, -k.abs() * 5
    weight = weight.abs() + 0.1
    for causal in (True, False):
        exact = conv_attention_reference(*(x.double() for x in (q, k, v, weight)), causal=causal)
        assert relative_error(triton_forward(q, k, v, weight, causal=causal), exact) < 1e-5


def test_all_equal_scores_average_the_values() -> None:
    q, k, v, _ = make(1, 1, 1, 70, 32, (1, 1))
    weight = torch.ones(1, 1, 1, device=DEVICE)
    out = triton_forward(torch.zeros_like(q), k, v, weight)
    count = torch.arange(1, 71, device=DEVICE)[:, None]
    torch.testing.assert_close(out[0, 0], v[0, 0].cumsum(0) / count, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("taps", [(6, 11), (3, 2)])
def test_identity_weight_is_plain_attention(taps: tuple[int, int]) -> None:
    q, k, v, _ = make(1, 4, 2, 130, 64, taps)
    weight = identity_weight(4, *taps, device=DEVICE)
    plain = attention_reference(q.double(), k.double(), v.double())
    assert relative_error(triton_forward(q, k, v, weight), plain) < 1e-6


@pytest.mark.parametrize(
    ("taps", "dtype"), list(zip([(6, 11), (11, 3), (2, 9)], itertools.cycle(DTYPES), strict=False)), ids=str
)
def test_the_future_changes_nothing(taps: tuple[int, int], dtype: torch.dtype) -> None:
    """Bit for bit, whatever the later tokens hold."""
    q, k, v, weight = make(1, 2, 1, 140, 32, taps, dtype)
    before = triton_forward(q, k, v, weight)
    for token in (0, 1, 62, 63, 64, 100):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, token + 1 :] = 60 - 7 * x[:, :, token + 1 :]
        after = triton_forward(*changed, weight)
        assert torch.equal(before[:, :, : token + 1], after[:, :, : token + 1])


def test_slices_are_independent() -> None:
    q, k, v, weight = make(2, 4, 2, 66, 32, (4, 6))
    whole = triton_forward(q, k, v, weight)
    assert torch.equal(whole[1:], triton_forward(q[1:], k[1:], v[1:], weight))
    assert torch.equal(whole[:, 2:], triton_forward(q[:, 2:], k[:, 1:], v[:, 1:], weight[2:]))
    k, v = k.clone(), v.clone()
    k[0], v[0] = float("nan"), float("inf")
    assert torch.equal(whole[1], triton_forward(q, k, v, weight)[1])


def test_outputs_lie_within_the_values() -> None:
    q, k, v, weight = make(1, 2, 2, 100, 32, (6, 11))
    out = triton_forward(q, k, v, weight)
    assert (out <= v.amax(2, keepdim=True) + 1e-5).all()
    assert (out >= v.amin(2, keepdim=True) - 1e-5).all()


def test_decode_is_a_row_of_the_forward() -> None:
    q, k, v, weight = make(1, 2, 1, 40, 32, (4, 6))
    whole = triton_forward(q, k, v, weight)
    for length in (1, 3, 40):
        row = conv_attention_decode(
            q[:, :, max(0, length - 4) : length],
            k,
            v,
            weight,
            lengths=torch.full((1,), length, device=DEVICE),
        )
        torch.testing.assert_close(row[:, :, 0], whole[:, :, length - 1], atol=1e-5, rtol=1e-4)


def test_any_strides() -> None:
    q, k, v, weight = make(2, 4, 2, 37, 48, (6, 11))
    want = triton_forward(q, k, v, weight)

    def token_major(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def dim_major(x):
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    def every_other(x):
        return torch.stack([x, x + 1], -1)[..., 0]

    def off_by_one(x):
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)

    for change in (token_major, dim_major, every_other, off_by_one):
        assert torch.equal(triton_forward(*(change(x) for x in (q, k, v)), weight), want), change.__name__
    assert torch.equal(triton_forward(q, k, v, weight.transpose(1, 2).contiguous().transpose(1, 2)), want)
    same = v[:1].expand(2, -1, -1, -1)
    assert torch.equal(triton_forward(q, k, same, weight), triton_forward(q, k, same.contiguous(), weight))


@pytest.mark.slow
def test_strides_over_two_billion_elements() -> None:
    """Rows so far apart that a 32-bit offset would wrap; the memory between them is never touched."""
    q, k, v, weight = make(1, 1, 1, 4, 16, (2, 3), torch.float16)
    stride = 2**30 + 8
    far = []
    for x in (q, k, v):
        big = torch.empty_strided((1, 1, 4, 16), (4 * stride, 4 * stride, stride, 1), dtype=x.dtype, device=DEVICE)
        far.append(big.copy_(x))
    assert torch.equal(triton_forward(*far, weight), triton_forward(q, k, v, weight))


def test_gradients_are_those_of_the_reference() -> None:
    inputs = [x.requires_grad_() for x in make(1, 2, 1, 33, 16, (3, 4))]
    grad = torch.randn_like(inputs[0])
    got = torch.autograd.grad(triton_forward(*inputs), inputs, grad)
    want = torch.autograd.grad(conv_attention_reference(*inputs), inputs, grad)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    q, k, v, weight = (x.detach() for x in inputs)
    (only,) = torch.autograd.grad(triton_forward(q, k, v.requires_grad_(), weight), [v], grad)
    torch.testing.assert_close(only, want[2], atol=1e-5, rtol=1e-4)


def test_auto_picks_triton_here() -> None:
    q, k, v, weight = make(1, 1, 1, 8, 16, (2, 2))
    assert explain(q, k, v, weight).backend == "triton"
    assert torch.equal(conv_attention(q, k, v, weight), triton_forward(q, k, v, weight))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    seq_len=st.integers(1, 90),
    head_dim=st.integers(16, 72),
    taps=st.tuples(st.integers(1, 16), st.integers(1, 31)),
    causal=st.booleans(),
    pad_key=st.sampled_from(["both", "left", "right"]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape(heads, seq_len, head_dim, taps, causal, pad_key, dtype) -> None:
    q, k, v, weight = make(1, *heads, seq_len, head_dim, taps, dtype)
    options = {"causal": causal, "pad_key": pad_key}
    assert_close(triton_forward(q, k, v, weight, **options), q, k, v, weight, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_repeated_call_gives_the_same_bits(head_dim: int) -> None:
    """At other addresses, on another stream, in a CUDA graph, with gradients; `head_chunk` has the operator called."""

    def case(seed: int) -> list[torch.Tensor]:
        return list(make(2, 4, 2, 300, head_dim, (6, 11), torch.bfloat16, seed=seed))

    cases = [case(seed) for seed in range(5)]
    wanted = [triton_forward(*inputs, head_chunk=4) for inputs in cases]
    for inputs, want in zip(cases, wanted, strict=True):
        assert torch.equal(triton_forward(*inputs), want)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [triton_forward(*inputs) for inputs in cases]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_forward(*cases[0])
    for inputs, want, got in zip(cases, wanted, found, strict=True):
        assert torch.equal(got, want)
        for x, y in zip(cases[0], inputs, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(captured, want)

    def gradients(inputs: list[torch.Tensor], **options) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        triton_forward(*leaves, **options).square().sum().backward()
        return [x.grad for x in leaves]

    for inputs in cases[1:]:
        for got, want in zip(gradients(inputs), gradients(inputs, head_chunk=4), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("taps", [(3, 5), (4, 2)], ids=str)
def test_a_huge_token_changes_no_row_that_does_not_see_it(taps: tuple[int, int]) -> None:
    q, k, v, weight = make(1, 2, 1, 80, 16, taps)
    packed = {"cu_seqlens": torch.tensor([0, 20, 50, 60, 80], device=DEVICE)}

    def run(**options) -> torch.Tensor:
        return conv_attention(q, k, v, weight, backend="triton", **options)

    before, before_packed = run(), run(**packed)
    q[:, :, 56] *= 1e8
    k[:, :, 55] *= 1e30
    got, got_packed = run(), run(**packed)
    assert torch.equal(got[:, :, :55], before[:, :, :55])
    assert torch.equal(got_packed[:, :, :50], before_packed[:, :, :50])
    assert torch.equal(got_packed[:, :, 60:], before_packed[:, :, 60:])
