"""The forward of multi-token attention by Triton's stages, against float64: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_inputs import DEVICE, DTYPES, poison_memory, with_gaps
from mta_inputs import Problem, assert_twice_eager, by_reference, forward, make, small_chunks

from mta_kernels import score_chunks
from mta_kernels.conv_attention import conv_attention
from mta_kernels.multi_token_attention import MultiTokenAttention, multi_token_attention, stages
from mta_kernels.multi_token_attention.backend import Request
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton import convolution, heads, products, rows
from mta_kernels.multi_token_attention.triton.backend import TRITON
from mta_kernels.operation import Convolution, Operation


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN; and chunks are short."""
    poison_memory(monkeypatch)
    small_chunks(monkeypatch)


@pytest.mark.skipif(DEVICE == "cuda", reason="the errors are chosen beside eager's on a CPU")
@pytest.mark.parametrize(
    ("at", "factor", "word"),
    [((), 1.0015, "out"), ((slice(None), 0), 1.0012, "head"), ((slice(None), slice(None), 10), 1.005, "rows")],
    ids=["all", "a head", "a row"],
)
def test_the_bound_sees(at: tuple, factor: float, word: str) -> None:
    """An error of one rounding of the dtype that all numbers or one head have, or of a few that one row has."""
    problem = make(2, 40, 16, torch.float16)
    out = by_reference(problem, torch.float16)["out"]
    assert_twice_eager({"out": out}, problem)
    out[at] *= factor
    with pytest.raises(AssertionError, match=word):
        assert_twice_eager({"out": out}, problem)


def check(problem: Problem) -> None:
    out, logsumexp = forward(problem)
    assert_twice_eager({"out": out}, problem)
    assert logsumexp.shape == problem.q.shape[:3]
    assert logsumexp.dtype == torch.float32
    assert torch.isfinite(logsumexp).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_mixing(dtype: torch.dtype, causal: bool) -> None:
    check(make(3, 140, 24, dtype, kv_heads=1, queries=40, causal=causal))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("taps", [None, (2, 3)])
def test_a_mixing_of_one_head_multiplies_its_taps(backend: str, taps: tuple[int, int] | None) -> None:
    """Beside `conv_attention`; the mixing before the softmax, and the one behind it."""
    problem = make(1, 20, 16, torch.float32, pre_conv=taps)
    q, k, v, (weight, *_) = problem[1:5]
    pre, post = torch.tensor([[[-1.7]], [[0.6]]], device=DEVICE)
    ones = torch.ones(1, 1, 1, device=DEVICE)
    got = multi_token_attention(q, k, v, pre_conv=weight, pre_mix=pre, post_mix=post, backend=backend)
    want = 0.6 * conv_attention(q, k, v, -1.7 * (ones if weight is None else weight), backend="reference")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("post_mix", [True, 1, "linear", False])
def test_identity_mixers_are_plain_attention(post_mix: bool | int | str) -> None:
    attention = MultiTokenAttention(2, 16, post_mix=post_mix, norm=False, gate=False, backend="triton", device=DEVICE)
    problem = make(2, 20, 16, torch.float32)
    want = F.scaled_dot_product_attention(problem.q, problem.k, problem.v, is_causal=True)
    torch.testing.assert_close(attention(problem.q, problem.k, problem.v), want)


