"""The backward of multi-token attention by Triton's stages, against float64: on a GPU, else in the interpreter."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from decode_inputs import COMBINATIONS, PARTS, name_of
from error_bounds import assert_twice_as_near
from kernel_inputs import DEVICE, DTYPES, poison_memory, with_gaps
from mta_inputs import (
    Problem,
    assert_twice_eager,
    both_passes,
    by_reference,
    forward,
    gradients,
    make,
    small_chunks,
)
from torch import Tensor

from mta_kernels import score_chunks
from mta_kernels.multi_token_attention import MultiTokenAttention, api, norm_gate
from mta_kernels.multi_token_attention.module import PRESETS
from mta_kernels.multi_token_attention.triton import backward
from mta_kernels.multi_token_attention.triton.backend import TRITON
from mta_kernels.multi_token_attention.triton.products import rows_of


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN; and chunks are short."""
    poison_memory(monkeypatch)
    small_chunks(monkeypatch)


def check(problem: Problem) -> None:
    assert_twice_eager(gradients(problem), problem, backward=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_mixing(dtype: torch.dtype, causal: bool) -> None:
    check(make(2, 60, 24, dtype, kv_heads=1, queries=40, causal=causal))


OWN = [parts for parts in COMBINATIONS if any(parts[name] for name in PARTS[1:])]  # all others are conv_attention's


@pytest.mark.parametrize(
    ("parts", "dtype"),
    list(zip(OWN, itertools.cycle(DTYPES), strict=False)),
    ids=lambda x: name_of(x) if isinstance(x, dict) else str(x),
)
def test_every_combination_of_parts(parts: dict[str, bool], dtype: torch.dtype) -> None:
    """Both passes, of two chunks where one convolution reads beyond its own: `test_all_steps` has both of those."""
    taps = {"pre_conv": (3, 4), "post_conv": (2, 3)}
    given = {name: taps.get(name, True) if there else None for name, there in parts.items()}
    keys = 20 if parts["pre_conv"] and parts["post_conv"] else 36
    problem = make(2, keys, 16, dtype, scale=-0.3, **given)
    assert_twice_eager(both_passes(problem), problem, backward=True)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "batch"), [(1, 2), (10, 1), (20, 1)])
def test_heads_and_head_dims(heads: int, batch: int) -> None:
    check(make(heads, 33, 80, torch.float16, batch=batch))


@pytest.mark.parametrize("magnitude", [1e-6, 300])
def test_small_and_large_gradients_in_float16(magnitude: float) -> None:
    """Scaled by a power of two, none of the sums between is rounded to zero or overflows."""
    problem = make(2, 40, 16, torch.float16)
    check(problem._replace(grad_out=problem.grad_out * magnitude))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_steps(dtype: torch.dtype) -> None:
    check(make(2, 40, 16, dtype, pre_conv=(3, 5), post_conv=(2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "pad_key", "causal"),
    [(24, "left", True), (24, "right", False), (1, "both", True)],
)
def test_most_taps(keys: int, pad_key: str, causal: bool) -> None:
    """More than the sequence has rows, too."""
    taps = {"pre_conv": (8, 17), "post_conv": (7, 16)}
    check(make(2, keys, 16, torch.float32, pad_key=pad_key, causal=causal, **taps))


def test_small_gradients_beside_large_mixers() -> None:
    """Between the steps, no float16 gradient is rounded to zero that eager keeps."""
    problem = make(3, 40, 16, torch.float16, pre_conv=(3, 4))
    problem.grad_out[:, :, 20:] *= 1e-3
    problem.mixers.pre_conv.mul_(20)
    problem.mixers.post_mix.mul_(4)
    problem.q.mul_(1 / 80)
    exact, eager = (by_reference(problem, dtype, backward=True)["q"] for dtype in (torch.float64, torch.float16))
    got = gradients(problem)["q"]
    norm = exact[:, :, 25:].norm(dim=-1)
    worst, of_eager = (((x.double() - exact)[:, :, 25:].norm(dim=-1) / norm).amax() for x in (got, eager))
    assert worst <= 2 * of_eager


DOCUMENTS = [0, 0, 1, 3, 70, 75, 140]


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_documents(causal: bool) -> None:
    check(make(1, 140, 16, torch.float16, causal=causal, documents=DOCUMENTS))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="a fault of compiled code")
@pytest.mark.parametrize(
    ("head_dim", "dtype", "tokens", "options"),
    [
        (136, torch.bfloat16, 300, {"pre_conv": (6, 11), "post_conv": (6, 11)}),
        (128, torch.float32, 300, {"pre_conv": (7, 11), "documents": [0, 74, 200, 300]}),
        (18, torch.float16, 400, {"documents": [0, 250, 250, 251, 400]}),
    ],
)
def test_keys_that_no_row_of_a_chunk_sees(
    monkeypatch, head_dim: int, dtype: torch.dtype, tokens: int, options: dict
) -> None:
    """Those of the halo below, and of documents that ended before: their sums get nothing."""
    monkeypatch.setattr(score_chunks, "CHUNK_ROWS", 128)
    problem = make(4, tokens, head_dim, dtype, **options)
    check(problem)
    assert all(torch.equal(x, gradients(problem)[name]) for name, x in gradients(problem).items())


@pytest.mark.parametrize("taps", [{}, {"pre_conv": (2, 3), "post_conv": (3, 2)}])
def test_a_gradient_of_nan_stays_in_its_document(taps: dict) -> None:
    """Whatever products of tiles and the power of two of float16 have in common."""
    problem = make(2, 44, 16, torch.float16, documents=[0, 25, 44], **taps)
    before = gradients(problem)
    problem.grad_out[:, :, 20] = torch.nan
    after = gradients(problem)
    for name in "qkv":
        torch.testing.assert_close(before[name][:, :, 25:], after[name][:, :, 25:], rtol=4e-3, atol=1e-3)
    assert after["q"][:, :, 20].isnan().all()
    assert after["k"][:, :, :20].isnan().all()


