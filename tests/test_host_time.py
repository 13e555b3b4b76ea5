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
    """Runs the script with batches whose calls take `microseconds` of the host, the queue emptied before each."""
    clock, happened = [0], []

    def call(*words, microseconds=20):
        def batch():
            clock[0] += microseconds * 1000 * host_time.CALLS
            happened.append("batch")

        monkeypatch.setattr(host_time, "batches", lambda heads, seq, head_dim: [("hopper", "fwd", seq == 128, batch)])
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
    assert happened == ["wait", "batch"] * 13 + ["wait"]
    (row,) = csv.DictReader(path.open())
    named = row["impl"], row["pass"], row["gradient"], row["seq"], row["device"]
    assert named == ("hopper", "fwd", "True", "128", "a GPU of cuda")
    assert (float(row["median_us"]), float(row["least_us"])) == (20, 20)
    with pytest.raises(SystemExit) as refused:
        run("--out", str(path))
    assert refused.value.code == 2


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["host_time.py"])
    assert host_time.main() == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_a_step_is_the_forwards_and_one_backward_through_all_of_them(monkeypatch):
    """Of each call's own inputs; plain attention's weight gets no gradient."""
    happened = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            happened.append("forward")
            return q * 2

        @staticmethod
        def backward(ctx, grad):
            happened.append("backward")
            return grad

    inputs = [[torch.ones(1, requires_grad=True) for _ in range(4)] for _ in range(3)]
    runs = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *given, **options: happened.append("run") or runs(*given, **options)
    )
    host_time.step(lambda q, *others: Attention.apply(q), inputs)
    assert happened == ["forward"] * 3 + ["run"] + ["backward"] * 3
