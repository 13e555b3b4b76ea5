"""Work by hand, and inputs: seeded, shared by the implementations of a shape, and as large as announced."""

from dataclasses import replace

import pytest
import torch
from changed_cases import with_changes

from mta_kernels.operation import Operation
from mtabench.problem.case import Case
from mtabench.problem.inputs import DTYPES, make_inputs
from mtabench.problem.work import bytes_moved, executed_flops, useful_flops

# Three tokens, one head of 2, 2x3 taps: 6 causal pairs of 9.
CONV = Case("fwd", "eager", Operation.of((2, 3), 2), "fp32", 1, 1, 1, 3, 2, None, "cpu")
PLAIN = with_changes(CONV, impl="sdpa-flash", taps=None)


def test_useful_forward():
    assert useful_flops(CONV) == 2 * 6 * (2 * 2 + 6)
    assert useful_flops(with_changes(CONV, causal=False)) == 2 * 9 * (2 * 2 + 6)
    assert useful_flops(replace(CONV, batch=5, heads=7, kv_heads=7)) == 35 * useful_flops(CONV)
    assert useful_flops(PLAIN) == 2 * 6 * 4


def test_useful_backward():
    assert useful_flops(replace(CONV, pass_="bwd")) == 2 * 6 * (5 * 2 + 3 * 6)
    assert useful_flops(replace(PLAIN, pass_="bwd")) == 2 * 6 * 10


def test_useful_decode_counts_every_key_once():
    assert useful_flops(replace(CONV, pass_="decode")) == 2 * 3 * (2 * 2 + 6)


def test_dense_counts_masked_scores():
    assert executed_flops(CONV, "dense") == 2 * 9 * (2 * 2 + 6)
    assert executed_flops(replace(CONV, pass_="bwd"), "dense") == 2 * 9 * (4 * 2 + 2 * 6)
    # A window of two queries is scored and convolved, and one row of it multiplies v.
    assert executed_flops(replace(CONV, pass_="decode"), "dense") == 2 * 3 * (2 * (2 + 6) + 2)
    # With one token so far there is one query.
    assert executed_flops(replace(CONV, pass_="decode", seq=1), "dense") == 2 * ((2 + 6) + 2)


def test_tiled_is_useful_work():
    for pass_ in ("fwd", "bwd", "decode"):
        assert executed_flops(replace(PLAIN, pass_=pass_), "tiled") == useful_flops(replace(PLAIN, pass_=pass_))


def test_expanded_depth_is_the_shorter_side():
    assert executed_flops(CONV, "expanded") == 2 * 6 * (2 + 1) * 2
    assert executed_flops(with_changes(CONV, taps=(6, 3)), "expanded") == 2 * 6 * (3 + 1) * 2
    assert executed_flops(replace(CONV, pass_="bwd"), "expanded") == 2 * 6 * (3 * 2 + 2) * 2
    assert executed_flops(replace(CONV, pass_="decode"), "expanded") == 2 * 3 * (3 + 1) * 2


def test_an_unknown_kind_of_work_is_refused():
    with pytest.raises(ValueError, match="sparse"):
        executed_flops(CONV, "sparse")


def test_bytes():
    grouped = replace(CONV, heads=4, kv_heads=2, dtype="bf16")
    query_like, key_like = 4 * 3 * 2 * 2, 2 * 3 * 2 * 2
    assert bytes_moved(grouped) == 2 * query_like + 2 * key_like
    assert bytes_moved(replace(grouped, pass_="bwd")) == 3 * query_like + 4 * key_like
    assert bytes_moved(replace(grouped, pass_="decode")) == 2 * key_like


def test_banded_work_is_a_product_a_tap_and_the_rows_that_tiles_share():
    case = with_changes(CONV, taps=(5, 3), head_dim=64)  # 6 pairs
    assert executed_flops(case, "banded") == 12 * (2 * 64 + 32 * 5) * 64 // 60
    assert executed_flops(replace(case, pass_="bwd"), "banded") == 12 * (3 * 64 + 64 * 5) * 64 // 48 + 12 * (
        192 + 2 * 64
    )


def test_overlapped_work_computes_the_margins_of_tiles_again():
    case = with_changes(CONV, taps=(5, 9), head_dim=64)  # 6 pairs; tiles of 64 x 64 give 60 x 56, backward 56 x 48
    assert executed_flops(case, "overlapped") == 12 * (2 * 64 + 45) * 64 * 64 // (60 * 56)
    assert executed_flops(replace(case, pass_="bwd"), "overlapped") == 12 * (7 * 64 + 5 * 45) * 64 * 64 // (56 * 48)
    decode = replace(case, pass_="decode")  # 3 keys; of 128 in a step 120 are new
    assert executed_flops(decode, "overlapped") == 6 * (5 * 64 * 128 // 120 + 45 + 64)


CASE = Case("fwd", "eager", Operation.of((6, 11), 16), "fp32", 2, 4, 2, 9, 16, None, "cpu")
OF_PLAIN = {"impl": "sdpa-flash", "taps": None}


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
    plain = make_inputs(with_changes(CASE, pass_=pass_, **OF_PLAIN))
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
    plain = make_inputs(with_changes(CASE, pass_="decode", **OF_PLAIN))
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
