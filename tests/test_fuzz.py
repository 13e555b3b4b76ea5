"""The fuzz: its definition, its draws, the faults that it finds, and a short run of right kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fuzz import calls, trial
from fuzz.cases import BACKENDS, BLOCK, OF_A_KIND, SHAPES, Parts, Target, draw
from fuzz.checks import Wrong, errors
from fuzz.definition import Problem, Rounding, errors_allowed, expected
from fuzz.inputs import Wanted, make_inputs
from fuzz.layouts import LAYOUTS_THAT_REPEAT, Placed, as_laid_out
from fuzz.poison import fresh_memory_is_nan
from fuzz_faults import FAULTS

from mta_kernels import allocation
from mta_kernels.multi_token_attention import multi_token_attention_reference
from mta_kernels.operation import key_padding

ROOT = Path(__file__).parents[1]
EXACT = Rounding(0.0, 0.0, 0.0)
ON_GPU = [
    Target(op, backend, decode) for op, by in BACKENDS.items() for backend in by["cuda"] for decode in (False, True)
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As in a worker of the fuzz: small tensors in two threads take several times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("before", "after", "pad_key"), [((3, 4), (2, 5), "both"), ((1, 3), (9, 2), "left")])
def test_the_definition_is_the_reference_and_its_gradients(causal, before, after, pad_key) -> None:
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
    problem = Problem(q, k, v, tensors, start, length, 7, causal, -0.3, pads, 1e-5, 1.0, None, 0.0, False, False)
    found = expected(problem, grad_out)
    without, with_rounding = (
        errors_allowed(problem, rounding, 1e30, grad_out, 0) for rounding in (EXACT, Rounding.of(torch.float16))
    )
    for name, want in zip(("out", *(f"d{name}" for name in leaves)), (out, *gradients), strict=True):
        torch.testing.assert_close(found[name], want.detach(), rtol=1e-9, atol=1e-11)
        assert without[name].sum().sqrt() < 1e-4 * want.norm(), name
        assert 2e-4 < with_rounding[name].sum().sqrt() / want.norm() < 0.05, name


@pytest.mark.parametrize("seed", range(3))
def test_a_backward_may_make_probabilities_again(seed: int) -> None:
    """A huge value before a norm: errors of the probabilities cancel where the backward has the forward's."""
    generator = torch.Generator().manual_seed(seed)
    heads, tokens, head_dim = 8, 24, 4
    shape = 1, heads, tokens, head_dim
    q, k, v, grad_out = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    v[:, :, 5] *= 1e8
    mix = torch.eye(heads, dtype=torch.float64) + 0.2 * torch.randn(heads, heads, generator=generator)
    tensors = {"post_mix": mix[None], "norm_weight": torch.ones(head_dim, dtype=torch.float64)}
    start, length = torch.zeros(1, dtype=torch.int64), torch.full((1,), tokens)
    pads, scale = (0, 0), 0.5
    problem = Problem(q, k, v, tensors, start, length, tokens, False, scale, pads, 1e-6, 1.0, None, 0.0, False, False)
    want = expected(problem, grad_out)["dv"]
    variance = errors_allowed(problem, Rounding.of(torch.float32), 1e38, grad_out, 0)["dv"]
    probabilities = torch.softmax(scale * q @ k.mT, -1)
    sign = torch.randn(1, heads, tokens, 1, generator=generator).sign()
    again = probabilities * (1 + 2.0**-20 * sign)  # their logsumexp is about 4

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bgij,gh->bhij", x, mix)

    out = (mixed(probabilities) @ v).requires_grad_()
    (grad_of_out,) = torch.autograd.grad(out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6), out, grad_out)
    torch.testing.assert_close(mixed(probabilities).mT @ grad_of_out, want, rtol=1e-6, atol=1e-15)
    error = (mixed(again).mT @ grad_of_out - want).square().sum(-1)
    assert (error < (2 * variance.sqrt()).square()).all()


def test_a_case_is_the_same_alone() -> None:
    for block, target in enumerate(ON_GPU):
        number = block * BLOCK["cuda"] + 7 * block
        case = draw(5, number, ON_GPU, "cuda")
        assert (case.op, case.backend, case.pass_ == "decode") == target
        assert draw(5, number, (target,), "cuda") == case


@pytest.mark.parametrize("target", ON_GPU, ids=str)
def test_cases_of_a_kind_share_what_is_compiled(target: Target) -> None:
    size = OF_A_KIND[target.decode]
    for kind in range(3):
        drawn = [draw(0, kind * size + i, (target,), "cuda") for i in range(0, size, 2)]
        kinds = {(x.dtype, x.head_dim, x.query_taps, x.key_taps, x.pad_key, x.causal) for x in drawn}
        assert len(kinds) <= 4  # and a few that are to be refused
        assert len({(x.seq_len, x.scale, x.values, x.lengths) for x in drawn}) > len(drawn) / 2
        shapes = {
            (x.batch, x.heads, x.form, x.page_size, x.splits, x.layouts, x.seq_len % 32, x.query_rows % 32)
            for x in drawn
        }
        if target.backend == "triton":
            assert len(shapes) <= SHAPES + 5  # and a few that are rare


