"""The caches of a GPU before a timed window, by a driver that records what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mtabench.measuring import caches


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that is not there: what was done to it, in `done`; its driver returns `result`."""
    fake = SimpleNamespace(done=[], result=0)

    def reset() -> int:
        fake.done.append("reset")
        return fake.result

    def empty(size: int, **options: object) -> torch.Tensor:
        fake.done.append("buffer")
        return torch.ones(size, dtype=torch.uint8)

    stream = SimpleNamespace(synchronize=lambda: fake.done.append("context"))
    monkeypatch.setattr(caches, "_libcuda", lambda: SimpleNamespace(cuCtxResetPersistingL2Cache=reset))
    monkeypatch.setattr(caches, "l2_bytes", lambda: 5 * caches.PAGE_BYTES)
    monkeypatch.setattr(caches.torch, "empty", empty)
    monkeypatch.setattr(caches.torch.cuda, "current_stream", lambda: stream)
    return fake


def test_persisting_lines_are_reset_in_a_context_before_the_first_flush(calls: SimpleNamespace) -> None:
    flush = caches.cache_flush("cuda", "cold")
    assert flush is not None
    assert calls.done == ["context", "reset", "buffer"]
    flush()


def test_warm_caches_have_no_lines_of_others(calls: SimpleNamespace) -> None:
    assert caches.cache_flush("cuda", "warm") is None
    assert calls.done == ["context", "reset"]


def test_a_cpu_has_no_driver_to_ask(calls: SimpleNamespace) -> None:
    assert caches.cache_flush("cpu", "cold") is None
    assert calls.done == []


def test_a_gpu_without_a_set_aside_has_nothing_to_reset(calls: SimpleNamespace) -> None:
    calls.result = caches.NOT_SUPPORTED
    assert caches.cache_flush("cuda", "cold") is not None


def test_a_driver_that_refuses_is_not_passed_over(calls: SimpleNamespace) -> None:
    calls.result = 201
    with pytest.raises(RuntimeError, match="does not reset the L2 cache's persisting lines: error 201"):
        caches.cache_flush("cuda", "cold")
