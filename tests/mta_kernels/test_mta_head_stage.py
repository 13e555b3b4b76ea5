"""The backward with CUDA's kernels in which heads meet: on a GPU, else in the emulator, beside Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from emulated_bands import emulated_bands  # noqa: F401
from emulated_heads import emulated_heads  # noqa: F401
from kernel_inputs import DEVICE, poison_memory
from mta_inputs import assert_twice_eager, forward, gradients, make, small_chunks, take_cuda

from mta_kernels.multi_token_attention import stages
from mta_kernels.multi_token_attention.bands_cuda import plan
from mta_kernels.multi_token_attention.heads_cuda import heads
from mta_kernels.multi_token_attention.triton import rows
from mta_kernels.multi_token_attention.triton.backend import TRITON

FP16 = torch.float16  # Triton's interpreter has no bfloat16
BOTH = {"pre_conv": (2, 3), "post_conv": (2, 3)}


@pytest.fixture(autouse=True)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA's kernels are taken, and which is noted; chunks are short, and what nobody writes is NaN."""
    poison_memory(monkeypatch)
    small_chunks(monkeypatch)
    monkeypatch.setattr(plan, "CONVOLVE", plan.Sizes(20, 3, 1))
    monkeypatch.setattr(plan, "GRADIENTS", plan.Sizes(20, 2, 1))
    take_cuda(monkeypatch, "CUDA_BANDS", "CUDA_BACKWARD_HEADS", never=("CUDA_HEADS",))
    if DEVICE != "cuda":
        request.getfixturevalue("emulated_bands")
        request.getfixturevalue("emulated_heads")
        monkeypatch.setattr(heads, "sm_count", lambda device: 1)
    names, kernel = [], heads.kernel
    monkeypatch.setattr(heads, "kernel", lambda name, *x: (names.append(name), kernel(name, *x))[1])
    return names


@pytest.mark.parametrize(
    "options",
    [
        {"pre_conv": (6, 11), "post_conv": (6, 11)},
        {"pre_conv": (3, 5), "post_conv": (2, 3), "causal": False, "pad_key": "left"},
        {"post_conv": (2, 9), "documents": [0, 0, 1, 3, 40, 42, 70]},
        {"post_conv": (4, 3), "kv_heads": 1, "batch": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("forward_by_heads", [False, True])
def test_all_steps(launches: list[str], monkeypatch, options: dict, forward_by_heads: bool) -> None:
    monkeypatch.setattr(stages, "CUDA_HEADS", forward_by_heads)
    problem = make(2, 70, 16, FP16, **options)
    found = gradients(problem)
    recomputes_probabilities = forward_by_heads and "pre_conv" in options
    probabilities = "rebuild_probabilities" if recomputes_probabilities else "mix_probabilities"
    back = {probabilities, "convolve_heads", "differentiate_logits"}
    assert set(launches) - {"pre_heads", "merge_pieces", "post_heads"} == back
    assert_twice_eager(found, problem, backward=True)


def test_logits_in_the_thousands() -> None:
    problem = make(2, 60, 16, FP16, magnitude=300.0, **BOTH)
    assert_twice_eager(gradients(problem), problem, backward=True)


@pytest.mark.skipif(DEVICE == "cuda", reason="a constant of a compiled kernel stays")
@pytest.mark.parametrize("recomputes_probabilities", [False, True])
@pytest.mark.parametrize("coarse", [0.0, 1e9])
def test_rows_of_a_coarse_logsumexp_are_summed_again(
    monkeypatch, coarse: float, recomputes_probabilities: bool
) -> None:
    """And no others, whose probabilities are as wrong as the logsumexp."""
    monkeypatch.setattr(stages, "CUDA_HEADS", recomputes_probabilities)
    monkeypatch.setattr(rows, "COARSE", tl.constexpr(coarse))
    problem = make(2, 60, 16, FP16, **BOTH)
    _, logsumexp = forward(problem)
    want = gradients(problem)
    found = TRITON.backward(*problem[:5], (logsumexp / 4).ceil() * 4, problem.grad_out)[2]
    near = (found - want["v"]).norm() < 0.01 * want["v"].norm()
    assert near == (coarse == 0)


def test_a_gradient_of_nan_stays_in_its_document() -> None:
    problem = make(2, 60, 16, FP16, documents=[0, 25, 60], **BOTH)
    before = gradients(problem)
    problem.grad_out[:, :, 20] = torch.nan
    after = gradients(problem)
    for name in "qkv":
        torch.testing.assert_close(before[name][:, :, 25:], after[name][:, :, 25:], rtol=4e-3, atol=1e-3)
    assert after["q"][:, :, 20].isnan().all()


@pytest.mark.parametrize("larger", [9.0, 200.0])
def test_rows_whose_first_key_has_nearly_all_probability(larger: float) -> None:
    """Their gradients are what is left of large ones, and nothing where that key has all."""
    problem = make(2, 60, 16, FP16, post_conv=(2, 3), scale=1.0)
    problem.mixers.pre_mix.copy_(torch.eye(2))
    problem.q[..., 0], problem.k[..., 0], problem.k[..., 1:] = 1, 0, problem.k[..., 1:] / 64
    problem.k[:, :, 0, 0] = larger
    found = gradients(problem)
    assert_twice_eager({name: found[name] for name in "qk"}, problem, backward=True)


@pytest.mark.parametrize(
    ("count", "options"), [(2, {"pre_mix": False}), (2, {"post_mix": False}), (17, {})], ids=["no pre", "no post", "17"]
)
def test_what_is_tritons(launches: list[str], count: int, options: dict) -> None:
    gradients(make(count, 20, 16, FP16, **BOTH, **options))
    assert not launches
