"""The forward of mixed heads with CUDA's kernels: on a Hopper GPU, else in the emulator."""

from __future__ import annotations

import pytest
import torch
from emulated_mix import emulated_mix  # noqa: F401
from kernel_inputs import DEVICE, poison_memory
from mta_inputs import Problem, assert_twice_eager, forward, gradients, make, small_chunks, take_cuda
from torch import Tensor

from mta_kernels import score_chunks
from mta_kernels.multi_token_attention import stages
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.triton import mix_stage

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def mixes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list:
    """CUDA's kernels are taken, and how often is noted; chunks are short, and what nobody writes is NaN."""
    poison_memory(monkeypatch)
    small_chunks(monkeypatch)
    take_cuda(monkeypatch, "CUDA_MIX")
    monkeypatch.setattr(stages, "mix_pays", lambda *_: True)
    if DEVICE != "cuda":
        request.getfixturevalue("emulated_mix")
    calls, mix_values = [], mix_stage.mix_values
    monkeypatch.setattr(mix_stage, "mix_values", lambda *x, **y: (calls.append(y), mix_values(*x, **y)))
    return calls


def exact_logsumexp(problem: Problem) -> Tensor:
    """By definition, in float64."""
    operation, q, k, _, mixers = problem[:5]
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * operation.scale
    if mixers.pre_mix is not None:
        scores = torch.einsum("hg,bgij->bhij", mixers.pre_mix.double(), scores)
    if operation.causal:
        scores = scores + torch.full(scores.shape[2:], -torch.inf).triu(scores.shape[3] - scores.shape[2] + 1).to(
            q.device
        )
    return scores.logsumexp(3)


def check(problem: Problem, slack: float = 0.02) -> None:
    out, logsumexp = forward(problem)
    assert_twice_eager({"out": out}, problem)
    assert (logsumexp - exact_logsumexp(problem)).abs().max() <= slack


@pytest.mark.parametrize(
    ("heads", "keys", "head_dim", "options"),
    [
        (16, 150, 64, {"kv_heads": 4}),
        (10, 140, 128, {}),
        (4, 70, 32, {"batch": 2, "queries": 41, "causal": False, "pre_mix": False}),
        (3, 200, 96, {"queries": 130, "post_mix": False}),
        (2, 70, 16, {"scale": 0.0}),
        (2, 70, 16, {"scale": -0.5, "kv_heads": 1}),
        (1, 1, 48, {"batch": 2}),
    ],
    ids=str,
)
def test_forward(mixes: list, heads: int, keys: int, head_dim: int, options: dict) -> None:
    problem = make(heads, keys, head_dim, BF16, **options)
    check(problem)
    assert mixes


def test_large_scores(mixes: list) -> None:
    check(make(4, 70, 16, BF16, magnitude=40), slack=4.0)  # a logit of 300 is rounded to within 1
    assert len(mixes) == 2


def test_float32_mixings_and_any_strides(mixes: list) -> None:
    problem = make(4, 70, 16, BF16, batch=2)
    want = forward(problem)
    mixers = Mixers(None, problem.mixers.pre_mix.float().t().contiguous().t(), None, problem.mixers.post_mix.float())
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in problem[1:4])
    for got, expected in zip(forward(problem._replace(q=q, k=k, v=v, mixers=mixers)), want, strict=True):
        assert torch.equal(got, expected)
    assert len(mixes) == 4


def test_one_key_gives_its_value() -> None:
    """Exactly, whatever its logit."""
    problem = make(4, 30, 16, BF16, pre_mix=False, post_mix=False, magnitude=40)
    assert torch.equal(forward(problem)[0][:, :, 0], problem.v[:, :, 0])


def test_a_batch_in_parts(mixes: list, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(2, 100, 16, BF16, batch=3)
    want = forward(problem)
    assert len(mixes) == 2
    monkeypatch.setattr(score_chunks, "CHUNK_BYTES", 2 * 2 * (2 * 128) * 128)
    for got, expected in zip(forward(problem), want, strict=True):  # other blocks share the keys of a row
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert len(mixes) == 6


def test_calls_again(mixes: list) -> None:
    """Launches of before are repeated: with what is in memory now."""
    problem = make(4, 70, 32, BF16)
    want = forward(problem)
    before = problem.v.clone()
    problem.v.mul_(2)
    got = forward(problem)
    assert torch.equal(got[0], want[0] * 2)
    assert torch.equal(got[1], want[1])
    problem.v.copy_(before)
    assert torch.equal(forward(problem)[0], want[0])


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "options"),
    [
        (2, 16, torch.float16, {}),
        (17, 16, BF16, {}),
        (2, 24, BF16, {}),
        (2, 144, BF16, {}),
        (2, 16, BF16, {"documents": [0, 5, 20]}),
        (2, 16, BF16, {"pre_conv": (2, 3)}),
        (2, 16, BF16, {"post_conv": (2, 3)}),
    ],
    ids=str,
)
def test_what_the_stages_do(mixes: list, heads: int, head_dim: int, dtype: torch.dtype, options: dict) -> None:
    problem = make(heads, 20, head_dim, dtype, **options)
    assert choice(problem) != "mix"
    if DEVICE == "cuda" or dtype != BF16:
        assert_twice_eager({"out": forward(problem)[0]}, problem)
    assert not mixes


def choice(problem: Problem) -> str:
    """Whose kernels do the forward, as `stages` chooses."""
    q = problem.q
    _, heads, rows, head_dim = q.shape
    return stages.forward(
        problem.operation, stages.cuda_gpu(q.device), q.dtype, heads, head_dim, documents=problem.documents is not None,
        key_rows=problem.k.shape[2], rows=rows, sequences=1,
    )  # fmt: skip


def test_measurements_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(2, 20, 16, BF16)
    assert choice(problem) == "mix"
    monkeypatch.setattr(stages, "CUDA_MIX", False)
    assert choice(problem) == "stages"


@pytest.mark.parametrize(
    ("batch", "keys", "head_dim", "pays"),
    [
        (4, 4096, 64, True), (1, 16384, 64, True), (1, 16384, 128, True), (1, 65536, 128, True),
        (4, 4096, 96, True), (8, 2048, 96, False),  # two blocks more a tile, which it takes many keys to pay
        (1, 65536, 64, False), (1, 1024, 64, False),  # few tiles
    ],
    ids=str,
)  # fmt: skip
def test_where_it_pays(monkeypatch: pytest.MonkeyPatch, batch: int, keys: int, head_dim: int, pays: bool) -> None:
    monkeypatch.undo()
    operation = make(16, 1, head_dim, BF16).operation
    sequences, rows = score_chunks.chunk_rows(operation, batch, 16, keys, 2, backward=False)
    assert stages.mix_pays(16, head_dim, keys, min(rows, keys), sequences) == pays


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", [1.0, 60.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_probabilities_of_the_backward_add_up_to_one(mixes: list, head_dim: int, magnitude: float) -> None:
    """It makes scores again by another kernel, and takes the logsumexp of these ones."""
    problem = make(16, 300, head_dim, BF16, magnitude=magnitude)
    assert_twice_eager(gradients(problem), problem, backward=True)
    assert mixes
