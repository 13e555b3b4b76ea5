"""The interpreter that the other tests of Triton kernels run in computes what Triton's own does."""

import pytest
import torch
from kernel_inputs import DTYPES, make, value_and_gradients

from mta_kernels.conv_attention import conv_attention

quick_interpreter = pytest.importorskip("quick_interpreter")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_those_of_tritons_interpreter_bit_for_bit(dtype, monkeypatch):
    inputs = dict(zip(("q", "k", "v", "weight"), make(1, 2, 1, 37, 24, (3, 4), dtype), strict=True))
    grad_out = torch.ones_like(inputs["q"])
    quick = value_and_gradients(conv_attention, inputs, grad_out, backend="triton")
    for owner, name, original in quick_interpreter.AS_IT_WAS:
        assert getattr(owner, name) is not original
        monkeypatch.setattr(owner, name, original)
    for name, want in value_and_gradients(conv_attention, inputs, grad_out, backend="triton").items():
        assert torch.equal(quick[name], want), name
