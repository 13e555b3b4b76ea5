"""Probes change inputs in place and back, and the last call is judged on inputs that were negated."""

from dataclasses import replace

import pytest
import torch

from mta_kernels.operation import Operation
from mtabench.checking import probes
from mtabench.checking.judge import Judge, results_of
from mtabench.checking.probes import changed
from mtabench.checking.sample import border_near
from mtabench.problem.case import Case
from mtabench.problem.inputs import make_inputs
from mtabench.registry import find

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


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
def test_a_last_call_that_gives_the_first_result_is_wrong(pass_):
    case = replace(CASE, pass_=pass_)
    inputs = make_inputs(case, 3)
    judge = Judge(case, inputs, 3)
    closure = find("eager").build(case, inputs)
    first = results_of(closure, case, inputs)
    judge.rest()
    assert judge.last(lambda: [results_of(closure, case, inputs)] * 2) == ""
    assert "wrong when called last" in judge.last(lambda: [results_of(closure, case, inputs), first])
    assert torch.equal(inputs.v, make_inputs(case, 3).v)


def test_copies_of_a_cache_are_negated_too():
    inputs = make_inputs(replace(CASE, pass_="decode"))
    (copy,) = inputs.copies(1)
    with inputs.negated():
        assert torch.equal(copy.v, -make_inputs(replace(CASE, pass_="decode")).v)
    assert torch.equal(copy.v, inputs.v)
