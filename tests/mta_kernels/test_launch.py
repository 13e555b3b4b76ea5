"""The remembered launches: what must differ between two calls that may not share one. No GPU."""

from __future__ import annotations

import itertools
import sys
import threading

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


class Options:
    """What calls something else the first time that it is looked up, as another thread may run just then."""

    def __init__(self, interrupt) -> None:
        self.interrupt = interrupt

    def __hash__(self) -> int:
        interrupt, self.interrupt = self.interrupt, None
        if interrupt:
            interrupt()
        return 7


@pytest.fixture
def few_signatures(monkeypatch: pytest.MonkeyPatch) -> int:
    """Memory for so many."""
    monkeypatch.setattr(launch, "_signatures", {})
    monkeypatch.setattr(launch, "MAX_SIGNATURES", 8)
    return 8


def test_signatures_within_signatures_are_not_the_same() -> None:
    found = []
    x = torch.zeros(4)
    outer = launch.call_signature(x, options=Options(lambda: found.append(launch.call_signature(x, options="inner"))))
    assert outer != found[0] == launch.call_signature(x, options="inner")


def test_threads_number_signatures_apart(few_signatures: int) -> None:
    start, interval = threading.Barrier(4), sys.getswitchinterval()
    numbers: list[dict[int, int]] = [{} for _ in range(4)]

    def number(thread: int) -> None:
        start.wait()
        for i in range(2000):
            options = 4 * i + thread
            numbers[thread][launch.call_signature(options=options)] = options

    threads = [threading.Thread(target=number, args=(thread,)) for thread in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(set().union(*numbers)) == 4 * 2000
    assert len(launch._signatures) <= few_signatures + 4


def test_a_signature_for_every_length_is_not_kept_for_ever(few_signatures: int, kernel: _Kernel) -> None:
    """What was forgotten is looked at again, and never taken for what came after it."""
    lengths = [*range(1, 31), *range(1, 31)]
    numbers = []
    for length in lengths:
        numbers.append(launch.call_signature(torch.zeros(length)))
        assert launch.call_signature(torch.ones(length)) == numbers[-1]
        launch.launch(kernel, 1, numbers[-1], f"of {length}", 16, BLOCK=64)
        assert len(launch._signatures) <= few_signatures
    assert all(a != b or m == n for (a, m), (b, n) in itertools.combinations(zip(numbers, lengths, strict=True), 2))
    assert [call[1] for call in kernel.launched] == [f"of {length}" for length in lengths]
    assert kernel.looked == len(lengths)
