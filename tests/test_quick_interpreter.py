"""The interpreter that the other tests of Triton kernels run in computes what Triton's own does."""

import pytest
import torch
from conformance.corners import case_of
from conformance.kernels import DECODES, KERNELS
from fuzz.calls import Call
from fuzz.inputs import make_inputs

quick_interpreter = pytest.importorskip("quick_interpreter")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")
CORNERS = {
    "triton": "fewer tokens than taps", "mta": "one token",
    "triton decode": "the first token", "mta decode": "more programs than keys",
}  # fmt: skip


@pytest.mark.parametrize("kernels", [x for x in (*KERNELS, *DECODES) if str(x) in CORNERS], ids=str)
def test_results_are_those_of_tritons_interpreter_bit_for_bit(kernels, monkeypatch):
    call = Call(make_inputs(case_of(kernels, CORNERS[str(kernels)], **{} if kernels.decode else {"batch": 1})))
    quick = call.run_plainly()
    for owner, name, original in quick_interpreter.AS_IT_WAS:
        assert getattr(owner, name) is not original
        monkeypatch.setattr(owner, name, original)
    for name, want in call.run_plainly().items():
        assert torch.equal(quick[name], want), name
