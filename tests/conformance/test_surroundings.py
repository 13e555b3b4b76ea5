"""Properties beside values: order of threads, separation, far memory, graphs, refusals, `torch.compile`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fuzz import checks
from fuzz.calls import Call, Results
from fuzz.cases import UNFIT, FuzzCase
from fuzz.inputs import Inputs, make_inputs
from fuzz.poison import fresh_memory_is_nan
from fuzz.probes import Probe, probe_of
from fuzz.trial import try_case
from kernel_inputs import DEVICE, far_apart

from conformance.corners import case_of
from conformance.kernels import DECODES, EAGER, KERNELS, Kernels

EVERY = (*KERNELS, *DECODES)
SEEDS = range(5)  # of the emulator: how threads and copies interleave
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has an order of its own, and no memory that is not there")


def of(chosen: list[Kernels]) -> pytest.MarkDecorator:
    """A test of each of these."""
    return pytest.mark.parametrize("kernels", [pytest.param(x, id=str(x), marks=x.marks) for x in chosen])


def usual(kernels: Kernels, **changes: Any) -> FuzzCase:
    """A case with whole tiles and a rest; of a decode with several programs."""
    case = case_of(kernels, "ragged" if kernels.decode else "tiles and a rest")
    assert case is not None
    return replace(case, **changes)


def run(kernels: Kernels, inputs: Inputs) -> Results:
    """With NaN in all memory that nobody has written."""
    with fresh_memory_is_nan():
        return Call(inputs, kernels.operation).run_plainly()


@on_cpu
@of([x for x in EVERY if x.played])
def test_any_order_of_threads(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Gives the same bits; but for the published approach's dweight, which atomics add up."""
    played = kernels.run(request)
    inputs, found = make_inputs(usual(kernels)), []
    for played.seed in SEEDS:
        found.append(run(kernels, inputs))
    for results in found[1:]:
        kept = {name: x for name, x in results.items() if (kernels.name, name) != ("cuda-conv", "dweight")}
        assert not list(checks.same(kept, found[0], "order", "another order of threads"))


def inputs_and_probe(kernels: Kernels, name: str, request: pytest.FixtureRequest) -> tuple[Inputs, Probe]:
    """The inputs of a corner, and what changes those of others in it."""
    kernels.run(request)
    case = case_of(kernels, name)
    assert case is not None
    inputs = make_inputs(case)
    probe = probe_of(inputs)
    assert probe is not None
    return inputs, probe


APART = [
    pytest.param(kernels, name, id=f"{kernels}: {name}", marks=kernels.marks)
    for kernels in KERNELS
    for name in ("documents", "fewer tokens than taps", "every key seen")
    if kernels.gradients and case_of(kernels, name) is not None
]


@pytest.mark.parametrize(("kernels", "name"), APART)
def test_gradients_stand_apart(kernels: Kernels, name: str, request: pytest.FixtureRequest) -> None:
    """Those of a document, a sequence or a head have the same bits whatever the others hold, as its output has."""
    inputs, probe = inputs_and_probe(kernels, name, request)
    found, changed = (Call(inputs, kernels.operation, x).run() for x in ({}, probe.values))
    assert not list(checks.same(found, changed, probe.check, probe.text, probe.rows))


NEVER_MEET = [
    pytest.param(kernels, name, id=f"{kernels}: {name}", marks=kernels.marks)
    for kernels in EVERY
    for name in (("ragged", "one program") if kernels.decode else ("fewer tokens than taps", "heads at a time"))
    if case_of(kernels, name) is not None
]


@pytest.mark.parametrize(("kernels", "name"), NEVER_MEET)
def test_nan_stays_in_its_sequence_and_head(kernels: Kernels, name: str, request: pytest.FixtureRequest) -> None:
    inputs, probe = inputs_and_probe(kernels, name, request)
    spoiled = {name: x.masked_fill(x != inputs.values[name], torch.nan) for name, x in probe.values.items()}
    found, changed = (Call(inputs, kernels.operation, x).run(gradients=False) for x in ({}, spoiled))
    assert not list(checks.same(found, changed, probe.check, probe.text, probe.rows))


@on_cpu
@of([*EVERY])
def test_rows_beyond_2_to_the_31(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Numbers from one token, head or sequence to the next, of which offsets do not fit 32 bits."""
    kernels.run(request)
    sizes = {"batch": 3, "heads": 4, "kv_heads": 2, "seq_len": 3, "history": 2, "lengths": (3, 1, 2)}
    case = usual(kernels, **sizes | ({} if kernels.decode else {"query_rows": 3, "history": 0, "lengths": ()}))
    inputs = make_inputs(case)
    want, call = run(kernels, inputs), Call(inputs, kernels.operation)
    for dim in range(3):
        for name in ("q", "k", "v"):
            call.tensors[name] = far_apart(inputs.values[name], dim).requires_grad_(bool(case.wanted))
        assert not list(checks.same(call.run_plainly(), want, "far", f"dimension {dim} beyond 2^31"))


@pytest.mark.gpu
@of([x for x in EVERY if x.backend != EAGER])
@pytest.mark.parametrize("way", ["graph", "stream"])
def test_graphs_and_streams(kernels: Kernels, way: str, request: pytest.FixtureRequest) -> None:
    """A graph is replayed with other numbers than it was captured with."""
    kernels.run(request)
    outcome = try_case(usual(kernels, way=way))
    assert not outcome.wrong
    assert not outcome.refused


@of([x for x in KERNELS if ("conv-attention", x.backend) in UNFIT])
def test_what_a_backend_cannot_run_is_refused(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """By a sentence, which `unsupported` gives beforehand."""
    kernels.run(request)
    for _, head_dim, taps, _ in UNFIT["conv-attention", kernels.backend]:
        case = usual(kernels, seq_len=3, query_rows=3)
        query_taps, key_taps = taps or (case.query_taps, case.key_taps)
        outcome = try_case(
            replace(case, head_dim=head_dim or case.head_dim, query_taps=query_taps, key_taps=key_taps)
        )  # fmt: skip
        assert outcome.refused, case.described()
        assert not outcome.wrong, outcome.wrong


@of([x for x in EVERY if x.backend != EAGER])
def test_compiled_as_one_graph(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Gives the same bits."""
    torch._dynamo.reset()
    kernels.run(request)
    inputs = make_inputs(usual(kernels, seq_len=20, query_rows=20) if not kernels.decode else usual(kernels))
    compiled = {
        name: torch.compile(function, fullgraph=True, backend="aot_eager")
        for name, function in kernels.operation._asdict().items()
        if name != "prefill"
    }
    found = Call(inputs, kernels.operation._replace(**compiled)).run_plainly()
    assert not list(checks.same(found, Call(inputs, kernels.operation).run_plainly(), "compiled", "torch.compile"))