def test_a_run_has_many_kinds() -> None:
    """Of 10,000 decode cases of the whole operation more than 60, with each dtype and head dim."""
    drawn = [draw(9, i, (Target("mta", "triton", True),), "cuda") for i in range(0, 10_000, 20)]
    of_kinds = {(x.dtype, x.head_dim, x.heads, x.kv_heads, x.query_taps, x.parts.post_conv) for x in drawn}
    assert len(of_kinds) > 60
    assert {x.dtype for x in drawn} == {"bf16", "fp16", "fp32"}
    assert {18, 136, 152, 160, 192, 248, 256} <= {x.head_dim for x in drawn}
    assert {16, 32, 64, 128, 256} <= {x.page_size for x in drawn}
    assert {x.replaced[1] for x in drawn if x.replaced} == {1, 2, 3, 4}
    assert any(x.replaced and x.lengths[x.replaced[0]] > x.query_rows for x in drawn)  # it goes on
    assert any(x.replaced and x.lengths[x.replaced[0]] == x.query_rows - x.replaced[1] for x in drawn)  # it begins


def test_what_found_wrong_gradients_is_drawn() -> None:
    """Chunks of short rows, odd head dims and large ones, documents of no token and one, splits of many sequences."""
    rows = [draw(3, i, (Target("mta", "triton"),), "cuda") for i in range(0, 20_000, 7)]
    steps = [draw(3, i, (Target("mta", "triton", True),), "cuda") for i in range(0, 10_000, 20)]
    assert {18, 72, 136, 152, 192, 248, 256} <= {x.head_dim for x in rows if x.chunk_rows and x.seq_len > x.chunk_rows}
    assert any(x.seq_len > 2048 for x in rows)
    assert any(x.batch * x.heads > 65535 for x in rows)
    assert any({0, 1} <= {b - a for a, b in pairwise(x.bounds)} for x in rows)
    assert any(x.probe == "other heads" and x.parts.pre_mix and x.parts.post_mix for x in rows)
    assert {"other documents", "other sequences", "future"} <= {x.probe for x in rows if x.dtype == "fp16"}
    assert any(x.splits == 16 and x.batch >= 8 and x.heads >= 8 for x in steps)
    parts = {"pre_conv", "pre_mix", "post_conv", "post_mix", "norm_weight", "gate_weight"}
    assert {x.dtype for x in rows if parts <= {*x.parts.names}} == {"bf16", "fp16", "fp32"}


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
    ("heads", "rows", "sigmas", "found"),
    [
        (1, 1, 5, []), (1, 1, 7, [("norm", True)]), (1, 1, 13, [("norm", False)]), (1, 99, 3, []),
        (1, 99, 5, [("norm", True)]), (9, 99, 2, []), (9, 99, 3, [("norm", True)]), (9, 99, 9, [("norm", False)]),
    ],
)  # fmt: skip
def test_a_whole_may_be_off_by_what_its_worst_part_may(heads: int, rows: int, sigmas: float, found: list) -> None:
    zeros = torch.zeros(1, heads, rows, 64, dtype=torch.float64)
    want = SimpleNamespace(values={"out": zeros}, variance={"out": torch.full((1, heads, rows), 64.0)})
    wrong = errors({"out": zeros + sigmas}, want, torch.bfloat16, lambda: {"out": zeros})
    assert [(x.check, x.marginal) for x in wrong] == found


@pytest.mark.parametrize(
    ("rows", "sigmas", "count", "found"), [(20_000, 9, 1, 0), (20_000, 9, 2, 1), (20_000, 13, 1, 1), (19_999, 9, 1, 1)]
)
def test_one_of_very_many_rows_may_be_marginal(rows: int, sigmas: float, count: int, found: int) -> None:
    zeros = torch.zeros(1, 1, rows, 16, dtype=torch.float64)
    want = SimpleNamespace(values={"out": zeros}, variance={"out": torch.full((1, 1, rows), 16.0)})
    off = zeros.clone()
    off[:, :, :count] = sigmas
    assert len(list(errors({"out": off}, want, torch.bfloat16, lambda: {"out": zeros}))) == found


