"""Measured ceilings are of a plausible size, in the units that they are said to be in."""

import pytest

from mtabench.measuring import ceilings


def test_of_a_cpu(monkeypatch):
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**24})
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 256})
    found = ceilings.measure_ceilings("cpu", "fp32")
    assert 0.1 < found.copy_gbytes_s < 10_000
    assert 0.0001 < found.matmul_tflops < 100


def test_the_best_call_counts(monkeypatch):
    seconds = iter([3.0, 1.0, 2.0] + [5.0] * ceilings.CALLS)
    monkeypatch.setattr(ceilings, "_seconds", lambda call, device: next(seconds))
    assert ceilings._best_seconds(lambda: None, "cpu") == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_of_a_gpu(dtype):
    found = ceilings.measure_ceilings("cuda", dtype)
    assert 100 < found.copy_gbytes_s < 20_000
    assert 1 < found.matmul_tflops < 5_000
