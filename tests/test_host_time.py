"""scripts/host_time.py: what it times, and the table it writes, with calls that are stood in for."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("host_time", ROOT / "scripts/host_time.py")
host_time = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(host_time)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script with a call that takes `microseconds` of the host, the queue emptied before each batch."""
    clock, happened = [0], []

    def call(*words, microseconds=20):
        def forward():
            clock[0] += microseconds * 1000
            happened.append("call")

        monkeypatch.setattr(host_time, "calls", lambda heads, seq, head_dim: [("hopper", seq == 128, forward)])
        monkeypatch.setattr(host_time, "perf_counter_ns", lambda: clock[0])
        monkeypatch.setattr(host_time.environment, "describe", lambda device: {"device": f"a GPU of {device}"})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
        monkeypatch.setattr(sys, "argv", ["host_time.py", *words])
        return host_time.main(), happened

    return call


def test_the_median_of_batches_is_written(run, tmp_path):
    path = tmp_path / "out/host-time.csv"
    code, happened = run("--batches", "3", "--out", str(path))
    assert code == 0
    assert happened == (["wait"] + ["call"] * host_time.CALLS) * 13 + ["wait"]
    (row,) = csv.DictReader(path.open())
    assert (row["impl"], row["gradient"], row["seq"], row["device"]) == ("hopper", "True", "128", "a GPU of cuda")
    assert (float(row["median_us"]), float(row["least_us"])) == (20, 20)
    with pytest.raises(SystemExit) as refused:
        run("--out", str(path))
    assert refused.value.code == 2


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["host_time.py"])
    assert host_time.main() == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
