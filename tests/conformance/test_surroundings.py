"""Properties beside values: order of threads, separation, far memory, graphs, refusals, `torch.compile`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz import checks
from fuzz.calls import Call, Results
from fuzz.cases import UNFIT, FuzzCase
from fuzz.inputs import Inputs, make_inputs
from fuzz.poison import fresh_memory_is_nan
from fuzz.probes import probe_of
from fuzz.trial import try_case
from kernel_inputs import DEVICE, far_apart

from conformance.corners import case_of, corners_of
from conformance.kernels import DECODES, EAGER, KERNELS, Kernels

EVERY = (*KERNELS, *DECODES)
PARTLY = (
    "bands",
    "heads",
    "rows",
    "rows of sm_80",
)  # stages of multi-token attention, beside which Triton's read q, k and v
TAPS = ("query_taps", "key_taps")
LONGEST = 250  # rows of three chunks
LONG: dict[str, tuple[str, dict[str, Any]]] = {  # more tiles than a block has buffers for, or work for all blocks
    "mta-cuda decode": ("many keys", {}),
    "cuda decode": ("one program", {"lengths": (702,), "heads": 9, "kv_heads": 1}),
    "cuda-hopper decode": ("one program", {"lengths": (702,)}),
    "hopper": ("wide heads", {"heads": 4, "kv_heads": 1, "seq_len": 200, "wanted": ()}),
}
SHORT: dict[str, dict[str, Any]] = {"mta-rows": {"seq_len": 45}}  # the cluster's second block has no columns
SEEDS = range(3)  # of the emulator: how threads and copies interleave
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has an order of its own, and no memory that is not there")


def of(chosen: list[Kernels]) -> pytest.MarkDecorator:
    """A test of each of these."""
    return pytest.mark.parametrize("kernels", [pytest.param(x, id=str(x), marks=x.marks) for x in chosen])


def usual(kernels: Kernels, **changes: Any) -> FuzzCase:
    """A case with whole tiles and a rest, or several chunks; of a decode with several programs."""
    usual = ("ragged", "tiles and a rest", "chunks of rows", "heads mixed alone")
    case = case_of(kernels, next(name for name in usual if name in corners_of(kernels)), **changes)
    assert case is not None
    return case


def run(kernels: Kernels, inputs: Inputs) -> Results:
    """With NaN in all memory that nobody has written."""
    with fresh_memory_is_nan():
        return Call(inputs, kernels.operation).run_plainly()


@on_cpu
@of([x for x in EVERY if x.played])
def test_any_order_of_threads(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Gives the same bits; but for the published approach's dweight, which atomics add up."""
    played = kernels.run(request)
    name, changes = LONG.get(str(kernels), ("", {}))
    cases = [usual(kernels, **SHORT.get(str(kernels), {})), case_of(kernels, name, **changes) if name else None]
    for inputs in [make_inputs(case) for case in cases if case is not None]:
        found = []
        for played.seed in SEEDS:
            found.append(run(kernels, inputs))
        for results in found[1:]:
            kept = {name: x for name, x in results.items() if (kernels.name, name) != ("cuda-conv", "dweight")}
            assert not list(checks.same(kept, found[0], "order", "another order of threads"))


NEVER_MEET = [
    pytest.param(kernels, name, id=f"{kernels}: {name}", marks=kernels.marks)
    for kernels in EVERY
    for name in ("ragged", "one program", "fewer tokens than taps", "heads at a time", "groups of heads")
    if name in corners_of(kernels) and case_of(kernels, name) is not None
]


@pytest.mark.parametrize(("kernels", "name"), NEVER_MEET)
def test_nan_stays_in_its_sequence_and_head(kernels: Kernels, name: str, request: pytest.FixtureRequest) -> None:
    kernels.run(request)
    case = case_of(kernels, name)
    assert case is not None
    inputs = make_inputs(case)
    probe = probe_of(inputs)
    assert probe is not None
    spoiled = {name: x.masked_fill(x != inputs.values[name], torch.nan) for name, x in probe.values.items()}
    found, changed = (Call(inputs, kernels.operation, x).run(gradients=False) for x in ({}, spoiled))
    assert not list(checks.same(found, changed, probe.check, probe.text, probe.rows))
    assert kernels.op != "mta" or changed["out"].isnan().any()  # of what is spoiled


