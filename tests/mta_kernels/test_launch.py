"""The remembered launches: what must differ between two calls that may not share one. No GPU."""

from __future__ import annotations

import pytest
import torch

launch = pytest.importorskip("mta_kernels.conv_attention.triton.launch")


class _Kernel(launch.JITFunction):
    """Counts how often Triton would look at its arguments, and keeps what it is launched with."""

    def __init__(self) -> None:
        self.params = ["x", "rows", "BLOCK"]
        self.looked, self.launched = 0, []

    def __getitem__(self, grid):
        def look(x, rows, *, BLOCK, num_warps=4):
            self.looked += 1
            self.launched.append((grid, x, rows, BLOCK))
            return {(*grid, 1, 1): lambda *args: self.launched.append((grid, *args))}

        return look


@pytest.fixture
def kernel() -> _Kernel:
    return _Kernel()


def test_an_equal_call_is_launched_again_with_its_own_tensors(kernel: _Kernel) -> None:
    launch.launch(kernel, 3, "signature", "first", 16, BLOCK=64, num_warps=8)
    launch.launch(kernel, 3, "signature", "second", 16, BLOCK=64, num_warps=8)
    assert kernel.looked == 1
    assert kernel.launched == [((3,), "first", 16, 64), ((3,), "second", 16, 64)]


@pytest.mark.parametrize(
    "other",
    [
        {"programs": 4},
        {"signature": "another"},
        {"rows": 17},
        {"BLOCK": 32},
        {"num_warps": 4},
    ],
    ids=str,
)
def test_any_difference_is_looked_at(kernel: _Kernel, other: dict) -> None:
    call = {"programs": 3, "signature": "signature", "rows": 16, "BLOCK": 64, "num_warps": 8}
    for changes in ({}, other):
        c = call | changes
        launch.launch(kernel, c["programs"], c["signature"], "x", c["rows"], BLOCK=c["BLOCK"], num_warps=c["num_warps"])
    assert kernel.looked == 2
    assert kernel.launched[1][0] == ((call | other)["programs"],)


def test_signatures_tell_tensors_apart() -> None:
    x = torch.zeros(4, 8, 16)
    same = launch.call_signature(x, None, options=1)
    assert launch.call_signature(torch.ones(4, 8, 16), None, options=1) == same
    others = [
        launch.call_signature(x, None, options=2),
        launch.call_signature(x, x, options=1),
        launch.call_signature(x.half(), None, options=1),
        launch.call_signature(x[:2], None, options=1),
        launch.call_signature(x.transpose(0, 1).contiguous().transpose(0, 1), None, options=1),
        launch.call_signature(torch.zeros(4 * 8 * 16 + 1)[1:].view(4, 8, 16), None, options=1),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_host_arithmetic_is_that_of_triton() -> None:
    import triton

    for number in (1, 2, 3, 7, 8, 9, 64, 100, 1 << 20, (1 << 20) + 1):
        assert launch.next_power_of_2(number) == triton.next_power_of_2(number)
        assert launch.cdiv(number, 7) == triton.cdiv(number, 7)
