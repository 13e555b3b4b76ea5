"""The fuzz: its definition, its draws, the faults that it finds, and a short run of right kernels."""

from __future__ import annotations

import pytest
import torch
from fuzz_faults import FAULTS

from mta_kernels.conv_attention import conv_attention_reference
from mtabench.fuzzing.cases import BLOCK, draw
from mtabench.fuzzing.definition import Problem, Rounding, expected_results
from mtabench.fuzzing.layouts import LAYOUTS_THAT_REPEAT, Placed, as_laid_out
from mtabench.fuzzing.poison import fresh_memory_is_nan
from mtabench.fuzzing.trial import try_case

MOST_CASES = 150  # within which each fault is found
EXACT = Rounding(0.0, 0.0)


def cases(backend: str, count: int, seed: int = 1, **wanted):
    """The first cases of a seed, those with these fields alone."""
    number = found = 0
    while found < count:
        case = draw(seed, number, (backend,), "cpu")
        number += 1
        if all(getattr(case, name) == value for name, value in wanted.items()):
            found += 1
            yield case


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("taps", "pad_key", "pad"), [((3, 4), "both", 1), ((2, 5), "left", 4), ((5, 9), "right", 0)])
def test_the_definition_is_the_reference_and_its_gradients(causal, taps, pad_key, pad) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight, grad_out = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8), (4, *taps), (2, 4, 7, 8))
    )
    out = conv_attention_reference(q, k, v, weight, causal=causal, scale=-0.3, pad_key=pad_key)
    gradients = torch.autograd.grad(out, (q, k, v, weight), grad_out)
    start, length = torch.zeros(2, dtype=torch.int64), torch.full((2,), 7)
    tensors = (x.detach() for x in (q, k, v, weight))
    problem = Problem(*tensors, start, length, 7, causal=causal, scale=-0.3, pad=pad)
    found = expected_results(problem, EXACT, grad_out.detach())
    for name, want in zip(("out", "dq", "dk", "dv", "dweight"), (out, *gradients), strict=True):
        torch.testing.assert_close(found[name].value, want.detach(), rtol=1e-10, atol=1e-12)


def test_a_case_is_the_same_alone() -> None:
    backends = ("triton", "hopper", "cuda", "auto")
    for number in (0, BLOCK["cuda"], 3 * BLOCK["cuda"] + 7):
        case = draw(5, number, backends, "cuda")
        assert draw(5, number, (case.backend,), "cuda") == case


def test_a_block_of_cases_shares_what_is_compiled() -> None:
    for block in range(8):
        numbers = range(block * BLOCK["cuda"], (block + 1) * BLOCK["cuda"], 7)
        drawn = [draw(0, number, ("triton", "cuda", "hopper"), "cuda") for number in numbers]
        kinds = {(x.dtype, x.head_dim, x.query_taps, x.key_taps, x.pad_key, x.causal) for x in drawn}
        assert len(kinds) <= 5  # and a few that are to be refused


@pytest.mark.parametrize("layout", ["contiguous", "offset", "steps", "columns first", "permuted", *LAYOUTS_THAT_REPEAT])
def test_layouts_hold_the_same_values_with_nan_around_them(layout: str) -> None:
    values = as_laid_out(torch.randn(3, 2, 5, 4), layout)
    placed = Placed(values, layout)
    assert torch.equal(placed.x, values)
    assert placed.memory.isnan().any()
    placed.keep()
    assert not placed.changed()
    placed.memory[0] = 0
    assert placed.changed()


def test_fresh_memory_is_nan() -> None:
    with fresh_memory_is_nan():
        assert torch.empty(1000).isnan().all()
        assert torch.ones(3).new_empty(5, 5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    operation = fault.operation()
    for case in cases("eager", MOST_CASES):
        if (case.pass_ == "decode") == fault.decode and try_case(case, operation).wrong and not try_case(case).wrong:
            return
    pytest.fail(f"not found within {MOST_CASES} cases")
