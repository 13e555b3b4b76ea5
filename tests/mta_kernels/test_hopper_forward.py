"""The Hopper forward against float64: on a Hopper GPU if there is one, else in the emulator."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from banded_forwards import ON_HOPPER, forward_by
from emulated_forward import emulated_forward  # noqa: F401
from emulated_hopper import emulator  # noqa: F401
from kernel_inputs import (
    DEVICE,
    assert_as_reference,
    assert_close,
    make,
    relative_error,
    value_and_gradients,
)
from planted_faults import plant

from mta_kernels.backend import Request
from mta_kernels.conv_attention import conv_attention, conv_attention_reference, explain, operators
from mta_kernels.conv_attention.banded import structures
from mta_kernels.conv_attention.hopper import prepare
from mta_kernels.conv_attention.hopper import source as sources
from mta_kernels.conv_attention.hopper.backend import HOPPER
from mta_kernels.conv_attention.hopper.forward import kernel, shape_unsupported
from mta_kernels.conv_attention.hopper.prepare import Preparation, PrepareConstants
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.structures import Rows
from mta_kernels.operation import Convolution, Operation

SEEDS = (0,) if ON_HOPPER else (0, 1, 2)  # of the emulator: how threads and copies interleave
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """`conv_attention` by the Hopper kernel."""
    return forward_by("hopper", request, monkeypatch)


@pytest.fixture
def wide_backward(request: pytest.FixtureRequest) -> None:
    """The backward above head dim 128."""
    if not ON_HOPPER:
        request.getfixturevalue("emulated_forward")


@pytest.mark.parametrize(("turns", "in_turn"), [(1, 3), (2, 2), (5, 1)])
def test_long_works_of_some_heads_go_out_before_short_ones(hopper, monkeypatch, turns: int, in_turn: int) -> None:
    q, k, v, weight = make(1, 3, 3, 190 + turns, 128, (6, 11), BF16)
    monkeypatch.setattr(structures, "L2_BYTES", -(-2 * k.nbytes // turns))
    assert structures.heads_in_l2(k, heads=3) == in_turn
    assert_close(hopper(q, k, v, weight), q, k, v, weight)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_that_begin_beside_the_rows_of_a_second_warpgroup(hopper, causal: bool) -> None:
    """With several tiles of keys that no row of the first sees: its last row is of a document, or between two."""
    for second in (270, 290, 305, 309):
        bounds = [0, 20, 20 + second]
        inputs = make(1, 1, 1, bounds[-1], 128, (6, 11), BF16)
        options = {"causal": causal, "cu_seqlens": torch.tensor(bounds, device=DEVICE)}
        want = conv_attention_reference(*(x.double() for x in inputs), **options)
        for seed in SEEDS:
            assert relative_error(hopper(*inputs, seed=seed, **options), want) < 0.005


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_repeated_calls_in_a_new_thread_and_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, weight = make(1, 2, 2, 200, 64, (6, 11), BF16)

    def call() -> torch.Tensor:
        return conv_attention(q, k, v, weight, backend="hopper")

    want = call()
    monkeypatch.setattr(operators, "CONV_ATTENTION", None)  # a repeated call does without
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))  # which begins without a CUDA context
    thread.start()
    thread.join()
    assert torch.equal(found[0], want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for x in (q, k, v):
        x.neg_()
        graph.replay()
        assert torch.equal(captured, call())


@pytest.mark.parametrize("head_dim", [32, 144])
def test_auto_takes_one_backend_for_forward_and_backward(hopper, wide_backward, head_dim: int) -> None:
    """Triton rounds scores differently: its backward is off with this logsumexp where scores are large."""
    inputs = make(1, 2, 1, 40, head_dim, (3, 5), FP16)
    assert explain(*inputs).backend == "hopper"
    with torch.no_grad():
        hopper_out = conv_attention(*(x.detach().requires_grad_() for x in inputs))
    assert torch.equal(hopper_out, hopper(*inputs))
    leaves = dict(zip(("q", "k", "v", "weight"), (x.detach().requires_grad_() for x in inputs), strict=True))
    assert explain(*leaves.values()).backend == "hopper"
    assert_as_reference(leaves, backend="auto", scale=1.0)
    got, own = (
        value_and_gradients(conv_attention, leaves, hopper_out, backend=backend) for backend in ("auto", "hopper")
    )
    assert all(torch.equal(got[name], own[name]) for name in got)


def test_ranks_train_head_dims_up_to_128(hopper) -> None:
    operation = Operation.of((6, 11), 144)
    why = "head_dim 144 has no backward over ranks here, which goes up to 128"
    for head_dim, gradients, over_ranks in itertools.product((128, 144), (False, True), (False, True)):
        request = Request(operation, DEVICE, BF16, head_dim, gradients, over_ranks=over_ranks)
        assert HOPPER.why_not(request) in (None, why)
        assert (HOPPER.why_not(request) == why) == (head_dim == 144 and gradients and over_ranks)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "taps", "words"),
    [
        (torch.float32, 64, (6, 11), "dtype torch.float32 is not float16 or bfloat16"),
        (BF16, 20, (6, 11), "head_dim 20 is not a multiple of 8 from 16 to 128, or of 16 up to 256"),
        (BF16, 136, (6, 11), "head_dim 136"),
        (BF16, 264, (6, 11), "head_dim 264"),
        (BF16, 64, (9, 11), "9x11 taps are outside 1x1 to 8x17"),
        (BF16, 64, (6, 18), "6x18 taps are outside 1x1 to 8x17"),
    ],
)
def test_what_it_cannot_take_is_told(hopper, dtype, head_dim, taps, words: str) -> None:
    q, k, v, weight = make(1, 1, 1, 8, head_dim, taps, dtype)
    with pytest.raises(ValueError, match=words):
        hopper(q, k, v, weight)
    assert shape_unsupported(BF16, 64, 6, 11) is None


def test_a_cpu_has_no_hopper_instructions() -> None:
    q, k, v, weight = (x.cpu() for x in make(1, 1, 1, 8, 64, (6, 11), BF16))
    with pytest.raises(ValueError, match="need an NVIDIA H100, H200 or GH200, not a cpu device"):
        conv_attention(q, k, v, weight, backend="hopper")


RELEASE, PINGPONG = "block.pipeline.release(next);  //", "if constexpr (PINGPONG)"


@pytest.mark.skipif(ON_HOPPER, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("head_dim", "file", "line", "instead"),
    [
        (64, "consumer", f"warpgroup_barrier(own.warpgroup + 1);\n            {PINGPONG}", PINGPONG),
        (64, "consumer", "if (!next_is_full) block.pipeline.wait(next);\n", ""),
        (128, "consumer", f"if (own.thread == 0 && tile + 1 < end_tile) {RELEASE}", "//"),
        (128, "consumer", f"if (own.thread == 0 && tile + 1 < end_tile) {RELEASE}", f"if (own.thread == 0) {RELEASE}"),
        (128, "consumer", "if (own.stores_halo) {", "if (false) {"),
        (128, "consumer", "if (own.thread == 0) block.pipeline.release(iteration);", ""),
        (128, "consumer", "barrier_wait(block.tile_full + 8 * slot, count / SLOTS & 1);", ""),
        (128, "producer", "if constexpr (QUERY_SLOTS == 1) barrier_wait(block.queries_empty, (count & 1) ^ 1);", ""),
        (64, "producer", "barrier_wait(block.tile_empty + 8 * slot, (use & 1) ^ 1);", ""),
        (128, "consumer", "            barrier_arrive(block.tile_empty + 8 * slot);\n", ""),
    ],
    ids=[
        "no barrier before the convolution",
        "no wait for the next stage",
        "a stage never released",
        "the next work tile's keys released",
        "a halo that is not stored",
        "a work tile's first keys never released",
        "consumers that do not wait for the work tile",
        "queries that are still read",
        "a slot that is still read",
        "a work tile never ends",
    ],
)
def test_the_emulator_finds_what_a_gpu_may_hide(
    hopper, monkeypatch: pytest.MonkeyPatch, tmp_path, head_dim: int, file: str, line: str, instead: str
) -> None:
    plant(monkeypatch, sources, tmp_path, f"forward_{file}.cuh", line, instead)
    kernel.cache_clear()
    # 8 work tiles for the 3 persistent blocks, and 18 of a key tile or two.
    cases = [make(1, heads, 1, seq_len, head_dim, (6, 11), BF16) for heads, seq_len in ((4, 200), (18, 60))]

    def run() -> None:
        for inputs in cases:
            want = conv_attention_reference(*(x.double() for x in inputs))
            for seed in range(8):
                assert relative_error(hopper(*inputs, seed=seed), want) < 0.005
                # A row that reads what nobody wrote is NaN, and computing it again would hide that.
                _, logsumexp = operators.CONV_ATTENTION(*inputs, True, 0.125, 5, 0, None, "hopper")
                assert not (logsumexp.view(torch.int32) & 1).any()

    try:
        with pytest.raises(AssertionError):  # wrong, or what the emulator says: a deadlock and the like
            run()
    finally:
        kernel.cache_clear()


@pytest.mark.parametrize("backward", [False, True])
def test_more_heads_than_a_grid_has_rows(monkeypatch, backward: bool) -> None:
    """A GPU takes 65535 blocks along y, and 2^31 - 1 along x."""
    monkeypatch.setattr(prepare, "kernel", lambda *_: None)
    monkeypatch.setattr(driver, "Launch", lambda kernel, blocks, *_: blocks)
    preparation = Preparation(grad_out=Rows(start=16 if backward else None), heads=2, kv_heads=2, batch=40000)
    x, y = prepare.prepare_launch(PrepareConstants(BF16, 64, Convolution(6, 11, 5)), preparation, 0)
    assert x == (80000 if backward else 2)
    assert y < 2**16


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_65536_heads() -> None:
    q, k, v, weight = (x.requires_grad_() for x in make(32768, 2, 1, 3, 16, (3, 3), BF16))
    got = conv_attention(q, k, v, weight, backend="hopper")
    assert_close(got, q, k, v, weight)
    gradients = torch.autograd.grad(got.sum(), (q, k, v))
    few = [x.detach()[-2:].requires_grad_() for x in (q, k, v)]
    of_few = torch.autograd.grad(conv_attention(*few, weight, backend="hopper").sum(), few)
    assert all(torch.equal(x[-2:], y) for x, y in zip(gradients, of_few, strict=True))
