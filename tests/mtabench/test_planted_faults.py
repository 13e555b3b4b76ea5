"""Planted faults, in conv and in plain attention: each is caught, where and by what its entry says."""

import itertools
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from changed_cases import with_changes
from planted_cells import changed

from mta_kernels.conv_attention import conv_attention_reference
from mta_kernels.operation import Operation
from mta_ladder import attention_reference
from mtabench import registry
from mtabench.checking import sample, verify
from mtabench.checking.judge import Judge
from mtabench.checking.oracle import Check, Oracle
from mtabench.checking.verify import CheckedShape, run_checks
from mtabench.measuring import samplers, timing
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.failures import WrongResultError
from mtabench.measuring.timing import Measurement, Settings
from mtabench.problem.case import Case
from mtabench.problem.inputs import make_inputs
from mtabench.registry import find
from mtabench.results.results_file import read_results
from mtabench.results.writer import Writer
from mtabench.sweeps import sweep
from mtabench.sweeps.plan import Options, make_plan

LATE = 1100
CONV = Case("fwd", "eager", Operation.of((2, 2), 16), "fp32", 1, 2, 1, 1153, 16, None, "cpu")
PLAIN = with_changes(CONV, impl="sdpa-math", taps=None)
OPS = pytest.mark.parametrize("case", [CONV, PLAIN], ids=["conv", "plain"])

PASSES = ("fwd", "bwd", "decode")


def in_turns(faults):
    """Each fault in each pass, of conv and of plain attention in turns: parameters case, pass_, fault and says."""
    pairs = itertools.product(enumerate(faults), enumerate(PASSES))
    return [((CONV, PLAIN)[(i + j) % 2], pass_, *fault) for (i, fault), (j, pass_) in pairs]


@pytest.fixture
def small_sample(monkeypatch):
    """The float64 reference sees few rows, as at the lengths that a GPU times."""
    monkeypatch.setattr(sample, "SCORES", {"cpu": 2**17})
    monkeypatch.setattr(sample, "BACKWARD_SCORES", {"cpu": 2**17})


@pytest.fixture
def no_reference(monkeypatch):
    """All is left to the probes."""
    monkeypatch.setattr(Oracle, "check", lambda self, result: Check(True, 0.0, 1.0))


def judged(case, faulty):
    """What a sweep says before it times `faulty(case, inputs, closure)`, made of the right closure."""
    inputs = make_inputs(case, 0)
    closure = find(case.impl).build(case, inputs)
    return Judge(case, inputs, 0).first_of(faulty(case, inputs, closure), case)


def right(case, inputs, closure):
    return closure


def masked(x, hidden):
    """Attention with scores hidden where `hidden [N, N]` says so, convolved if there is a weight."""
    scores = x.q @ x.k.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1).mT / x.q.shape[3] ** 0.5
    past = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    if x.weight is not None:
        taps = x.weight.shape[1:]
        pad = (taps[1] - 1) // 2
        padded = F.pad(scores.where(past, 0), (pad, taps[1] - 1 - pad, taps[0] - 1, 0))
        scores = F.conv2d(padded, x.weight[:, None], groups=len(x.weight))
    scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ x.v.repeat_interleave(x.q.shape[1] // x.v.shape[1], 1)


def future_leaks_late(case, inputs, closure):
    hidden = torch.ones(case.seq, case.seq, dtype=torch.bool).triu(1)
    rows = torch.arange(LATE, case.seq - 1)
    hidden[rows, rows + 1] = False
    return lambda: masked(inputs, hidden)


def oldest_key_dropped_late(case, inputs, closure):
    hidden = torch.ones(case.seq, case.seq, dtype=torch.bool).triu(1)
    hidden[LATE:, 0] = True
    return lambda: masked(inputs, hidden)


def writes_nothing(case, inputs, closure):
    """Its results are whatever memory the allocator gives it."""
    if case.pass_ != "bwd":
        return lambda: torch.empty_like(inputs.q[:, :, -1:] if case.pass_ == "decode" else inputs.q)
    return lambda: WritesNothing.apply(*inputs.differentiable.values())


class WritesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.shapes = inputs
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx, dout):
        return tuple(map(torch.empty_like, ctx.shapes))