@pytest.mark.parametrize(
    ("wrong_with", "marginal", "runs", "passes"),
    [
        ((0,), True, 4, True), ((0, 2), True, 3, False), ((0, 3.5), True, 4, True), ((0,), False, 1, False),
        ((), True, 1, True),
    ],
)  # fmt: skip
def test_a_number_that_rounding_throws_far_is_no_failure(monkeypatch, wrong_with, marginal, runs, passes) -> None:
    """What is just beyond a bound counts if it happens with other values, too, unless it is slight then (.5)."""
    seen = []

    def tried(case, *others):
        seen.append(case.repeat)
        found = [Wrong("row", "off", marginal)] * (case.repeat in wrong_with)
        found += [Wrong("row", "off", marginal, slight=True)] * (case.repeat + 0.5 in wrong_with)
        return trial.Outcome(case, wrong=found)

    monkeypatch.setattr(trial, "_tried_until_it_fits", tried)
    outcome = trial.try_case(draw(0, 0, (Target("mta", "eager"),), "cpu"))
    assert (seen, not outcome.wrong, outcome.marginal) == ([*range(runs)], passes, passes and runs > 1)


def test_other_values_of_a_case_have_its_shapes() -> None:
    case = draw(0, 3, (Target("mta", "eager"),), "cpu")
    first, other = (make_inputs(replace(case, repeat=repeat)).values for repeat in (0, 1))
    assert [x.shape for x in first.values()] == [x.shape for x in other.values()]
    assert not torch.equal(first["v"], other["v"])


def test_a_small_sum_that_rounding_loses_is_allowed() -> None:
    """Behind a norm, what a softmax's backward takes from all of a row may be less than their last digit."""
    drawn = draw(0, 0, (Target("mta", "eager"),), "cpu")
    parts = Parts(False, (1, 16, 16), None, (8, 2, 2), "identity", 0.1, 3, (1, 128), True, 0.0, ())
    case = replace(
        drawn, seed=1795725895, number=102, pass_="bwd", form="whole", dtype="bf16", batch=1, heads=16, kv_heads=16,
        seq_len=9, query_rows=9, history=0, head_dim=128, query_taps=1, key_taps=1, causal=False, scale=None,
        weight="random", values="equal", way="plain", wanted=("q", "v", *parts.names), bounds=(), layouts=(),
        parts=parts,
    )  # fmt: skip
    inputs = make_inputs(case)
    want = Wanted(inputs)
    rounded = calls.Call(inputs).run_plainly()
    assert not list(errors(rounded, want, torch.bfloat16, lambda: want.values))


def test_only_what_is_far_from_right_is_looked_at_closely() -> None:
    value = torch.randn(1, 2, 50, 16, dtype=torch.float64)
    for error, looks, found in ((2.0**-9, [], []), (2.0**-5, ["rough"], []), (1, ["rough", "close"], ["norm"])):
        looked: list[str] = []
        rough, close = (LookedAt(looked, name, torch.ones(1, 2, 50)) for name in ("rough", "close"))
        want = SimpleNamespace(values={"out": value}, variance=close, rough_variance=rough)
        wrong = [x.check for x in errors({"out": value * (1 + error)}, want, torch.bfloat16, dict, thorough=False)]
        assert (list(dict.fromkeys(looked)), wrong) == (looks, found)


class LookedAt(dict):
    """What anything is allowed to be off by, which notes that somebody looked."""

    def __init__(self, looked: list[str], name: str, variance: torch.Tensor) -> None:
        super().__init__()
        self._looked, self._name, self._variance = looked, name, variance

    def __missing__(self, _: str) -> torch.Tensor:
        self._looked.append(self._name)
        return self._variance


def test_fresh_memory_is_nan() -> None:
    with fresh_memory_is_nan():
        assert torch.empty(1000).isnan().all()
        assert allocation.new_empty(torch.ones(3), 5, 5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# The checks that find a fault, and the case that is the first of seed 1 to show it. All others: by its error, at once.
SHOWN = {
    "strides of grad_out ignored": (["norm"], 11),
    "the result of an earlier call at the same addresses": (["norm", "causality"], 4),
    "a document takes in the one before it": (["documents apart"], 7),
    "a sequence takes in the one before it": (["sequences apart"], 21),
    "other bits from call to call": (["same bits twice"], 1),
    "an argument overwritten": (["norm", "argument written"], 1),
    "a write beside an argument": (["argument written"], 1),
    "refuses what it can run": (["refused"], 10),
    "strides of lengths ignored": (["norm"], 6),
    "mta: 2 % off in dpre_mix": (["norm"], 8),
    "mta: dropout of another seed": (["norm"], 6),
    "mta: a sum of dk that no chunk began": (["norm"], 37),
    "mta: sequences and documents share a scale": (["documents apart"], 39),
    "mta: a head takes in another that it does not meet": (["heads apart"], 26),
    "mta: strides of the state ignored": (["norm"], 6),
    "mta: a sequence gets the state of the one that it replaces": (["norm"], 6),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    checks, case = SHOWN.get(name, (["norm"], 1))
    assert next(filter(None, map(FAULTS[name].found_by, range(case - 1, case + 2)))) == checks