@pytest.mark.parametrize("rounding", [-(2.0**-22), 2.0**-22])
def test_a_document_of_huge_scores_changes_no_other(rounding: float) -> None:
    """Its logsumexp is rounded by more than an exponential can hold: rows of the document are summed again."""
    problem = make(2, 60, 16, torch.float32, documents=[0, 25, 60])
    before = gradients(problem)
    q, k = problem.q.clone(), problem.k.clone()
    q[:, :, :25] *= 1e8
    k[:, :, :25] *= 1e8
    problem = problem._replace(q=q, k=k)
    logsumexp = forward(problem)[1] * (1 + rounding)
    *after, _ = TRITON.backward(*problem[:5], logsumexp, problem.grad_out, documents=problem.documents)
    for x, y in zip((before[name] for name in "qkv"), after, strict=True):
        assert y.isfinite().all()
        torch.testing.assert_close(x[:, :, 25:], y[:, :, 25:])
    exact = by_reference(problem, torch.float64, backward=True)
    torch.testing.assert_close(after[2].double(), exact["v"], rtol=1e-3, atol=1e-3)


def test_products_are_given_rows_that_the_copy_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of head dims whose rows do not begin at multiples of 16 bytes."""
    given = []

    def of(product: Callable) -> Callable:
        def checked(left: Tensor, right: Tensor, *others, **options) -> None:
            given.append(right)
            assert rows_of(right) is right
            product(left, right, *others, **options)

        return checked

    for name in ("score_product", "row_product", "add_transposed_product"):
        monkeypatch.setattr(backward, name, of(getattr(backward, name)))
    check(make(1, 20, 20, torch.float16, documents=[0, 7, 20]))
    assert len(given) == 5


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_documents_with_convolutions(causal: bool) -> None:
    documents = [0, 0, 1, 3, 36, 41, 48]  # across two chunks of 32 rows
    check(make(1, 48, 16, torch.float32, causal=causal, documents=documents, pre_conv=(3, 4), post_conv=(2, 3)))


def test_chunks_of_equally_many_scores() -> None:
    """Their rows are unequal: of more than 128 keys, which other tests here do not convolve."""
    problem = make(2, 140, 16, torch.float32, pre_conv=(2, 3), post_conv=(3, 2))
    lengths = [len(own) for own in score_chunks.own_rows(problem.operation, 140, 140, 32, above=3, below=3)]
    assert lengths == [64, 48, 28]
    assert_twice_eager(both_passes(problem), problem, backward=True)


def test_any_strides_and_parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(2, 17, 24, torch.float16, batch=2, kv_heads=1)
    want = gradients(problem)
    q, k, v, grad_out = (with_gaps(x) for x in (problem.q, problem.k, problem.v, problem.grad_out))
    monkeypatch.setattr(score_chunks, "CHUNK_BYTES", 2 * 2 * 128 * 2 * 128)
    got = gradients(problem._replace(q=q, k=k, v=v, grad_out=grad_out))
    for name, x in want.items():
        # The mixings are summed over the batch in another order.
        torch.testing.assert_close(got[name], x, rtol=0 if name in "qkv" else 2e-3, atol=0)


COSTLY = [pytest.param(name, 2, marks=pytest.mark.gpu) for name in ("mta-300m", "mta-1b")]  # other head dims alone


@pytest.mark.parametrize(
    ("name", "layer"), [*((name, 3) for name in PRESETS), ("mta-550m", 2), ("mta-830m", 2), *COSTLY]
)
def test_layers_of_the_models(name: str, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module, with all that they have: the norm and the gate by their kernels, too."""
    (heads, head_dim, _), tokens, dtype = PRESETS[name], 400 if DEVICE == "cuda" else 6, DTYPES[-1]
    monkeypatch.setattr(api, "norm_and_gate", norm_gate.NORM_GATE)
    torch.manual_seed(0)
    attention = MultiTokenAttention.preset(name, layer=layer, backend="triton")
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    attention.to(DEVICE)
    q, k, v, grad_out = torch.randn(4, 1, heads, tokens, head_dim).to(DEVICE, dtype)

    def run(attention: MultiTokenAttention, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: x.to(dtype).requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)}
        out = attention(**leaves)
        leaves |= attention.named_parameters()
        found = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad_out.to(dtype)), strict=True))
        # One number, which eager may have right by luck.
        found["gate"] = torch.cat([found.pop("gate.weight")[0], found.pop("gate.bias")])
        return {"out": out.detach(), **found}

    eager = copy.deepcopy(attention)
    eager.backend = "reference"
    assert_twice_as_near(
        run(attention, dtype), run(copy.deepcopy(eager).double(), torch.float64), run(eager, dtype), dtype
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (10, 128), (16, 96), (16, 128)])
@pytest.mark.parametrize("steps", [{}, {"pre_conv": (6, 11), "post_conv": (6, 11)}], ids=["mixing", "all"])
def test_the_papers_layers(steps: dict, heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same numbers when it is run again."""
    monkeypatch.setattr(score_chunks, "CHUNK_ROWS", 512)
    problem = make(heads, 1100, head_dim, torch.bfloat16, **steps)
    check(problem)
    first, again = gradients(problem), gradients(problem)
    assert all(torch.equal(first[name], again[name]) for name in first)