@of([x for x in KERNELS if x.op == "mta" and x.gradients and "documents" in corners_of(x)])
def test_a_gradient_of_nan_stays_in_its_document(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Whatever products of tiles and the power of two of float16 have in common."""
    kernels.run(request)
    case = case_of(kernels, "documents", bounds=(0, 9, 20))
    assert case is not None
    inputs = make_inputs(case)
    probe = probe_of(inputs)
    assert probe is not None
    grad = inputs.values["grad_out"]
    spoiled = {"grad_out": grad.masked_fill(probe.values["grad_out"] != grad, torch.nan)}
    found, changed = (Call(inputs, kernels.operation, x).run() for x in ({}, spoiled))
    assert not list(checks.same(found, changed, probe.check, probe.text, probe.rows))


@of([x for x in KERNELS if x.name in ("cuda", "hopper")])
@pytest.mark.parametrize("seq_len", [59, 118, 119, LONGEST])
def test_blocks_and_chunks_of_rows(kernels: Kernels, seq_len: int, request: pytest.FixtureRequest) -> None:
    """Of 6 taps a block has 118 rows: 59 of the first warpgroup's scores, and then the second's."""
    played, heads = kernels.run(request), 3 if seq_len == LONGEST else 1
    for seed in (11, 2) if played and heads > 1 else (0,):  # in which blocks wait for others' rows and scratch
        if played:
            played.seed = seed
        outcome = try_case(usual(kernels, seq_len=seq_len, head_dim=16, heads=heads, kv_heads=heads, probe="none"))
        assert not outcome.wrong


@on_cpu
@of([x for x in EVERY if x.played not in PARTLY])
def test_rows_beyond_2_to_the_31(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Numbers from one token, tap, head or sequence to the next, of which offsets do not fit 32 bits."""
    kernels.run(request)
    sizes = {"lengths": (3, 1, 2)} if kernels.decode else {"batch": 3, "heads": 4, "kv_heads": 2, "seq_len": 3}
    case = usual(kernels, **sizes)
    inputs = make_inputs(case)
    want, call = run(kernels, inputs), Call(inputs, kernels.operation)
    dims = 2 if kernels.name == "mta-cuda" else 3  # which leaves keys that far apart to Triton
    for name in {"q", "k", "v", "weight", "grad_out", "lengths"} & {*inputs.values}:
        call.tensors[name] = far_apart(inputs.values[name], dims).requires_grad_(name in case.wanted)
    assert not list(checks.same(call.run_plainly(), want, "far", "numbers beyond 2^31"))


@pytest.mark.gpu
@of([x for x in EVERY if x.backend != EAGER])
@pytest.mark.parametrize("way", ["graph", "stream"])
def test_graphs_and_streams(kernels: Kernels, way: str, request: pytest.FixtureRequest) -> None:
    """A graph is replayed with other numbers than it was captured with."""
    kernels.run(request)
    outcome = try_case(usual(kernels, way=way))
    assert not outcome.wrong
    assert not outcome.refused


@of([x for x in KERNELS if (x.op, x.backend) in UNFIT and x.played not in (*PARTLY, "mix")])
def test_what_a_backend_cannot_run_is_refused(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """By a sentence, which `unsupported` gives beforehand."""
    kernels.run(request)
    for heads, head_dim, taps, after in UNFIT[kernels.op, kernels.backend]:
        changes = {"heads": heads, "head_dim": head_dim, "post_conv": after} | dict(
            zip(TAPS, taps or (None, None), strict=True)
        )
        case = usual(kernels, seq_len=3, **{name: x for name, x in changes.items() if x is not None})
        outcome = try_case(case)
        assert outcome.refused, case.described()
        assert not outcome.wrong, outcome.wrong


@of([x for x in EVERY if x.backend != EAGER and x.played not in PARTLY])
def test_compiled_as_one_graph(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Gives the same bits."""
    torch._dynamo.reset()
    kernels.run(request)
    inputs = make_inputs(usual(kernels) if kernels.decode else usual(kernels, seq_len=9))
    compiled = {
        name: torch.compile(function, fullgraph=True, backend="aot_eager")
        for name, function in kernels.operation._asdict().items()
        if name != "prefill"
    }
    found = Call(inputs, kernels.operation._replace(**compiled)).run_plainly()
    assert not list(checks.same(found, Call(inputs, kernels.operation).run_plainly(), "compiled", "torch.compile"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["usual", "wide"])
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (10, 128), (16, 96), (16, 128)])
def test_layers_of_the_paper(heads: int, head_dim: int, kind: str) -> None:
    """All parts, or heads mixed alone: by the kernels that are chosen there, in several chunks, and their decode."""
    taps = {"query_taps": 6, "key_taps": 11, "post_conv": (6, 11)} if kind == "usual" else {}
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "dtype": "bf16", "kind": kind} | taps
    for kernels in (x for x in EVERY if x.name == "mta"):
        long = {"lengths": (1, 700, 1490)} if kernels.decode else {"seq_len": 1100, "chunk_rows": 512}
        name = "ragged" if kernels.decode else "chunks of rows"
        case = case_of(kernels, name, **sizes | long)
        assert case is not None
        outcome = try_case(case)
        assert not outcome.wrong, f"{outcome.wrong}\n{case.described()}"


@pytest.mark.gpu
@of([x for x in KERNELS if x.switches is not None])
@pytest.mark.parametrize("keys", [2045, 4096, 16384])
def test_long_rows(kernels: Kernels, keys: int, request: pytest.FixtureRequest) -> None:
    """Of which blocks have a part each, where rows are mixed alone."""
    kernels.run(request)
    case = usual(kernels, seq_len=keys, query_rows=20, heads=16, kv_heads=4, dtype="bf16", probe="none")
    outcome = try_case(case)
    assert not outcome.wrong, f"{outcome.wrong}\n{case.described()}"