@pytest.mark.parametrize(
    "heads", [pytest.param(1, marks=pytest.mark.slow), 10, pytest.param(20, marks=pytest.mark.slow)]
)
def test_heads_and_head_dims(heads: int) -> None:
    check(make(heads, 20, 80, torch.float16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_steps(dtype: torch.dtype) -> None:
    check(make(2, 40, 16, dtype, pre_conv=(3, 5), post_conv=(2, 9)))


@pytest.mark.parametrize(
    ("keys", "pad_key", "causal"),
    [(40, "left", True), (40, "right", False), (1, "both", True)],
)
def test_most_taps(keys: int, pad_key: str, causal: bool) -> None:
    """More than the sequence has rows, too."""
    taps = {"pre_conv": (8, 17), "post_conv": (8, 16)}
    check(make(2, keys, 16, torch.float32, pad_key=pad_key, causal=causal, **taps))


DOCUMENTS = [0, 0, 1, 3, 70, 75, 140]


@pytest.mark.parametrize("causal", [True, False])
def test_documents(causal: bool) -> None:
    check(make(2, 140, 16, torch.float16, causal=causal, documents=DOCUMENTS))


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_documents_with_convolutions(causal: bool) -> None:
    check(
        make(
            1,
            60,
            16,
            torch.float16,
            causal=causal,
            documents=[0, 0, 1, 3, 40, 42, 60],
            pre_conv=(3, 4),
            post_conv=(2, 3),
        )
    )


@pytest.mark.parametrize("steps", [{}, {"pre_conv": (3, 5), "post_conv": (2, 3)}], ids=["mixing", "all"])
def test_the_future_changes_nothing(steps: dict) -> None:
    """Bit for bit, whatever the later tokens hold."""
    problem = make(1, 40, 16, torch.float16, **steps)
    before, _ = forward(problem)
    for token in (30,):
        changed = [x.clone() for x in problem[1:4]]
        for x in changed:
            x[:, :, token + 1 :] = 6 - 7 * x[:, :, token + 1 :]
        after, _ = forward(problem._replace(q=changed[0], k=changed[1], v=changed[2]))
        assert torch.equal(before[:, :, : token + 1], after[:, :, : token + 1])


def test_scores_near_the_largest_float16() -> None:
    """The product with the scale is rounded once: no sum of the queries' and keys' numbers overflows before it."""
    problem = make(2, 40, 64, torch.float16, scale=0.01)
    q, k = (x.sign() * 300 for x in (problem.q, problem.k))  # q . k up to 5.8 million, scores to 57600
    out, logsumexp = forward(problem._replace(q=q, k=k, mixers=Mixers(None, None, None, None)))
    assert torch.isfinite(out).all()
    assert logsumexp.max() > 10000


def test_any_strides() -> None:
    problem = make(2, 17, 24, torch.float16, batch=2, kv_heads=1)
    want = forward(problem)
    mixers = Mixers(*(x if x is None else with_gaps(x) for x in problem.mixers))
    q, k, v = (with_gaps(x) for x in problem[1:4])
    changed = [
        problem._replace(q=q, k=k, v=v, mixers=mixers),
        problem._replace(q=problem.q.transpose(1, 2).contiguous().transpose(1, 2)),
    ]
    for other in changed:
        for got, expected in zip(forward(other), want, strict=True):
            assert torch.equal(got, expected)
    same = problem.v[:1].expand(2, -1, -1, -1)
    assert torch.equal(forward(problem._replace(v=same))[0], forward(problem._replace(v=same.contiguous()))[0])


def test_a_batch_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences whose chunks would be too short together take turns."""
    problem = make(2, 20, 16, torch.float16, batch=3)
    want = forward(problem)
    monkeypatch.setattr(score_chunks, "CHUNK_BYTES", 2 * 2 * 128 * 2 * 128)
    monkeypatch.setattr(score_chunks, "CHUNK_ROWS", 16)
    assert score_chunks.chunk_rows(problem.operation, 3, 2, 20, 2, backward=False) == (2, 32)
    for got, expected in zip(forward(problem), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_constants_are_in_the_order_of_the_kernels(documents: list[int] | None, monkeypatch) -> None:
    """Which a launch that is replayed relies on; of Triton's alone, on a GPU too."""
    seen = set()
    monkeypatch.setattr(stages, "cuda_gpu", lambda device: None)
    for module in (products, rows, heads, convolution):
        monkeypatch.setattr(module, "launch", lambda *args, **options: record(seen, *args, **options))
    forward(make(2, 140, 16, torch.float16, documents=documents, pre_conv=(2, 3), post_conv=(2, 3)))
    assert len(seen) == 5


def record(seen: set, kernel, programs, signature, *args, **options) -> None:
    names = kernel.arg_names
    assert len(args) + len([name for name in options if name not in ("num_warps", "maxnreg")]) == len(names)
    assert list(options)[: len(names) - len(args)] == names[len(args) :]
    seen.add(kernel.fn.__name__)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": 65}, "65 query heads"),
        ({"head_dim": 257}, "head_dim 257"),
        ({"dropout": 0.1}, "dropout"),
        ({"dtype": torch.float64}, "float64"),
        ({"operation": Operation(Convolution(9, 3, 1), 1.0)}, "9x3 taps"),
        ({"operation": Operation(None, 1.0, post_conv=Convolution(3, 18, 1))}, "3x18 taps"),
    ],
)
def test_what_it_cannot_run(changes: dict, reason: str) -> None:
    request = Request(Operation(None, 1.0), torch.device(DEVICE), torch.float16, 64, 16)
    assert TRITON.why_not(request) is None
    assert reason in TRITON.why_not(request._replace(**changes))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (10, 128), (16, 96), (16, 128)])
@pytest.mark.parametrize("steps", [{}, {"pre_conv": (6, 11), "post_conv": (6, 11)}], ids=["mixing", "all"])
def test_the_papers_layers(steps: dict, heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_chunks, "CHUNK_ROWS", 512)
    check(make(heads, 1100, head_dim, torch.bfloat16, **steps))
