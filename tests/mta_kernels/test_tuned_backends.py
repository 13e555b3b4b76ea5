"""Which backend "auto" takes where `mtabench tune` has compared them: what is looked up, and what is compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from emulated_forward import emulated_forward  # noqa: F401
from kernel_inputs import DEVICE, make

from mta_kernels.backend import Request
from mta_kernels.conv_attention import conv_attention, explain, operators, tile_sizes, tuner
from mta_kernels.conv_attention.backends import CONV_ATTENTION, BackendConfig
from mta_kernels.conv_attention.cuda_decode import backend as cuda_backend
from mta_kernels.conv_attention.tile_sizes import Entry, Key
from mta_kernels.conv_attention.triton.tunable_kernels import TunedShape
from mta_kernels.operation import Operation

GPU = "Some GPU"
KERNELS = CONV_ATTENTION.kernels
ON_GPU = DEVICE == "cuda"
BF16, TAPS = torch.bfloat16, (6, 11)
RULE = "the fastest backend for these arguments"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine whose every device is a GPU on which "cuda" and "triton" run, that nothing is tuned for yet."""
    monkeypatch.setenv("MTA_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(tile_sizes, "device_name", lambda device: GPU)
    monkeypatch.setattr(cuda_backend, "_multiplies_alike", lambda *asked: True)
    run_on(monkeypatch, "cuda", "triton")
    tile_sizes.reload()
    yield
    tile_sizes.reload()


def run_on(monkeypatch, *names):
    """Have the backends of these names run everything, and no other anything."""
    able = {name: None for name in names}
    found = tuple(replace(x, why_not=lambda request, x=x: able.get(x.name, "it is not here")) for x in KERNELS)
    monkeypatch.setattr(CONV_ATTENTION, "kernels", found)


def tuned(backend, kernel="forward_backend", seq_len=4096, **other):
    key = Key.of(BF16, 64, TAPS, True, seq_len)._replace(**other)
    tile_sizes.save([Entry(kernel, key, {"backend": backend}, {"triton": "3.6.0"})], GPU)


def request_of(key_rows=4096, gradients=False, causal=True, **changes):
    operation = Operation.of(TAPS, 64, causal=causal)
    return Request(operation, torch.device("cuda"), BF16, 64, gradients, key_rows=key_rows)._replace(**changes)


def taken(*arguments, **options):
    return CONV_ATTENTION.fastest(request_of(*arguments, **options))[0].name


def test_without_an_entry_the_rule_decides():
    assert taken() == "cuda"
    tile_sizes.save([Entry("forward", Key.of(BF16, 64, TAPS, True, 4096), {"block_m": 64}, {})], GPU)  # an older file
    assert taken() == "cuda"


def test_what_was_measured_comes_before_the_rule_for_each_pass():
    tuned("triton")
    assert (taken(), taken(gradients=True)) == ("triton", "cuda")
    tuned("cuda")
    tuned("triton", "training_backend")
    assert (taken(), taken(gradients=True)) == ("cuda", "triton")


def test_the_nearest_length_counts_and_all_else_must_be_the_same():
    tuned("triton", seq_len=16384)
    tuned("cuda", seq_len=1024)
    assert [taken(rows) for rows in (1, 2000, 4096, 8192, 10**6)] == ["cuda", "cuda", "triton", "triton", "triton"]
    assert taken(16384, causal=False) == taken(16384, dtype=torch.float16) == "cuda"


def test_a_backend_that_cannot_run_or_is_unknown_is_passed_over(monkeypatch):
    tuned("hopper")
    assert taken() == "cuda"
    tuned("of another version")
    assert taken() == "cuda"
    run_on(monkeypatch, "triton")
    tuned("cuda")
    assert taken() == "triton"


def test_a_decode_is_not_tuned(monkeypatch):
    run_on(monkeypatch, "hopper", "cuda", "triton")
    tuned("triton")
    assert taken() == "triton"
    cache = torch.empty(1, 2, 8, 64, dtype=BF16)
    assert taken(decode=(cache.repeat(1, 2, 1, 1), cache, cache)) == "cuda"


def test_where_the_rule_prefers_triton_the_cuda_kernels_come_after_it(monkeypatch):
    few_taps = request_of()._replace(operation=Operation.of((1, 1), 64))
    assert [backend.name for backend in CONV_ATTENTION.able(request_of())] == ["cuda", "triton"]
    assert [backend.name for backend in CONV_ATTENTION.able(few_taps)] == ["triton", "cuda"]
    run_on(monkeypatch, "cuda")
    assert CONV_ATTENTION.fastest(few_taps)[0].name == "cuda"


def test_explain_says_what_was_measured_and_where():
    q, k, v, weight = make(1, 2, 1, 40, 64, TAPS, BF16)
    assert str(explain(q, k, v, weight)) == f"cuda: {RULE}"
    tuned("triton", seq_len=64)
    why = "the fastest on Some GPU, as `mtabench tune` measured at 64 keys"
    assert str(explain(q, k, v, weight)) == f"triton: {why}"
    assert str(explain(q, k, v, weight, causal=False)) == f"cuda: {RULE}"
    assert str(explain(q, k, v, weight.requires_grad_())) == f"cuda: {RULE}"


@pytest.mark.parametrize(("dynamic", "expected"), [(None, "triton cuda"), (False, "triton cuda"), (True, "triton")])
def test_a_compiled_call_takes_what_was_measured(dynamic, expected):
    """A length that the compiler does not know counts as the longest; without any size the rule decides."""
    found = []

    def compiler(graph, inputs):
        found.extend(node.args[-1] for node in graph.graph.nodes if node.target is operators.CONV_ATTENTION)
        return lambda *arguments: (next(x for x in arguments if isinstance(x, torch.Tensor)),)

    for seq_len, backend in ((16, "triton"), (64, "cuda")):
        key = Key.of(torch.float32, 16, (3, 4), True, seq_len)
        tile_sizes.save([Entry("forward_backend", key, {"backend": backend}, {})], GPU)
    torch.compiler.reset()
    compiled = torch.compile(conv_attention, fullgraph=True, dynamic=dynamic, backend=compiler)
    for seq_len in (20, 70):
        compiled(*make(1, 2, 1, seq_len, 16, (3, 4)))
    torch.compiler.reset()
    assert found == expected.split()


SHAPE = TunedShape(1, 2, 1, 70, 16, (3, 5), torch.float16)


@pytest.mark.parametrize("kernel", ["forward_backend", "training_backend"])
def test_backends_are_compared_by_what_they_compute(request, monkeypatch, kernel):
    if ON_GPU:
        monkeypatch.setattr(CONV_ATTENTION, "kernels", KERNELS)
    else:
        request.getfixturevalue("emulated_forward")
    last_wins = None if ON_GPU else lambda calls, cold: [float(-number) for number, _ in enumerate(calls)]
    trials = tuner.tune(kernel, SHAPE, measure=last_wins)
    assert [trial.status for trial in trials] == ["ok"] * len(trials)
    assert {BackendConfig("cuda"), BackendConfig("triton")} <= {trial.config for trial in trials}
    shape = SHAPE.request(kernel == "training_backend", torch.device(DEVICE))
    assert CONV_ATTENTION.fastest(shape)[0].name == tuner.fastest(trials).config.backend


@pytest.mark.parametrize(("kernel", "part"), [("forward_backend", "forward"), ("training_backend", "backward")])
def test_a_wrong_backend_is_never_taken(monkeypatch, kernel, part):
    def wrong(operation, q, k, v, weight, *others, **options):
        return (q * 0, q[..., 0].float() * 0) if part == "forward" else (q * 0, k * 0, v * 0, weight * 0)

    right = CONV_ATTENTION.named("triton")
    planted = replace(right, name="cuda", rank=lambda request: 9, **{part: wrong})
    monkeypatch.setattr(CONV_ATTENTION, "kernels", (replace(right, why_not=lambda request: None), planted))
    trials = tuner.tune(kernel, SHAPE, measure=lambda calls, cold: [2.0] * len(calls))
    assert [(trial.config.backend, trial.status) for trial in trials] == [
        ("triton", "ok"), ("cuda", "wrong: differs from the first"),
    ]  # fmt: skip
    (saved,) = tile_sizes.read_entries(tile_sizes.user_file(GPU), GPU)
    assert (saved.kernel, saved.key, saved.config) == (kernel, SHAPE.key(kernel), {"backend": "triton"})
