"""Measured ceilings are of a plausible size, in the units that they are said to be in."""

import pytest

from mtabench.errors import MtabenchError
from mtabench.measuring import ceilings


def test_of_a_cpu(monkeypatch):
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 2**24})
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 256})
    monkeypatch.setattr(ceilings, "run_delays_s", dict)  # beside whatever this machine does
    found = ceilings.measure_ceilings("cpu", "fp32")
    assert 0.1 < found.copy_gbytes_s <= found.read_gbytes_s < 10_000
    assert 0.0001 < found.matmul_tflops < 100


def test_beside_another_job_a_cpu_has_none(monkeypatch):
    waits = iter([{"1": 0.0}, {"1": 50.0}])
    monkeypatch.setattr(ceilings, "run_delays_s", lambda: next(waits))
    monkeypatch.setattr(ceilings, "_measured", lambda device, dtype: ceilings.Ceilings(1.0, 1.0))
    with pytest.raises(MtabenchError, match=r"fp16 is not known: threads waited for a core \d+ % .* end it, and"):
        ceilings.measure_ceilings("cpu", "fp16")


def test_the_best_call_counts(monkeypatch):
    seconds = iter([3.0, 1.0, 2.0] + [5.0] * ceilings.CALLS)
    monkeypatch.setattr(ceilings, "_seconds", lambda call, device: next(seconds))
    assert ceilings._best_seconds(lambda: None, "cpu") == 1.0


def test_every_reader_reads_the_whole_buffer_and_writes_next_to_nothing(monkeypatch):
    """A reduction of what it skips would not change: each element that is changed changes the result."""
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 2**16})
    buffer = ceilings._buffer("cpu")
    for read in ceilings._readers():
        before = read(buffer)
        assert before.nbytes <= buffer.nbytes / ceilings.ROW
        for place in (0, buffer.numel() // 2, buffer.numel() - 1):
            changed = buffer.clone()
            changed[place] = 3.0
            assert not read(changed).equal(before)


def test_the_fastest_way_to_read_counts(monkeypatch):
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 2**16})
    left = iter([4.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(ceilings, "_best_seconds", lambda call, device: next(left))
    assert ceilings._read_gbytes_s("cpu") == pytest.approx(65.536e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_of_a_gpu(dtype):
    found = ceilings.measure_ceilings("cuda", dtype)
    assert 100 < found.copy_gbytes_s <= found.read_gbytes_s < 20_000
    assert 1 < found.matmul_tflops < 5_000