def right_at_first(calls):
    """Right for so many calls of a closure, zero after them."""

    def faulty(case, inputs, closure):
        done = []

        def call():
            done.append(1)
            return closure() if len(done) <= calls else 0 * closure()

        return call

    return faulty


def cached(case, inputs, closure):
    """The first result for ever."""
    kept = []

    def call():
        kept.append(closure())
        return kept[0].clone()

    return call


def same_memory(case, inputs, closure):
    """Right, but written over what it gave before."""
    kept = []

    def call():
        kept.append(closure())
        return kept[0].copy_(kept[-1])

    return call


def rows_swapped_in_an_inner_head(case, inputs, closure):
    def call():
        out = closure().clone()
        out[0, 2, [500, 700]] = out[0, 2, [700, 500]]
        return out

    return call


class Grows(torch.autograd.Function):
    """Its gradient is 1 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def one_percent_off(name):
    def faulty(case, inputs, closure):
        grown = replace(inputs, **{name: Grows.apply(getattr(inputs, name))})
        return find(case.impl).build(case, grown)

    def call(case, inputs, closure):
        return lambda: faulty(case, inputs, closure)()

    return call


@OPS
@pytest.mark.parametrize(
    ("fault", "says"),
    [(future_leaks_late, "it is not causal"), (oldest_key_dropped_late, "the first key does not count")],
)
def test_faults_of_late_rows_are_found_before_a_cell_is_timed(small_sample, no_reference, case, fault, says):
    """Whatever the reference sees: in bf16, rounding hides one key among thousands."""
    check = judged(replace(case, dtype="bf16"), fault)
    assert not check.ok
    assert says in check.reason


@OPS
def test_rows_swapped_in_an_inner_head(small_sample, no_reference, case):
    """Not causal here: else the tokens that may not matter tell first, for most seeds."""
    check = judged(with_changes(case, heads=4, kv_heads=4, seq=720, causal=False), rows_swapped_in_an_inner_head)
    assert not check.ok
    assert "as those of another head" in check.reason


@pytest.mark.parametrize(
    ("case", "pass_", "causal"),
    [(CONV, "fwd", True), (CONV, "bwd", False), (CONV, "decode", True), (PLAIN, "fwd", False), (PLAIN, "bwd", True)],
)
def test_right_results_are_right(small_sample, case, pass_, causal):
    check = judged(with_changes(case, pass_=pass_, causal=causal, seq=130, batch=2), right)
    assert check.ok, check.reason


REMEMBERED = [
    (writes_nothing, "has NaN"),
    (right_at_first(1), ""),
    (cached, "cached"),
    (same_memory, "the memory of the first one's result"),
]


@pytest.mark.parametrize(("case", "pass_", "fault", "says"), in_turns(REMEMBERED))
def test_what_is_remembered_or_never_written(case, pass_, fault, says):
    case = replace(case, pass_=pass_, seq=40)
    if pass_ == "bwd" and fault in (cached, same_memory):
        fault, says = cached_gradients, "cached"
    check = judged(case, fault)
    assert not check.ok
    assert says in check.reason


@OPS
@pytest.mark.parametrize("pass_", PASSES)
def test_one_token_has_one_output_whatever_its_query(case, pass_):
    check = judged(with_changes(case, pass_=pass_, seq=1, heads=1, kv_heads=1), right)
    assert check.ok, check.reason


class Remembered(torch.autograd.Function):
    """Gradients of the first backward for ever."""

    @staticmethod
    def forward(ctx, kept, closure, *leaves):
        ctx.kept, ctx.closure, ctx.leaves = kept, closure, leaves
        return closure().detach()

    @staticmethod
    def backward(ctx, dout):
        if not ctx.kept:
            with torch.enable_grad():
                ctx.kept += torch.autograd.grad(ctx.closure(), ctx.leaves, dout)
        return (None, None, *(gradient.clone() for gradient in ctx.kept))


def cached_gradients(case, inputs, closure):
    kept = []
    return lambda: Remembered.apply(kept, closure, *inputs.differentiable.values())


@pytest.mark.parametrize(
    ("name", "dtype"), [("q", "bf16"), ("k", "bf16"), ("v", "bf16"), ("weight", "bf16"), ("k", "fp16"), ("q", "fp32")]
)
def test_a_gradient_that_is_one_percent_too_large(name, dtype):
    """In bf16 by its size alone: rounding leaves as much of its norm."""
    case = with_changes(CONV, pass_="bwd", dtype=dtype, seq=128, heads=8, kv_heads=8, taps=(6, 11))
    assert judged(case, right).ok
    check = judged(case, one_percent_off(name))
    assert not check.ok
    assert f"d{name}" in check.reason


def read_as_contiguous(x):
    strides = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, strides)


def strides_ignored(case, inputs):
    def call():
        q, k, v = map(read_as_contiguous, (inputs.q, inputs.k, inputs.v))
        if inputs.weight is None:
            return attention_reference(q, k, v, causal=case.operation.causal)
        return conv_attention_reference(q, k, v, inputs.weight, causal=case.operation.causal)

    return call


@pytest.mark.parametrize("name", ["eager", "sdpa-math"])
@pytest.mark.parametrize("strided", ["tokens_first", "expanded"])
def test_strides_that_are_ignored_are_found_by_verify(monkeypatch, name, strided):
    monkeypatch.setattr(verify, "SHAPES", {"cpu": (CheckedShape(1, 4, 2, 17, 16, 4, 3),)})
    monkeypatch.setattr(verify, "LONG_SHAPES", {"cpu": ()})
    monkeypatch.setattr(verify, "DTYPES_CHECKED", {"cpu": ("fp32",)})
    other = "expanded" if strided == "tokens_first" else "tokens_first"
    monkeypatch.setattr(verify, other, lambda inputs, **options: inputs)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", changed(name, build=strides_ignored))
    wrong = {row.check for row in run_checks([name], "cpu") if not row.ok}
    assert {"strided fwd", "strided bwd"} <= wrong
    assert not {"error fwd", "error bwd"} & wrong


@pytest.mark.parametrize(
    ("case", "fault"), [(CONV, future_leaks_late), (PLAIN, oldest_key_dropped_late), (CONV, right_at_first(1))]
)
def test_long_checks_of_verify_find_what_a_sweep_finds(monkeypatch, case, fault):
    monkeypatch.setattr(verify, "SHAPES", {"cpu": ()})
    monkeypatch.setattr(verify, "DTYPES_CHECKED", {"cpu": ("fp32",)})
    right = find(case.impl)
    faulty = replace(right, passes=("fwd",), build=lambda case, inputs: fault(case, inputs, right.build(case, inputs)))
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", (faulty,))
    (row,) = run_checks([case.impl], "cpu")
    assert row.check == "long fwd"
    assert not row.ok


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """The row of a planted implementation in a sweep, beside one that is right and is called before it."""
    monkeypatch.setattr(sweep.timing, "WARM_UP_SECONDS", 0.05)
    monkeypatch.setattr(sweep, "measure_ceilings", lambda device, dtype: Ceilings(1e4, 1e5))  # above any device

    def sweep_of(case, fault, pass_, device="cpu"):
        build = find(case.impl).build

        def target(cell, inputs):
            return fault(cell, inputs, build(replace(cell, impl=case.impl), inputs))

        planted = replace(find(case.impl), name="planted", build=target)
        monkeypatch.setattr(registry, "IMPLEMENTATIONS", (*registry.IMPLEMENTATIONS, planted))
        shape = {"seq": "32", "head_dim": "16", "heads": "2", "conv": "3x3", "dtype": "fp32", "device": device}
        plan = make_plan(Options(pass_, impl=f"{case.impl},planted", **shape))
        path = tmp_path / "out.csv"
        with Writer(path, resume=False) as writer:
            sweep.run(plan, writer, Settings(min_rounds=2, max_rounds=2, samples_per_round=3), Mock())
        rows = read_results(path).set_index("impl")
        assert rows.loc[case.impl, "status"] == "ok", rows.loc[case.impl, "reason"]
        return rows.loc["planted"]

    return sweep_of


def is_timed(device="cpu"):
    """What a call can see: free memory is NaN where it is checked beforehand."""
    free = torch.empty(1 << 14, device=device)
    try:
        poisoned = bool(free.isnan().all())
    except RuntimeError:  # a plan of the call has no memory
        return False
    free.zero_()  # so that it is NaN next time only if somebody fills it again
    return not poisoned


def wrong_when_timed(case, inputs, closure):
    return lambda: 0 * closure() if is_timed(case.device) else closure()


def wrong_on_inputs_of_before(case, inputs, closure):
    """As results of timed calls once were, and results of checked ones never."""
    seen = []

    def call():
        seen[:] = [*seen[-1:], [x.detach().clone() for x in (inputs.q, inputs.k, inputs.v)]]
        return 0 * closure() if len(seen) > 1 and all(map(torch.equal, *seen)) else closure()

    return call


def late_when_timed(case, inputs, closure):
    def call():
        right = closure()
        if not is_timed():
            return right
        out = torch.zeros_like(right)
        threading.Timer(0.02, lambda: out.detach().copy_(right)).start()
        return out

    return call


def changes_inputs_when_timed(case, inputs, closure):
    def call():
        out = closure()
        if is_timed():
            inputs.k.data.mul_(2)
        return out

    return call


class Ahead(torch.autograd.Function):
    """A backward whose gradients the forward has computed, of the dout that it found at a known address."""

    @staticmethod
    def forward(ctx, closure, inputs, *leaves):
        ctx.closure, ctx.leaves, ctx.address = closure, leaves, inputs.dout.data_ptr()
        with torch.enable_grad():
            out = closure()
            ctx.gradients = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
        ctx.out = out
        return out.detach()

    @staticmethod
    def backward(ctx, dout):
        known = dout.data_ptr() == ctx.address
        return None, None, *(ctx.gradients if known else torch.autograd.grad(ctx.out, ctx.leaves, dout))


def gradients_inside_the_forward(case, inputs, closure):
    return lambda: Ahead.apply(closure, inputs, *inputs.differentiable.values())


TIMED_CALL = "right before it was timed, and a timed call is wrong: "


WHEN_TIMED = [
    (writes_nothing, "has NaN"),
    (wrong_when_timed, TIMED_CALL),
    (wrong_on_inputs_of_before, "against float64"),
    (changes_inputs_when_timed, "right before it was timed; when timed it changes its inputs: k"),
]
OF_SOME_PASSES = [
    (CONV, "fwd", late_when_timed, "comes later"),  # what a forward gives late is there for the backward
    (PLAIN, "decode", late_when_timed, "comes later"),
    (CONV, "bwd", gradients_inside_the_forward, TIMED_CALL),
    (PLAIN, "bwd", gradients_inside_the_forward, TIMED_CALL),
]


@pytest.mark.parametrize(("case", "pass_", "fault", "says"), [*in_turns(WHEN_TIMED), *OF_SOME_PASSES])
def test_a_sweep_gives_no_time_to(swept, case, pass_, fault, says):
    """Once a kernel that wrote nothing was 37173 times as fast as eager: it was handed the last right result."""
    row = swept(case, fault, pass_)
    assert row["status"] == "wrong"
    assert says in row["reason"]
    assert row[["median_ms", "speedup"]].isna().all()


def test_a_result_that_is_kept_by_its_inputs_is_of_no_use_to_what_is_timed(swept):
    """It is right, and its time is a call's: no timed call has the inputs of another."""
    kept, known = {}, []

    def by_content(case, inputs, closure):
        def call():
            key = tuple(x.numpy().tobytes() for x in (inputs.q, inputs.k, inputs.v))
            known.append(key in kept)
            return kept.setdefault(key, closure()).clone()

        return call

    assert swept(CONV, by_content, "fwd")["status"] == "ok"
    assert not any(known[-6:])
    assert any(known)


