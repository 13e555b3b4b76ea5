"""Inputs: seeded, shared by the implementations of a shape, and as large as announced."""

from dataclasses import replace

import pytest
import torch
from changed_cases import with_changes

from mta_kernels.operation import Operation
from mtabench.problem.case import Case
from mtabench.problem.inputs import DTYPES, make_inputs

CASE = Case("fwd", "eager", Operation.of((6, 11), 16), "fp32", 2, 4, 2, 9, 16, None, "cpu")
PLAIN = {"impl": "sdpa-flash", "taps": None}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_shapes_and_dtypes(dtype):
    inputs = make_inputs(replace(CASE, dtype=dtype))
    assert inputs.q.shape == (2, 4, 9, 16)
    assert inputs.k.shape == inputs.v.shape == (2, 2, 9, 16)
    assert inputs.weight.shape == (4, 6, 11)
    assert {x.dtype for x in inputs.differentiable.values()} == {DTYPES[dtype]}
    assert inputs.dout is None
    assert inputs.lengths is None


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
def test_values_are_shared_by_implementations_and_convolutions(pass_):
    first = make_inputs(replace(CASE, pass_=pass_))
    again = make_inputs(replace(CASE, pass_=pass_))
    other = make_inputs(with_changes(CASE, pass_=pass_, taps=(3, 3)))
    plain = make_inputs(with_changes(CASE, pass_=pass_, **PLAIN))
    for inputs in (again, other, plain):
        assert torch.equal(first.k, inputs.k)
        assert torch.equal(first.v, inputs.v)
        assert torch.equal(first.q[:, :, -1], inputs.q[:, :, -1])
    assert torch.equal(first.weight, again.weight)
    assert plain.weight is None
    assert not torch.equal(first.k, first.v)


def test_backward_has_gradients_of_everything():
    inputs = make_inputs(replace(CASE, pass_="bwd"))
    assert inputs.dout.shape == inputs.q.shape
    assert not inputs.dout.requires_grad
    assert list(inputs.differentiable) == ["q", "k", "v", "weight"]
    assert all(x.requires_grad and x.is_leaf for x in inputs.differentiable.values())


def test_decode_has_a_window_that_fits():
    assert make_inputs(replace(CASE, pass_="decode")).q.shape == (2, 4, 6, 16)
    assert make_inputs(replace(CASE, pass_="decode", seq=4)).q.shape == (2, 4, 4, 16)
    plain = make_inputs(with_changes(CASE, pass_="decode", **PLAIN))
    assert plain.q.shape == (2, 4, 1, 16)
    assert plain.lengths.tolist() == [9, 9]
    assert plain.lengths.dtype == torch.int32


def test_copies_lie_elsewhere():
    inputs = make_inputs(replace(CASE, pass_="decode"))
    first, second = inputs.copies(2)
    assert torch.equal(first.k, inputs.k)
    assert torch.equal(second.v, inputs.v)
    assert len({x.k.data_ptr() for x in (inputs, first, second)}) == 3
    assert len({x.v.data_ptr() for x in (inputs, first, second)}) == 3
