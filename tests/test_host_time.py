"""scripts/host_time.py: what it times, and the table it writes, with calls that are stood in for."""

import csv
import sys

import host_time
import pytest
import torch


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


def test_a_step_is_a_chain_of_layers_and_one_backward_through_it(monkeypatch):
    """The output of a layer is the queries of the next; gradients are of tensors and of parameters of modules."""
    happened, differentiated = [], []

    def attention(q, k, module):
        happened.append((q.item(), k.item()))
        return q * k * module.weight.sum()

    def grad(outs, inputs, *given, **options):
        differentiated.extend(inputs)
        happened.append("run")
        return runs(outs, inputs, *given, **options)

    runs = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", grad)
    modules = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    for module in modules:
        torch.nn.init.ones_(module.weight)
    layers = [(torch.full((1,), float(2 + i), requires_grad=True), module) for i, module in enumerate(modules)]
    q = torch.ones(1, requires_grad=True)
    host_time.step(attention, q, layers)
    assert happened == [(1, 2), (2, 3), "run"]
    wanted = [q, layers[0][0], layers[1][0], layers[0][1].weight, layers[1][1].weight]
    assert {id(x) for x in differentiated} == {id(x) for x in wanted}


def test_every_attention_is_timed_in_every_pass(monkeypatch):
    monkeypatch.setattr(host_time, "drawn", lambda *sizes: torch.ones(1))
    monkeypatch.setattr(
        host_time, "attentions", lambda *sizes: [("one", lambda q, k: q * k, lambda _: [torch.ones(1)])]
    )
    found = list(host_time.batches(1, 1, 1))
    assert [row[:3] for row in found] == [("one", *pass_) for pass_ in host_time.PASSES]
    threads = []
    monkeypatch.setattr(
        host_time, "step", lambda *given: threads.append(torch._C._is_multithreading_enabled()), raising=True
    )
    for *_, batch in host_time.batches(1, 1, 1):
        batch()
    assert threads == [True, False]
