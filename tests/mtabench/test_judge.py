"""Probes change inputs in place and back, and results of timed calls are judged on inputs with other signs."""

from dataclasses import replace

import pytest
import torch

from mta_kernels.operation import Operation
from mtabench.checking import probes
from mtabench.checking.judge import Judge, results_of
from mtabench.checking.probes import changed
from mtabench.checking.sample import border_near
from mtabench.measuring.failures import WrongResultError
from mtabench.problem.case import Case
from mtabench.problem.inputs import make_inputs
from mtabench.problem.operations import make_operation
from mtabench.registry import implementation_of

CASE = Case("fwd", "eager", Operation.of((4, 3), 16), "bf16", 2, 4, 2, 80, 16, None, "cpu")


def tensors(inputs):
    return [*inputs.differentiable.values(), *(x for x in (inputs.dout, inputs.lengths) if x is not None)]


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_inputs_are_changed_in_place_and_back_bit_for_bit(pass_, dtype):
    case = replace(CASE, pass_=pass_, dtype=dtype)
    inputs = make_inputs(case, 3)
    judge = Judge(case, inputs, 3)
    assert len(judge.probes) == (2 if pass_ == "decode" else 3)
    before = [(x, x.data_ptr(), x.clone()) for x in tensors(inputs)]
    for probe in judge.probes:
        with changed(probe, inputs) as other:
            assert not all(torch.equal(x, old) for x, (_, _, old) in zip(tensors(other), before, strict=True))
        for x, address, old in before:
            assert x.data_ptr() == address
            assert torch.equal(x, old)


def test_the_last_but_one_token_and_those_before_borders_are_among_those_of_a_call():
    case = replace(CASE, batch=4, kv_heads=4, seq=5000)
    (tokens,) = probes._tokens(case, probes.Random(1))
    assert tokens.shape == (4, 4)
    assert 4998 in tokens
    assert {2047, 4095} & set(tokens.flatten().tolist())
    assert len(set(tokens.flatten().tolist())) > 10
    calls = list(probes._tokens(replace(case, batch=1, kv_heads=1), probes.Random(1)))
    assert len(calls) == probes.FEWEST_TOKENS


def test_borders_are_those_of_the_longest_chunks():
    random = probes.Random(0)
    assert {border_near(6145, random) for _ in range(99)} == {2048, 4096, 6144}
    assert {border_near(200, random) for _ in range(9)} == {128}
    assert border_near(5, random) == 2


PLAIN = Operation.of(None, 16)
EVERYTHING = make_operation((4, 3), "heads", (3, 2), "rms", "full", heads=4, head_dim=16)


@pytest.mark.parametrize(("pass_", "operation"), [
    ("fwd", CASE.operation), ("bwd", PLAIN), ("decode", CASE.operation),
    ("fwd", EVERYTHING), ("bwd", EVERYTHING), ("decode", EVERYTHING),
])  # fmt: skip
def test_results_of_timed_calls_are_right_whatever_the_signs_and_stale_ones_are_not(pass_, operation):
    """An earlier result, and in backward one of the dout from before the forward."""
    impl = "sdpa-math" if operation == PLAIN else "eager"
    case = replace(CASE, impl=impl, pass_=pass_, operation=operation, dtype="fp32", seq=24)
    inputs = make_inputs(case, 3)
    before = [x.clone() for x in tensors(inputs)]
    judge = Judge(case, inputs, 3)
    closure = implementation_of(case).build(case, inputs)
    watch = judge.watch()
    stale = [results_of(closure, case, inputs)]
    for _ in range(2):
        for wrong in (None, "stale", "too early"):
            watch.change()
            too_early = results_of(closure, case, inputs)
            watch.change_gradient()
            right = results_of(closure, case, inputs)
            if wrong is None or (wrong == "too early" and pass_ != "bwd"):
                watch.look([right])
                watch.end(judged=True)
            else:
                watch.look(stale if wrong == "stale" else [too_early])
                with pytest.raises(WrongResultError, match="a timed call is wrong"):
                    watch.end(judged=True)
            stale = [right]
    assert all(map(torch.equal, tensors(inputs), before))


def test_copies_and_pages_of_a_cache_change_too_and_are_drawn_again():
    case = replace(CASE, pass_="decode", page_size=16)
    inputs = make_inputs(case, 3)
    watch = Judge(case, inputs, 3).watch()
    (copy,) = inputs.copies(1)
    paged = inputs.given_to(case)
    (of_paged,) = paged.copies(1)
    watch.change()
    assert not torch.equal(inputs.v, make_inputs(case, 3).v)
    assert torch.equal(copy.v, inputs.v)
    assert torch.equal(paged.v.nan_to_num(), of_paged.v.nan_to_num())
    values = [x.v.nan_to_num().clone() for x in (copy, paged, of_paged)]
    watch.end()
    assert not any(torch.equal(x.v.nan_to_num(), old) for x, old in zip((copy, paged, of_paged), values, strict=True))
    for x in (copy, of_paged):
        fresh = x.k.clone()
        x.k.fill_(2)
        with pytest.raises(WrongResultError, match=r"it changes its inputs: k (in pages of 16 )?of copies"):
            watch.end()
        assert torch.equal(x.k.nan_to_num(), fresh.nan_to_num())
