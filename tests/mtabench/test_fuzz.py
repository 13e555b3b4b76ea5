"""The fuzz: its definition, its draws, the faults that it finds, and a short run of right kernels."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz_faults import FAULTS
from fuzz_mta_faults import MTA_FAULTS

from mta_kernels.conv_attention import conv_attention_reference
from mta_kernels.multi_token_attention import multi_token_attention_reference
from mta_kernels.operation import key_padding
from fuzz.calls import Call
from fuzz.cases import BLOCK
from fuzz.checks import errors
from fuzz.definition import Expected, Problem, Rounding, expected_results
from fuzz.draws import OPERATIONS, Target, draw
from fuzz.inputs import expected, make_inputs
from fuzz.layouts import LAYOUTS_THAT_REPEAT, Placed, as_laid_out
from fuzz.mta_cases import draw_mta
from fuzz.mta_definition import MtaProblem, expected_of_mta
from fuzz.poison import fresh_memory_is_nan

ROOT = Path(__file__).parents[2]
EXACT = Rounding(0.0, 0.0, 0.0)
ALL_FAULTS = FAULTS | {f"mta: {name}": fault for name, fault in MTA_FAULTS.items()}


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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("before", "after", "pad_key"), [((3, 4), (2, 5), "both"), ((1, 3), (9, 2), "left")])
def test_the_definition_of_all_parts_is_the_reference_and_its_gradients(causal, before, after, pad_key) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (2, 4, 7, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 8), "pre_conv": (4, *before), "pre_mix": (2, 2, 2),
        "post_conv": (4, *after), "post_mix": (1, 4, 4), "norm_weight": (8,), "gate_weight": (8, 8), "gate_bias": (8,),
    }  # fmt: skip
    leaves = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    grad_out = torch.randn(shapes["q"], generator=generator, dtype=torch.float64)
    out = multi_token_attention_reference(**leaves, causal=causal, scale=-0.3, pad_key=pad_key)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad_out)
    tensors = {name: x.detach() for name, x in leaves.items()}
    q, k, v = (tensors.pop(name) for name in "qkv")
    start, length = torch.zeros(2, dtype=torch.int64), torch.full((2,), 7)
    pads = key_padding(before[1], pad_key), key_padding(after[1], pad_key)
    problem = MtaProblem(q, k, v, tensors, start, length, 7, causal, -0.3, pads, 1e-5, 1.0, None, 0.0, False, False)
    for rounding in (EXACT, Rounding.of(torch.float16)):
        found = expected_of_mta(problem, rounding, 1e30, grad_out, 0)
        for name, want in zip(("out", *(f"d{name}" for name in leaves)), (out, *gradients), strict=True):
            torch.testing.assert_close(found[name].value, want.detach(), rtol=1e-9, atol=1e-11)
            error = found[name].variance.sum().sqrt() / want.norm()
            assert error < 1e-4 if rounding is EXACT else 2e-4 < error < 0.05, name


@pytest.mark.parametrize("seed", range(3))
def test_a_backward_may_make_probabilities_again(seed: int) -> None:
    """A huge value before a norm: errors of the probabilities cancel where the backward has those of the forward."""
    generator = torch.Generator().manual_seed(seed)
    heads, tokens, head_dim = 8, 24, 4
    shape = 1, heads, tokens, head_dim
    q, k, v, grad_out = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    v[:, :, 5] *= 1e8
    mix = torch.eye(heads, dtype=torch.float64) + 0.2 * torch.randn(heads, heads, generator=generator)
    tensors = {"post_mix": mix[None], "norm_weight": torch.ones(head_dim, dtype=torch.float64)}
    start, length = torch.zeros(1, dtype=torch.int64), torch.full((1,), tokens)
    pads, scale = (0, 0), 0.5
    problem = MtaProblem(
        q, k, v, tensors, start, length, tokens, False, scale, pads, 1e-6, 1.0, None, 0.0, False, False
    )
    want = expected_of_mta(problem, Rounding.of(torch.float32), 1e38, grad_out, 0)["dv"]
    probabilities = torch.softmax(scale * q @ k.mT, -1)
    sign = torch.randn(1, heads, tokens, 1, generator=generator).sign()
    again = probabilities * (1 + 2.0**-20 * sign)  # their logsumexp is about 4

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bgij,gh->bhij", x, mix)

    out = (mixed(probabilities) @ v).requires_grad_()
    (grad_of_out,) = torch.autograd.grad(out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6), out, grad_out)
    torch.testing.assert_close(mixed(probabilities).mT @ grad_of_out, want.value, rtol=1e-6, atol=1e-15)
    error = (mixed(again).mT @ grad_of_out - want.value).square().sum(-1)
    assert (error < (2 * want.variance.sqrt()).square()).all()


def test_a_case_is_the_same_alone() -> None:
    targets = [Target(op, backend) for op, fuzzed in OPERATIONS.items() for backend in fuzzed.usual["cuda"]]
    for block in range(len(targets)):
        number = block * BLOCK["cuda"] + 7 * block
        case = draw(5, number, targets, "cuda")
        assert draw(5, number, (Target(case.op, case.backend),), "cuda") == case


def test_a_block_of_cases_shares_what_is_compiled() -> None:
    for block in range(8):
        numbers = range(block * BLOCK["cuda"], (block + 1) * BLOCK["cuda"], 7)
        targets = [Target("conv-attention", backend) for backend in ("triton", "cuda", "hopper")]
        drawn = [draw(0, number, targets, "cuda") for number in numbers]
        kinds = {(x.dtype, x.head_dim, x.query_taps, x.key_taps, x.pad_key, x.causal) for x in drawn}
        assert len(kinds) <= 5  # and a few that are to be refused


@pytest.mark.parametrize(("op", "backend"), [("conv-attention", "triton"), ("conv-attention", "cuda"), ("mta", "auto")])
def test_the_first_cases_of_each_worker_have_all_passes(op: str, backend: str) -> None:
    for block in range(12):
        drawn = [draw(5, block * BLOCK["cuda"] + i, (Target(op, backend),), "cuda") for i in range(20)]
        assert sum(x.pass_ == "decode" for x in drawn) >= 5
        assert all(x.causal for x in drawn if x.pass_ == "decode")


def test_a_block_of_all_parts_has_few_sets_of_strides_and_of_what_is_compiled() -> None:
    for block in range(6):
        numbers = range(block * BLOCK["cuda"], (block + 1) * BLOCK["cuda"], 4)
        drawn = [draw(0, number, (Target("mta", "triton"),), "cuda") for number in numbers]
        kinds = {(x.dtype, x.heads, x.head_dim, x.query_taps, x.key_taps, x.parts.post_conv) for x in drawn}
        assert len(kinds) <= 5
        of_q = {dict(x.layouts).get("q", "contiguous") for x in drawn}
        assert len({x.layouts for x in drawn}) > 1
        assert len(of_q) <= 6


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


@pytest.mark.parametrize(
    ("heads", "rows", "sigmas", "check"),
    [(1, 1, 5, None), (1, 1, 7, "norm"), (1, 99, 3, None), (1, 99, 5, "norm"), (9, 99, 2, None), (9, 99, 3, "norm")],
)
def test_a_whole_may_be_off_by_what_its_worst_part_may(heads: int, rows: int, sigmas: float, check: str | None) -> None:
    zeros = torch.zeros(1, heads, rows, 64, dtype=torch.float64)
    want = {"out": Expected(zeros, torch.full((1, heads, rows), 64.0))}
    wrong = errors({"out": zeros + sigmas}, want, torch.bfloat16, lambda: {"out": zeros})
    assert [x.check for x in wrong] == ([check] if check else [])


def test_a_small_sum_that_rounding_loses_is_allowed() -> None:
    """Behind a norm, what a softmax's backward takes from all of a row may be less than their last digit."""
    drawn = draw_mta(1795725895, 102, "triton", "cuda")
    case = replace(drawn, device="cpu", backend="eager", layouts=(), way="plain", query_rows=9, history=0)
    inputs = make_inputs(case)
    want = expected(inputs)
    rounded = Call(inputs).run_plainly()
    assert not list(errors(rounded, want, torch.bfloat16, lambda: {name: x.value for name, x in want.items()}))


def test_fresh_memory_is_nan() -> None:
    with fresh_memory_is_nan():
        assert torch.empty(1000).isnan().all()
        assert torch.ones(3).new_empty(5, 5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@functools.cache
def documented() -> dict[str, tuple[list[str], int]]:
    """The table of docs/fuzzing.md: each fault's checks, and after how many cases they find it."""
    rows = re.findall(r"^\| (.+) \| (.+) \| (\d+) \|$", (ROOT / "docs/fuzzing.md").read_text(), re.MULTILINE)
    return {name: (checks.split(", "), int(cases)) for name, checks, cases in rows}


def test_the_table_has_each_fault() -> None:
    assert list(documented()) == list(ALL_FAULTS)


@pytest.mark.parametrize("name", ALL_FAULTS)
def test_a_fault_is_found_within_the_cases_of_the_table(name: str) -> None:
    checks, cases = documented()[name]
    assert ALL_FAULTS[name].found_by(cases - 1) == checks