class Recorded:
    """A CUDA graph of a few lines: each replay writes what the closures give into the memory of the first results."""

    def __init__(self, closures, repeats=1):
        self._closures = closures
        self.outputs = [closure() for closure in closures]

    def replay(self):
        for output, closure in zip(self.outputs, self._closures, strict=True):
            output.copy_(closure())


class Clock:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Times a planted fault by events or by a graph over copies of a cache, which are computed on the CPU."""
    for name in ("synchronize", "_sleep", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: nullcontext())
    monkeypatch.setattr(samplers, "capture", Recorded)
    monkeypatch.setattr(timing, "GpuSensor", lambda: SimpleNamespace(read=lambda: (None, None), energy_j=lambda: None))
    monkeypatch.setattr(timing, "cache_flush", lambda device, cache: lambda: None)
    monkeypatch.setattr(timing, "clean_lines", lambda: lambda: None)
    monkeypatch.setattr(timing, "GPU_WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(timing, "l2_bytes", lambda: 3 * 40 * 16 * 4)

    def measured(fault, pass_, page_size=None):
        case = replace(CONV, pass_=pass_, seq=40, page_size=page_size)
        inputs = make_inputs(case, 0)
        before = [x.clone() for x in (inputs.q, inputs.k, inputs.v)]
        judge, right = Judge(case, inputs, 0), find("eager").build

        def build(case, inputs):
            return fault(case, inputs, right(case, inputs))

        cell = replace(timing.timed(replace(case, device="cuda"), build, inputs), watch=judge.watch())
        (found,) = timing.measure({"cell": cell}, "cuda", Settings(min_rounds=2, max_rounds=2)).values()
        for x, y in zip((inputs.q, inputs.k, inputs.v), before, strict=True):
            assert torch.equal(x, y)
        return found

    return measured


def stale_in_a_graph(case, inputs, closure):
    """A replay leaves what there was."""
    first = closure()
    return lambda: first


@pytest.mark.parametrize(
    ("fault", "pass_", "page_size", "says"),
    [
        (right, "fwd", None, ""),
        (right, "bwd", None, ""),
        (right, "decode", None, ""),
        (right, "decode", 16, ""),
        (stale_in_a_graph, "decode", None, "a timed call is wrong"),
        (stale_in_a_graph, "decode", 16, "a timed call is wrong"),
    ],
)
def test_what_a_gpu_would_time_is_judged(as_on_a_gpu, fault, pass_, page_size, says):
    found = as_on_a_gpu(fault, pass_, page_size)
    assert isinstance(found, WrongResultError if says else Measurement), found
    assert says in str(found)
    if not says:
        assert found.timer == ("graph" if pass_ == "decode" else "events")


def writes_nothing_in_a_graph(case, inputs, closure):
    return lambda: torch.empty_like(inputs.q[:, :, -1:]) if torch.cuda.is_current_stream_capturing() else closure()


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    "fault", [writes_nothing, right_at_first(1), wrong_when_timed, cached, same_memory, gradients_inside_the_forward]
)
def test_a_sweep_on_a_gpu_gives_no_time_to(swept, pass_, fault):
    if pass_ == "bwd" and fault in (cached, same_memory):
        fault = cached_gradients
    if pass_ != "bwd" and fault is gradients_inside_the_forward:
        pytest.skip("there are no gradients")
    if pass_ == "decode" and (fault is wrong_when_timed or fault.__qualname__.startswith("right_at_first")):
        fault = writes_nothing_in_a_graph  # a graph calls nobody
    row = swept(CONV, fault, pass_, "cuda")
    assert row["status"] == "wrong", row["reason"]
