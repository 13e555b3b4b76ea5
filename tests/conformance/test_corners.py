"""Values and gradients against float64 in every corner, with NaN in all memory that a kernel gets.

A case is one of the fuzz, so its checks hold for it. The call writes no argument, and results have the same bits twice.
No bit depends on what a row, a document, a sequence or a head must not see.
"""

from __future__ import annotations

import pytest
from checked_addresses import check_addresses
from fuzz.trial import try_case
from kernel_inputs import DEVICE

from conformance.corners import case_of, corners_of
from conformance.kernels import DECODES, KERNELS, Kernels

# Where the interpreter refuses what lies outside of a kernel's tensors, which takes it longer.
OWN_ADDRESSES = {("mta decode", name, "cpu") for name in ("groups of heads", "pages")}
CASES = [
    pytest.param(kernels, name, id=f"{kernels}: {name}", marks=kernels.marks)
    for kernels in (*KERNELS, *DECODES)
    for name in corners_of(kernels)
    if case_of(kernels, name) is not None
]


@pytest.mark.parametrize(("kernels", "name"), CASES)
def test_corner(kernels: Kernels, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(kernels, name)
    assert case is not None
    kernels.run(request)
    if (str(kernels), name, DEVICE) in OWN_ADDRESSES:
        check_addresses(monkeypatch)
    outcome = try_case(case, kernels.operation, thorough=True)
    assert not outcome.wrong, f"{outcome.wrong}\n{case.described()}"
    assert not outcome.refused
